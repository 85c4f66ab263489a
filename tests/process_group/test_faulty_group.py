"""FaultyProcessGroup: each fault happens where it is told to, and nothing else."""

from __future__ import annotations

import math
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_doubles import completed, wait_until
from rank_pool import RankPool

from torch_commhook import process_group
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
)


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
