"""benchmarks/gpu.py without a GPU, and what the harness makes of several processes."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from repository import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    monkeypatch.setattr(gpu, "LOGS", tmp_path)
    return gpu


def row(**values: Any) -> Any:
    from harness import Row

    blank = dict.fromkeys(Row.__dataclass_fields__)
    return Row(**{**blank, "group": "a", "job": "b", "details": {}, **values})


@pytest.mark.parametrize(
    ("log", "status", "passed"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, True),
        ("========= ERROR SUMMARY: 3 errors", 0, False),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, True),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", 0, False),
        ("========= ERROR SUMMARY: 0 errors", 1, False),
        ("the same as on the CPU", 0, False),  # the tool has said nothing
        ("========= Error: Device not supported", 255, None),
    ],
)
def test_a_sanitizer_must_have_found_nothing(
    gpu: ModuleType, log: str, status: int, passed: bool | None
) -> None:
    command = gpu.Command("memcheck", ["sh", "-c", f"echo '{log}'; exit {status}"])
    assert gpu.sanitizer_outcome(command, 20).passed is passed


def test_a_command_ends_with_its_time(gpu: ModuleType) -> None:
    begun = time.monotonic()
    command = gpu.Command("slow", ["sh", "-c", "echo begun; sleep 60 & sleep 60"])
    outcome = command.outcome(1)
    assert time.monotonic() - begun < 30
    assert outcome.passed is False and "begun" in outcome.text


def test_tests_of_a_gpu_are_found(gpu: ModuleType, request: pytest.FixtureRequest) -> None:
    found = gpu.cuda_tests()
    assert {"tests/cuda/test_cuda_bucket.py", "tests/cuda/test_cuda_collectives.py"} <= set(found)
    assert "tests/hooks/test_bucket.py" not in found
    # All that were collected, where all of the tests run.
    items = [item for item in request.session.items if item.get_closest_marker("cuda")]
    assert {str(item.path.relative_to(ROOT)) for item in items} <= set(found)


def test_the_page_tells_what_was_missed(gpu: ModuleType) -> None:
    common = {"group": f"{gpu.ONE_BUCKET}, CUDA", "seconds": 1e-5, "gigabytes_per_second": 3000.0}
    rows = [
        row(**{**common, "job": gpu.COPY, "cpu_seconds": 5e-6}),
        row(
            **{**common, "job": "flatten", "cpu_seconds": 16e-6, "ratio": 0.8},
            baseline=gpu.COPY,
            target=">= 0.9",
            holds=False,
        ),
    ]
    document = {
        **dict.fromkeys(("card", "driver", "torch", "cuda", "python", "commit"), "x"),
        "date": "2026-01-01T00:00:00",
        "parts": [asdict(gpu.Outcome("tests", True, 3.0, "9 passed"))],
        "benchmarks": {"bucket": {"notes": [], "rows": [asdict(each) for each in rows]}},
    }
    text = gpu.page(document)
    assert "0.800 x plain copy, target >= 0.9" in text
    assert "16.0 us of the CPU, at most 15" in text
    assert "9 passed" in text


def test_figures_of_several_processes_are_their_medians(gpu: ModuleType) -> None:
    from harness import merged

    one = row(
        seconds=1.0,
        first_quartile=1.0,
        third_quartile=1.0,
        samples=3,
        gigabytes_per_second=8.0,
        ratio=0.95,
        target=">= 0.9",
        holds=True,
    )
    runs = [
        [one],
        [replace(one, seconds=3.0, ratio=0.8, holds=False)],
        [replace(one, seconds=2.0, ratio=0.85, holds=False)],
    ]
    [result] = merged(runs)
    assert result.seconds == 2.0 and result.samples == 9
    assert result.ratio == 0.85 and result.holds is False
    assert result.details == {"least": 0.8, "most": 0.95}
    with pytest.raises(ValueError, match="other jobs"):
        merged([[one], [replace(one, job="c")]])


def test_no_gpu_is_an_error(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        gpu.main()
    assert raised.value.code == 2


@pytest.mark.parametrize("tests_pass", [True, False])
def test_a_part_that_fails_does_not_keep_the_others(
    gpu: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tests_pass: bool,
) -> None:
    def shell(name: str, text: str) -> Any:
        return gpu.Command(name, ["sh", "-c", text])

    monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(tmp_path), "--commit", "abc"])
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "A Card 9")
    monkeypatch.setattr(gpu, "build", lambda seconds: gpu.Outcome("build", True, 1.0, "built"))
    ending = "echo 9 passed" if tests_pass else "echo 1 failed; exit 1"
    monkeypatch.setattr(gpu, "begin_tests", lambda: shell("tests", ending))
    clean = "echo '========= ERROR SUMMARY: 0 errors'"
    monkeypatch.setattr(gpu, "begin_sanitizers", lambda: [shell("memcheck", clean)])
    copy = row(job=gpu.COPY, seconds=1e-5, cpu_seconds=1e-6, gigabytes_per_second=3000.0)
    documents = {"bucket": {"notes": ["a note"], "rows": [asdict(copy)]}}
    timed = [gpu.Outcome("bench_bucket", True, 1.0, "0 of 0 targets hold")]
    monkeypatch.setattr(gpu, "run_benchmarks", lambda seconds: (timed, documents))

    assert gpu.main() == (0 if tests_pass else 1)
    printed = capsys.readouterr().out
    for name in ("build", "tests", "memcheck", "bench_bucket"):
        assert name in printed
    assert ("1 failed" in printed) is not tests_pass
    [stored] = tmp_path.glob("a-card-9-*.json")
    assert json.loads(stored.read_text())["commit"] == "abc"
    assert "a note" in stored.with_suffix(".md").read_text()
