"""How a run ends that cannot go on: deadlocks, exceptions, time, and calls that are refused."""

from __future__ import annotations

import _thread
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from repository import ROOT
from torch.distributed import distributed_c10d

from torch_commhook.process_group.simulated import scheduler
from torch_commhook.testing import DeadlockError, MismatchedCollectiveError, run_ranks

pytestmark = pytest.mark.usefixtures("run_ranks_restores")


def _sum(rank: int, *terms: float) -> tuple[float, int, int]:
    x = torch.tensor([float(rank) + sum(terms)])
    dist.all_reduce(x)
    return x.item(), dist.get_rank(), dist.get_world_size()


# ---- ends that are none --------------------------------------------------------------------------


def _message(fn: Callable[[int], Any], ranks: int, seed: int = 0) -> str:
    with pytest.raises(DeadlockError) as raised:
        run_ranks(fn, ranks, seed=seed)
    return str(raised.value)


X = torch.ones(2)


def _crossed_groups(rank: int) -> None:
    groups = [dist.new_group(), dist.new_group()]
    for group in groups if rank == 0 else reversed(groups):
        dist.barrier(group=group)


#: Programs that deadlock, and what each rank does then.
DEADLOCKS: dict[str, tuple[Callable[[int], Any], list[str]]] = {
    "a skipped collective": (
        lambda rank: [dist.all_reduce(torch.ones(3)) for _ in range(1 if rank == 1 else 2)],
        [
            "waits for allreduce 2 on group '0': float32 [3], sum; not there: rank 1",
            "has returned",
            "waits for allreduce 2 on group '0': float32 [3], sum; not there: rank 1",
        ],
    ),
    "crossed receives": (
        lambda rank: dist.recv(X, 1 - rank),
        [
            "waits for recv on group '0': float32 [2] from rank 1, tag 0; not there: rank 1",
            "waits for recv on group '0': float32 [2] from rank 0, tag 0; not there: rank 0",
        ],
    ),
    "crossed sends": (
        lambda rank: dist.send(X, 1 - rank, tag=4),
        [
            "waits for send on group '0': float32 [2] to rank 1, tag 4; not there: rank 1",
            "waits for send on group '0': float32 [2] to rank 0, tag 4; not there: rank 0",
        ],
    ),
    "another tag, and any source": (
        lambda rank: dist.recv(X, None, tag=2) if rank else dist.send(X, 1, tag=1),
        [
            "waits for send on group '0': float32 [2] to rank 1, tag 1; not there: rank 1",
            "waits for recv_anysource on group '0': float32 [2] from any rank, tag 2",
        ],
    ),
    "a barrier": (
        lambda rank: dist.barrier() if rank else None,
        ["has returned", *["waits for barrier 1 on group '0'; not there: rank 0"] * 2],
    ),
    "a monitored barrier": (
        lambda rank: dist.group.WORLD.monitored_barrier() if rank else None,
        ["has returned", *["waits for monitored_barrier 1 on group '0'; not there: rank 0"] * 2],
    ),
    "groups in other orders": (
        _crossed_groups,
        [
            "waits for barrier 1 on group '1'; not there: rank 1",
            "waits for barrier 1 on group '2'; not there: rank 0",
        ],
    ),
    "a future that is never complete": (
        lambda rank: None if rank else dist.all_reduce(X.clone(), async_op=True).get_future(),
        ["waits for allreduce 1 on group '0': float32 [2], sum; not there: rank 1", "has returned"],
    ),
    "a key that nobody sets": (
        lambda rank: None if rank else distributed_c10d._get_default_store().get("key"),
        ["waits for default_pg/0//key in the store", "has returned"],
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", DEADLOCKS)
def test_what_ranks_wait_for(name: str, seed: int) -> None:
    program, ranks = DEADLOCKS[name]
    assert _message(program, len(ranks), seed).splitlines() == [
        "run_ranks: no rank can go on:",
        *(f"  rank {rank} {what}" for rank, what in enumerate(ranks)),
    ]


def test_every_rank_gets_it() -> None:
    seen: list[int] = []

    def run(rank: int) -> None:
        if rank == 2:
            return
        for _ in range(2):  # and nothing else from there on
            with pytest.raises(DeadlockError, match="rank 2 has returned"):
                dist.barrier()
            seen.append(rank)

    assert "rank 2 has returned" in _message(run, 3)
    assert sorted(seen) == [0, 0, 1, 1]


@pytest.mark.parametrize("seed", range(3))
def test_a_wait_in_cpp(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Nothing of ours sees it; the other rank waits for something else."""
    monkeypatch.setattr(scheduler, "_LOST_LOOKS", 10)

    def run(rank: int) -> None:
        other = dist.new_group()
        if rank == 0:
            future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
            future.then(lambda done: done.value()).wait()
        else:
            dist.barrier(group=other)

    assert _message(run, 2, seed).splitlines()[1:] == [
        "  rank 0 is blocked outside of Python, and has not got allreduce 1 on group '0': "
        "float32 [1], sum; not there: rank 1",
        "  rank 1 waits for barrier 1 on group '1'; not there: rank 0",
    ]


# ---- exceptions ----------------------------------------------------------------------------------


class OwnError(Exception):
    pass


@pytest.mark.parametrize("seed", range(3))
def test_an_exception(seed: int) -> None:
    ended: list[int] = []

    def run(rank: int) -> None:
        try:
            dist.all_reduce(torch.ones(1))
            if rank == 1:
                raise OwnError("boo")
            try:
                while True:
                    dist.barrier()
            except Exception:
                ended.append(-1)  # it is none that others handle
        finally:
            ended.append(rank)

    with pytest.raises(OwnError, match=r"^boo") as raised:
        run_ranks(run, 3, seed=seed)
    assert sorted(ended) == [0, 1, 2]
    assert raised.traceback[-1].name == "run"
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__ == ["raised by rank 1 of 3"]


def test_the_first_exception_is_told() -> None:
    def run(rank: int) -> None:
        try:
            dist.barrier()
            if rank == 2:
                raise OwnError("first")
            dist.barrier()
        finally:
            if rank != 2:
                raise OwnError("after it")

    for seed in range(3):
        with pytest.raises(OwnError, match=r"^first"):
            run_ranks(run, 3, seed=seed)


def test_an_exception_before_a_rank_has_run() -> None:
    def run(rank: int) -> None:
        started.append(rank)
        raise OwnError

    started: list[int] = []
    with pytest.raises(OwnError):
        run_ranks(run, 8)
    assert len(started) == 1


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, pytest.skip.Exception])
def test_other_exceptions(kind: type[BaseException]) -> None:
    def run(rank: int) -> None:
        if rank == 0:
            raise kind("out")
        dist.barrier()

    with pytest.raises(kind, match="out"):
        run_ranks(run, 2)


def test_an_exception_in_a_callback() -> None:
    def run(rank: int) -> None:
        def fail(future: Any) -> None:
            raise OwnError("in a callback")

        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(fail).wait()

    with pytest.raises(RuntimeError, match="OwnError: in a callback"):
        run_ranks(run, 2)


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """What a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_interrupted() -> None:
    def run(rank: int) -> None:
        if rank == 0:
            _thread.interrupt_main()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            dist.barrier()

    with pytest.raises(KeyboardInterrupt):
        run_ranks(run, 3)
    assert run_ranks(_sum, 2)[0][0] == 1.0


@pytest.mark.parametrize(
    ("error", "there_are", "seed"),
    [
        *((KeyboardInterrupt("stop"), 2, seed) for seed in range(4)),
        (RuntimeError("can't start new thread"), 0, 0),
        (RuntimeError("can't start new thread"), 3, 0),
    ],
)
def test_a_rank_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, there_are: int, seed: int
) -> None:
    start, started = threading.Thread.start, []

    def some(thread: threading.Thread) -> None:
        if len(started) == there_are:
            raise error
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", some)
    with pytest.raises(type(error), match=str(error)):
        run_ranks(_sum, 5, seed=seed)
    assert len(started) == there_are


# ---- time ----------------------------------------------------------------------------------------


def test_a_rank_that_sleeps() -> None:
    others = threading.Semaphore(0)

    def run(rank: int) -> None:
        try:
            if rank == 1:  # is blocked outside of ours until the others have ended
                assert others.acquire(timeout=20) and others.acquire(timeout=20)
            dist.barrier()
        finally:
            ended.append(rank)
            others.release()

    ended: list[int] = []
    with pytest.raises(TimeoutError) as raised:
        run_ranks(run, 3, timeout=0.5)
    lines = str(raised.value).splitlines()
    assert lines[0] == (
        "run_ranks: rank 1 has run for 0.5 s and neither ended nor reached a collective"
    )
    assert len(lines) == 3 and lines[1].startswith("  rank 0 ")
    assert sorted(ended) == [0, 1, 2] and ended[2] == 1


def test_a_rank_that_cannot_be_ended() -> None:
    """Its thread is left, and touches no group of the process when it goes on."""
    go_on, ended = threading.Event(), threading.Event()
    seen: list[Any] = []

    def run(rank: int) -> None:
        if rank == 0:
            go_on.wait(20)
            try:
                seen.append(dist.get_world_size())
                dist.barrier()
            except BaseException as error:
                seen.append(type(error))
            ended.set()

    with pytest.raises(TimeoutError, match=r"rank 0 has run for 0.5 s"):
        run_ranks(run, 2, timeout=0.5)
    assert not dist.is_initialized()
    go_on.set()
    assert ended.wait(20)
    assert seen == [2, TimeoutError]
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join(20)
    run_ranks(_sum, 1)  # which puts everything back


def test_a_rank_that_computes_for_long_between_collectives() -> None:
    def run(rank: int) -> None:
        for _ in range(4):
            time.sleep(0.1)
            dist.barrier()

    run_ranks(run, 2, timeout=0.5)


# ---- calls that are refused ----------------------------------------------------------------------


def test_inside_of_another() -> None:
    def run(rank: int) -> None:
        run_ranks(_sum, 2)

    with pytest.raises(RuntimeError, match="a rank must not call run_ranks, which is running"):
        run_ranks(run, 2)
    assert run_ranks(_sum, 2)[0][0] == 1.0


def test_beside_another() -> None:
    def run(rank: int) -> None:
        def other() -> None:
            try:
                run_ranks(_sum, 2)
            except RuntimeError as error:
                seen.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    seen: list[str] = []
    run_ranks(run, 1)
    assert seen == ["run_ranks: another thread is running run_ranks; wait until it ends"]


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((3, 2), {}, TypeError, "fn must be callable, got int"),
        ((_sum, "2"), {}, TypeError, "world_size must be an int, got str"),
        ((_sum, True), {}, TypeError, "world_size must be an int, got bool"),
        ((_sum, 0), {}, ValueError, "world_size must be at least 1, got 0"),
        ((_sum, 2), {"seed": 1.5}, TypeError, "seed must be an int, got float"),
        ((_sum, 2), {"timeout": 0}, ValueError, "timeout must be a positive number of s, got 0"),
        (
            (_sum, 2),
            {"timeout": None},
            ValueError,
            "timeout must be a positive number of s, got None",
        ),
    ],
)
def test_wrong_arguments(
    arguments: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"run_ranks: {message}"):
        run_ranks(*arguments, **options)


def test_the_examples_in_the_docs() -> None:
    text = (ROOT / "docs" / "testing.md").read_text()
    names: dict[str, Any] = {}
    raised: list[str] = []
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        try:
            exec(block, names)
        except DeadlockError as error:
            raised.append(f"DeadlockError: {error}\n")
    assert raised == re.findall(r"```\n(DeadlockError.*?)```", text, re.DOTALL)
    x = torch.ones(4)
    with pytest.raises(MismatchedCollectiveError) as mismatch:
        run_ranks(lambda rank: dist.broadcast(x, 0) if rank else dist.all_reduce(x), 2)
    assert f"```\nMismatchedCollectiveError: {mismatch.value}\n```" in text
