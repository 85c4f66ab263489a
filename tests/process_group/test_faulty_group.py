"""FaultyProcessGroup: its faults and nothing else. RecordingProcessGroup: counts and traces."""

from __future__ import annotations

import json
import math
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_doubles import Later, completed, wait_until
from layered_net import Net, batch
from on_ranks import on_processes
from rank_pool import RankPool
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks, process_group
from torch_commhook.process_group import (
    Corrupt,
    Delay,
    Drop,
    DroppedRankError,
    Fail,
    FaultyProcessGroup,
    Hang,
    InjectedError,
    ProcessGroup,
    Record,
    RecordingProcessGroup,
    merge_traces,
    register,
)
from torch_commhook.process_group.recording import chrome_trace, lanes, overlaps


class Parent(ProcessGroup):
    """Adds one to what it reduces."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        super().__init__(rank, size)
        self.calls: list[Any] = []

    def _done(self, *tensors: Any) -> Any:
        self.calls.append(tensors)
        return completed(list(tensors))

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors[0].add_(1)
        return self._done(*tensors)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        output.copy_(torch.cat([input, input]))
        return self._done(output)

    def barrier(self, opts: Any = None) -> Any:
        return self._done()

    def monitored_barrier(self, *arguments: Any) -> None:
        self.calls.append(arguments)

    def abort(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def test_no_faults() -> None:
    group, x = FaultyProcessGroup(Parent()), torch.zeros(2)
    assert group.allreduce([x]).wait() and x.tolist() == [1, 1]
    assert group.injected == []


def test_fail_once_in_the_third() -> None:
    group = FaultyProcessGroup(Parent(), [Fail(operations="allreduce", skip=2, count=1)])
    for i in range(5):
        x = torch.zeros(1)
        if i == 2:
            with pytest.raises(InjectedError, match="allreduce number 4 fails on rank 0"):
                group.allreduce([x])
            assert x.item() == 0
        else:
            group.allreduce([x])
        group.barrier()
    assert [(each.operation, each.op_id) for each in group.injected] == [("allreduce", 4)]


def test_ones_own_error_also_from_cpp() -> None:
    group = FaultyProcessGroup(Parent(), [Fail(error=ConnectionError("cable"))])
    with pytest.raises(ConnectionError, match="cable"):
        dist.ProcessGroup.allreduce(group, [torch.zeros(1)], dist.AllreduceOptions())
    with pytest.raises(KeyError):
        FaultyProcessGroup(Parent(), [Fail(error=KeyError)]).barrier()


def test_ranks_and_old_names() -> None:
    for rank in range(2):
        group = FaultyProcessGroup(Parent(rank), [Fail(operations=["_allgather_base"], ranks=1)])
        x = torch.zeros(1)
        if rank == 1:
            with pytest.raises(InjectedError, match="all_gather_single number 0"):
                group.all_gather_single(torch.zeros(2), x)
        else:
            group.all_gather_single(torch.zeros(2), x)


def test_probability_and_seed() -> None:
    def happened(seed: int, rank: int = 0) -> list[int]:
        fault = Delay(seconds=0, probability=0.3)
        group = FaultyProcessGroup(Parent(rank), [fault], seed=seed)
        for _ in range(200):
            group.barrier()
        return [each.op_id for each in group.injected]

    assert happened(1) == happened(1)
    assert happened(1) != happened(2)
    assert happened(1) != happened(1, rank=1)
    assert 30 < len(happened(1)) < 90


def test_delay() -> None:
    group = FaultyProcessGroup(Parent(), [Delay(seconds=0.05)])
    start = time.perf_counter()
    group.allreduce([torch.zeros(1)]).wait()
    assert time.perf_counter() - start >= 0.05


@pytest.mark.parametrize("index", [None, 4])
@pytest.mark.parametrize("by_future", [False, True])
def test_corrupt_output(by_future: bool, index: int | None) -> None:
    parent = Parent()
    group = FaultyProcessGroup(parent, [Corrupt(index=index)])
    x = torch.zeros(2, 3)
    work = group.allreduce([x])
    got = work.get_future().wait()[0] if by_future else (work.wait(), x)[1]
    assert work.is_completed() and work.is_success()
    flat = got.flatten().tolist()
    places = [i for i, value in enumerate(flat) if math.isnan(value)]
    assert len(places) == 1 and (index is None or places == [index])
    assert work.wait() and sum(math.isnan(value) for value in x.flatten().tolist()) == 1


def test_corrupt_input() -> None:
    group = FaultyProcessGroup(Parent(), [Corrupt(of="input", value=7.0, index=1)])
    x, output = torch.zeros(2), torch.zeros(4)
    group.all_gather_single(output, x).wait()
    assert x.tolist() == [0, 0]  # the caller's stays as it is
    assert output.tolist() == [0, 7, 0, 7]
    group.allreduce([x]).wait()
    assert x.tolist() == [1, 8]


def test_corrupt_integers_and_sparse_tensors() -> None:
    group = FaultyProcessGroup(Parent(), [Corrupt(index=1)])
    x = torch.zeros(2, dtype=torch.int64)
    group.allreduce([x]).wait()
    assert x.tolist() == [1, 2]
    sparse = torch.tensor([0.0, 1.0, 2.0]).to_sparse()
    group = FaultyProcessGroup(_Unchanged(), [Corrupt(index=1)])
    group.allreduce([sparse]).wait()
    assert sparse._values()[0] == 1 and sparse._values()[1].isnan()


class _Unchanged(Parent):
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._done(*tensors)


def test_an_element_that_is_not_there() -> None:
    work = FaultyProcessGroup(Parent(), [Corrupt(index=6)]).allreduce([torch.zeros(2, 3)])
    with pytest.raises(IndexError, match=r"Corrupt\.index must be below 6, got 6"):
        work.wait()


def test_a_future_that_is_asked_for_after_the_end() -> None:
    group = FaultyProcessGroup(Parent(), [Hang(seconds=500)])
    work = group.allreduce([torch.zeros(1)])
    group.abort()
    with pytest.raises(RuntimeError, match="hung and was aborted"):
        work.get_future().wait()


@pytest.mark.parametrize("how", ["wait", "future", "from C++", "own timeout", "by the operation"])
def test_hang(how: str) -> None:
    parent = Parent()
    group = FaultyProcessGroup(parent, [Hang(seconds=None if how == "by the operation" else 0.05)])
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.05)
    if how == "from C++":
        work = dist.ProcessGroup.allreduce(group, [torch.zeros(1)], options)
    else:
        work = group.allreduce([torch.zeros(1)], options)
    assert parent.calls == [] and not work.is_completed()
    with pytest.raises(TimeoutError, match="allreduce on rank 0 hangs"):
        if how == "future":
            work.get_future().wait()
        elif how == "own timeout":
            work.wait(timedelta(seconds=0.01))
        else:
            work.wait()
    if how != "own timeout":
        assert work.is_completed() and not work.is_success()


def test_hang_of_a_monitored_barrier() -> None:
    group = FaultyProcessGroup(Parent(), [Hang()])
    with pytest.raises(TimeoutError, match="monitored_barrier on rank 0 hangs"):
        group.monitored_barrier(timedelta(seconds=0.02), True)


@pytest.mark.parametrize("end", ["abort", "shutdown"])
def test_what_hangs_can_be_ended(end: str) -> None:
    group = FaultyProcessGroup(Parent(), [Hang(seconds=500)])
    works = [group.allreduce([torch.zeros(1)]) for _ in range(2)]
    future = works[0].get_future()
    thread = threading.Timer(0.02, getattr(group, end))
    thread.start()
    for wait in (works[1].wait, future.wait):
        with pytest.raises(RuntimeError, match="hung and was"):
            wait()
    thread.join(20)
    wait_until(lambda: not any(t.name == "commhook-faults" for t in threading.enumerate()))


def test_the_groups_timeout_is_that_of_what_hangs() -> None:
    group = FaultyProcessGroup(Parent(), [Hang()])
    group._timeout = timedelta(seconds=0.03)
    with pytest.raises(TimeoutError, match=r"longer than 0\.03 s"):
        group.barrier().wait()


def test_drop() -> None:
    group = FaultyProcessGroup(Parent(), [Drop(skip=1, operations="barrier")])
    group.barrier()
    for call in (group.barrier, lambda: group.allreduce([torch.zeros(1)])):
        with pytest.raises(DroppedRankError, match="rank 0 has been dropped"):
            call()
    assert len(group.injected) == 1


#: By a call that is refused: its error.
REFUSED = {
    "Fail(operations='all_reduce')": r"Fail\.operations must be of .*, got 'all_reduce'",
    "Fail(skip=-1)": r"Fail\.skip must be at least 0, got -1",
    "Fail(count=-1)": r"Fail\.count must be at least 0 or None, got -1",
    "Drop(probability=1.5)": r"Drop\.probability must be between 0 and 1, got 1\.5",
    "Delay(seconds=-1)": r"Delay\.seconds must be between 0 and \d+, got -1",
    "Delay(seconds=1e11)": r"Delay\.seconds must be between 0 and \d+, got 1",
    "Delay(seconds='1')": r"Delay\.seconds must be a number, got str",
    "Fail(skip='1')": r"Fail\.skip must be an int, got str",
    "Fail(ranks='0')": r"Fail\.ranks must be of int, one or several",
    "Fail(operations=5)": r"Fail\.operations must be of str",
    "Corrupt(index=-1)": r"Corrupt\.index must be an int of at least 0 or None, got -1",
    "Corrupt(of='both')": r"Corrupt\.of must be 'input' or 'output', got 'both'",
    "Fail(error='x')": r"Fail\.error must be an exception, got str",
    "group(Fault())": "faults must be Delay, Fail, Hang, Corrupt or Drop, got .*Fault",
    "group('allreduce')": "faults must be Delay, .*, got str",
    "group(Fail(ranks=2))": r"Fail\.ranks must be below 2, got 2",
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_is_refused(call: str) -> None:
    names = {**vars(process_group), "group": lambda fault: FaultyProcessGroup(Parent(), [fault])}
    with pytest.raises((TypeError, ValueError), match=f"FaultyProcessGroup: {REFUSED[call]}"):
        eval(call, names)


def _loop(rank: int) -> tuple[str, int]:
    """A training loop that ends when another rank has failed."""
    inner = dist.new_group(timeout=timedelta(seconds=2))
    group = FaultyProcessGroup(inner, [Fail(ranks=1, skip=3)])
    steps = 0
    try:
        for _ in range(6):
            group.allreduce([torch.ones(4)], dist.AllreduceOptions()).wait()
            steps += 1
    except Exception as error:
        return type(error).__name__, steps
    return "done", steps


def test_on_gloo(two_ranks: RankPool) -> None:
    (first, first_steps), (second, second_steps) = two_ranks.run(_loop)
    assert second == "InjectedError" and second_steps == first_steps == 3
    assert first in ("RuntimeError", "DistBackendError")  # Gloo's own timeout
    two_ranks.stop()  # the group's connections are broken


# ---- RecordingProcessGroup -----------------------------------------------------------------------


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
