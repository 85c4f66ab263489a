"""What benchmarks/gpu reads of a profiler, of sanitizers, and of a card's clock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_runs import items, part_of, stored

from benchmarks.gpu import counters, parts
from benchmarks.gpu.commands import Ended
from benchmarks.gpu.document import page
from benchmarks.gpu.run import Run, do_parts

# ---- tools ---------------------------------------------------------------------------------------


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
        ("========= ERROR SUMMARY: 0 errors", None, False),
    ],
)
def test_a_sanitizer_must_have_found_nothing(
    log: str, status: int | None, passed: bool | None
) -> None:
    assert parts.sanitized(Ended(status, 2.0, log))[0] is passed


COUNTED = """==PROF== Connected to process 12
"ID","Process ID","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum"
"","","","byte","ns"
"0","12","void encode_kernel<BlockwiseBlock>(Arguments)","26,214,400","12,345.5"
"1","12","other_kernel","n/a","1000"
==PROF== Disconnected
"""


def test_counters_are_read() -> None:
    first, second = counters.rows_of(COUNTED)
    assert first["dram_read"] == 26214400 and first["nanoseconds"] == 12345.5
    assert "encode_kernel" in first["kernel"] and first["registers"] is None
    assert second["dram_read"] is None
    assert list(counters.rows_of("==ERROR== no permission")) == []


def plant_tool(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_profiler_without_some_of_the_metrics(
    gpu_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""case "$*" in
*decode*) kill -SEGV $$ ;;
*issue_active*) echo "==ERROR== Failed to find metric"; exit 1 ;;
*) cat <<'END'
{COUNTED}END
esac"""
    plant_tool(tmp_path / "bin", "ncu", script, monkeypatch)
    monkeypatch.setattr(counters, "COUNTED", (("sign(): decode", 2), ("flatten", 1)))
    do_parts(gpu_run, [part_of("counters")])
    assert items(gpu_run, "counters") == {
        "sign(): decode, 2 shards": False,
        "flatten, 1 shards": True,
    }
    rows = stored(gpu_run)["counters"]
    assert [(row["work"], row["dram_read"]) for row in rows] == [
        ("flatten", 26214400.0),
        ("flatten", None),
    ]
    assert "encode_kernel<BlockwiseBlock>" in page(gpu_run.document)

    # A later run that counts a work again replaces its rows.
    gpu_run.document["parts"]["counters"] |= {"finished": False, "items": []}
    do_parts(gpu_run, [part_of("counters")])
    assert stored(gpu_run)["counters"] == rows


def test_a_machine_that_refuses_counters_is_asked_once(
    gpu_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    script = f"""echo call >> {calls}
echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access the counters'
exit 1"""
    plant_tool(tmp_path / "bin", "ncu", script, monkeypatch)
    do_parts(gpu_run, [part_of("counters")])
    assert items(gpu_run, "counters") == {"counters": None}
    assert calls.read_text() == "call\n"


def test_a_sanitizer_that_crashes(
    gpu_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """case "$*" in
*memcheck*) kill -SEGV $$ ;;
*) echo "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;
esac"""
    plant_tool(tmp_path / "bin", "compute-sanitizer", script, monkeypatch)
    do_parts(gpu_run, [part_of("sanitizers")])
    assert items(gpu_run, "sanitizers") == {
        f"{tool}, {part}": tool == "racecheck" for tool in parts.TOOLS for part in parts.SANITIZED
    }


def test_counters_leave_the_card_alone() -> None:
    command = counters.command("ncu", ["a", "b"])
    assert command[command.index("--clock-control") + 1] == "none"


# ---- times on a card -----------------------------------------------------------------------------


class FakeCuda:
    """A card whose kernels take 3 us each, and that refuses to capture a graph or does not."""

    def __init__(self, captures: bool) -> None:
        self.captures, self.now, self.in_graph = captures, 0.0, 0
        self.CUDAGraph = lambda: SimpleNamespace(replay=self.replay)

    def kernel(self) -> None:
        self.in_graph += 1
        self.now += 3e-3

    def replay(self) -> None:
        self.now += 3e-3 * self.in_graph

    @contextmanager
    def graph(self, graph: object) -> Iterator[None]:
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.in_graph = 0
        yield

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def synchronize(self) -> None:
        pass

    def _sleep(self, cycles: int) -> None:
        self.now += cycles / 2e6


@pytest.mark.parametrize(("captures", "how"), [(True, "graph"), (False, "backlog")])
def test_a_call_takes_its_share_of_a_graph(
    captures: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu import times
    from benchmarks.gpu.cases import Work

    cuda = FakeCuda(captures)
    monkeypatch.setattr(times, "torch", SimpleNamespace(cuda=cuda))
    timed = times.Timed("work", [Work(cuda.kernel, [], 8) for _ in range(4)])
    times.prepare_on_gpu(timed)
    assert timed.how == how and len(timed.calls) % 4 == 0
    assert len(timed.host_seconds) == times.HOST_SAMPLES
    assert times.sample_on_gpu(timed) == pytest.approx(3e-6)
