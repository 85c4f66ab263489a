"""Libraries that benchmarks/gpu takes along, and the build where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu_runs import items, part_of, stored

from benchmarks.gpu import carried, parts
from benchmarks.gpu.commands import Task
from benchmarks.gpu.run import Run, do_parts


def test_carried_libraries_must_fit(tmp_path: Path) -> None:
    assert carried.obstacle(tmp_path) == "no libraries were carried"
    library = tmp_path / "_ops.abi3.so"
    library.write_bytes(b"code")
    about = {**carried.stamp(), "libraries": {library.name: carried.digest_of(library)}}
    (tmp_path / carried.STAMP).write_text(json.dumps(about))
    assert carried.obstacle(tmp_path) is None
    for name in carried.stamp():
        (tmp_path / carried.STAMP).write_text(json.dumps({**about, name: "another"}))
        assert f"{name} another" in (carried.obstacle(tmp_path) or "")
    (tmp_path / carried.STAMP).write_text(json.dumps(about))
    library.write_bytes(b"other code")
    assert "is not the one" in (carried.obstacle(tmp_path) or "")


@pytest.mark.parametrize(
    ("obstacle", "loads", "done"),
    [
        (None, True, {"build": True, "library": True}),
        (None, False, {"build": False, "library": False}),
        ("no libraries were carried", False, {"build": False, "library": False}),
    ],
)
def test_a_card_uses_what_was_carried_or_builds(
    gpu_run: Run,
    monkeypatch: pytest.MonkeyPatch,
    obstacle: str | None,
    loads: bool,
    done: dict[str, bool],
) -> None:
    taken = []
    gpu_run.device = "cuda"
    monkeypatch.setattr(carried, "obstacle", lambda: obstacle)
    monkeypatch.setattr(carried, "take", lambda: taken.append(True))

    def library_loads(run: Run) -> bool:
        run.item("library", loads, 0.0, "")
        return loads

    broken = Task("build", ["sh", "-c", "echo no nvcc; exit 1"], 20)
    monkeypatch.setattr(parts, "library_loads", library_loads)
    monkeypatch.setattr(parts, "build_task", lambda run: broken)
    gpu_run.document["library"]["cases"] = []
    do_parts(gpu_run, [part_of("build"), part_of("smoke")])
    assert items(gpu_run, "build") == done and bool(taken) == (obstacle is None)
    if not loads:
        [text] = [
            item["text"]
            for item in stored(gpu_run)["parts"]["build"]["items"]
            if item["name"] == "build"
        ]
        assert "no nvcc" in text and (obstacle or "do not load") in text
        assert stored(gpu_run)["parts"]["smoke"]["text"] == "the library does not load"


def test_a_stamp_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("setup.py", "build_support.py", "pyproject.toml", "cuda/a.cu", "csrc/ops/b.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(carried, "ROOT", tmp_path)
    before = carried.sources_digest()
    (tmp_path / "cuda/README.md").write_text("no source")
    assert carried.sources_digest() == before
    (tmp_path / "cuda/a.cu").write_text("x")
    assert carried.sources_digest() != before
