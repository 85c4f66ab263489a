"""RecordingProcessGroup: what it counts, its table and its traces."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_doubles import Later
from layered_net import Net, batch
from on_ranks import on_processes
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks
from torch_commhook.process_group import Record, RecordingProcessGroup, merge_traces, register
from torch_commhook.process_group.trace import chrome_trace, lanes, overlaps


def test_records() -> None:
    parent = Later()
    group = RecordingProcessGroup(parent)
    work = group.allreduce([torch.ones(10, 2)])
    with pytest.raises(OSError, match="cable"):
        group.broadcast([torch.ones(3, dtype=torch.float64)])
    barrier = group.barrier()
    first, second, third = group.records
    assert (first.operation, first.op_id, first.dtype) == ("allreduce", 0, torch.float32)
    assert (first.nbytes, first.bytes_sent) == (80, 120)
    assert first.sizes == ((10, 2),) and first.end is None and first.duration is None
    assert isinstance(second.error, OSError) and second.end is not None
    assert third.end is None
    barrier.wait()  # it has no Future
    assert third.end is not None and third.nbytes == 0
    thread = threading.Timer(0.02, parent.futures[0].set_result, args=([torch.ones(10, 2)],))
    thread.start()
    before = time.perf_counter()
    work.wait()
    waited = time.perf_counter() - before
    thread.join()
    # completed after at least the timer's time; woken later than that
    assert first.duration is not None and first.duration >= 0.019
    assert 0 < first.blocked <= waited + 1e-6
    assert group.counters["broadcast"].errors == 1
    total = group.total
    assert (total.calls, total.completed, total.errors, total.nbytes) == (3, 3, 1, 104)
    assert total.seconds == pytest.approx(sum(record.duration for record in group.records))


def test_a_failed_future() -> None:
    parent = Later()
    group = RecordingProcessGroup(parent)
    work = group.allreduce([torch.ones(1)])
    parent.futures[0].set_exception(ValueError("lost"))
    assert isinstance(group.records[0].error, ValueError)
    with pytest.raises(ValueError, match="lost"):
        work.wait()


def test_limit_and_clear() -> None:
    group = RecordingProcessGroup(Later(), limit=3)
    for _ in range(20):
        group.barrier()
    assert [record.op_id for record in group.records] == [17, 18, 19]
    assert len(group._records) < 6
    assert group.counters["barrier"].calls == 20
    late = group.allreduce([torch.ones(1)])
    group.clear()
    assert group.records == [] and group.counters == {}
    group.allreduce([torch.ones(1)])
    group.parent.futures[0].set_result([])
    late.wait()
    counters = group.counters["allreduce"]  # of the one since then alone
    assert (counters.calls, counters.completed, counters.blocked) == (1, 0, 0.0)
    with pytest.raises(ValueError, match="limit must be a positive int, got 0"):
        RecordingProcessGroup(Later(), limit=0)


def test_overlaps_and_lanes() -> None:
    intervals = [(0.0, 4.0), (1.0, 2.0), (1.5, 3.0), (5.0, 6.0), (6.0, 7.0)]
    assert overlaps(intervals) == [2.0, 1.0, 1.5, 0.0, 0.0]
    assert lanes(intervals) == [0, 1, 2, 0, 0]
    assert overlaps([]) == [] and lanes([]) == []
    assert overlaps([(1.0, 1.0)]) == [0.0]


def test_trace(tmp_path: Path) -> None:
    def record(op_id: int, start: float, end: float | None) -> Record:
        return Record("allreduce", op_id, (torch.Size([2]),), torch.float16, 4, 4, start, end)

    trace = chrome_trace([record(0, 1.0, 3.0), record(1, 2.0, None)], rank=5)
    events = trace["traceEvents"]
    assert {event["pid"] for event in events} == {5}
    complete, begun = (event for event in events if event["ph"] in "XB")
    assert (complete["ph"], complete["ts"], complete["dur"]) == ("X", 1e6, 2e6)
    assert begun["ph"] == "B" and begun["tid"] != complete["tid"]
    assert complete["args"]["dtype"] == "float16" and complete["args"]["sizes"] == [[2]]
    paths = []
    for rank in range(2):
        group = RecordingProcessGroup(Later(rank))
        group.barrier().wait()
        paths.append(tmp_path / f"{rank}.json")
        group.save_trace(paths[-1])
    merge_traces(paths, tmp_path / "all.json")
    merged = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert {event["pid"] for event in merged} == {0, 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json", "all.json"]
    paths[0].write_text("[]")
    with pytest.raises(ValueError, match=r"merge_traces: .*0\.json must be a trace"):
        merge_traces(paths, tmp_path / "all.json")


def _past_the_library(group: Any) -> Any:
    def hook(state: Any, bucket: Any) -> Any:
        buffer = bucket.buffer().div_(2)
        future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    return hook


@on_processes
@pytest.mark.parametrize("on_ddp", [True, False])
def test_stats_of_hooks_come_from_it(rank: int, on_ddp: bool) -> None:
    """Counted once where the library counts too, and where only the group can."""
    recording = RecordingProcessGroup(dist.group.WORLD)
    register(recording, "recorded")
    full = sum(parameter.numel() * 4 for parameter in Net().parameters())
    for hook, expected in (
        (hooks.allreduce(), full),
        (hooks.cast(), full // 2),
        (_past_the_library(recording), full),
    ):
        torch.manual_seed(0)
        net: Any = Net()
        if on_ddp:
            net = DDP(net, process_group=recording)
        handle = attach(net, hook, process_group=None if on_ddp else recording)
        recording.clear()
        net(batch(rank)).sum().backward()
        assert handle.stats().bytes_sent_last_step == expected
        assert recording.total.bytes_sent > 0
        handle.remove()


def test_around_a_namespace_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a ProcessGroup, got types\.SimpleNamespace"):
        RecordingProcessGroup(SimpleNamespace())  # type: ignore[arg-type]
