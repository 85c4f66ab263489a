"""A dry run of benchmarks/gpu for tests, its stored results, and its remaining processes."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import parts
from benchmarks.gpu.document import Store, page
from benchmarks.gpu.run import Part, Run


def document(**values: Any) -> dict[str, Any]:
    blank = {"dry_run": True, "date": "2026-01-02T00:00:00", "commit": "x", "sources": "y"}
    lists = {name: [] for name in ("clocks", "times", "counters")}
    tables = {name: {} for name in ("machine", "library", "parts", "benchmarks")}
    return {**blank, "minutes": 1.0, **lists, **tables, **values}


@pytest.fixture
def gpu_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A dry run with two cases and one group to time."""
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setattr(parts, "TIMED_DRY", (("7x1000", 8),))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # planted tests need no plugins
    store = Store(
        document(library={"cases": ["flatten", "unflatten"]}),
        [tmp_path / "results"],
        tmp_path / "document.json",
    )
    return Run(
        store=store,
        device="cpu",
        folder=tmp_path,
        end=time.monotonic() + 1000,
        cores=2,
        tests=tmp_path / "planted",
        test_seconds=3.0,
        patience=10.0,
    )


def stored(run: Run) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run.store.state.read_text())
    [path] = run.store.folders[0].glob("*.json")
    assert json.loads(path.read_text()) == result
    assert path.with_suffix(".md").read_text() == page(result)
    return result


def items(run: Run, part: str) -> dict[str, bool | None]:
    return {item["name"]: item["passed"] for item in stored(run)["parts"][part]["items"]}


def part_of(name: str, **changes: float) -> Part:
    [part] = [part for part in parts.PARTS if part.name == name]
    return Part(part.name, part.function, changes.get("most", 600.0), 0.0, part.needs_library)


def running(pattern: str) -> list[str]:
    """The processes of this machine with commands that match a pattern."""
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True)
    return found.stdout.split()
