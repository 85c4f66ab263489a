"""Ranks as threads: their order, what they see, and how a run ends."""

from __future__ import annotations

import _thread
import functools
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch.distributed import distributed_c10d

from torch_commhook.testing import (
    DeadlockError,
    MismatchedCollectiveError,
    run_ranks,
    scheduler,
)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No thread, no world, no hook of the interpreter."""
    threads, world, hook = threading.enumerate(), distributed_c10d._world, sys.excepthook
    yield
    assert [
        t for t in threading.enumerate() if t not in threads and t.name.startswith("rank")
    ] == []
    assert distributed_c10d._world is world
    assert sys.excepthook is hook


def _sum(rank: int, *terms: float) -> tuple[float, int, int]:
    x = torch.tensor([float(rank) + sum(terms)])
    dist.all_reduce(x)
    return x.item(), dist.get_rank(), dist.get_world_size()


# ---- what ranks see ------------------------------------------------------------------------------


def test_results_in_order_of_rank() -> None:
    assert not dist.is_initialized()
    assert run_ranks(_sum, 3, 1, 2) == [(12.0, 0, 3), (12.0, 1, 3), (12.0, 2, 3)]
    assert not dist.is_initialized()


def test_a_world_of_its_own() -> None:
    def run(rank: int) -> list[Any]:
        assert dist.is_initialized() and dist.get_backend() == "simulated"
        assert dist.group.WORLD.name() == "simulated"
        torch.set_grad_enabled(rank != 1)
        group = dist.new_group([0, 1])
        dist.barrier()
        assert (group is dist.GroupMember.NON_GROUP_MEMBER) == (rank == 2)
        names = sorted(distributed_c10d._world.pg_names.values())
        dist.destroy_process_group()
        assert not dist.is_initialized()
        return [names, torch.is_grad_enabled()]

    assert run_ranks(run, 3) == [[["0", "1"], True], [["0", "1"], False], [["0"], True]]
    assert torch.is_grad_enabled()


def test_it_can_be_initialized_again() -> None:
    """Groups then have the names of others before."""

    def run(rank: int) -> list[float]:
        found = []
        for _ in range(3):
            for _ in range(1 + rank):  # ranks leave their groups at different numbers
                dist.all_reduce(torch.ones(1), group=dist.new_group([rank]))
            found.append(_sum(rank)[0])
            dist.destroy_process_group()
            dist.init_process_group("simulated", store=dist.HashStore(), rank=rank, world_size=2)
        return found

    assert run_ranks(run, 2) == [[1.0, 1.0, 1.0]] * 2


@pytest.mark.usefixtures("one_rank")
def test_beside_a_group_of_the_process() -> None:
    name = dist.group.WORLD.group_name

    def own() -> float:
        x = torch.ones(2)
        functional = torch.ops._c10d_functional
        x = functional.wait_tensor(functional.all_reduce(x, "sum", name))
        dist.all_reduce(x)
        return x.sum().item()

    for _ in range(2):
        assert (dist.get_world_size(), dist.get_backend(), own()) == (1, "gloo", 2.0)
        assert run_ranks(_sum, 3)[2] == (3.0, 2, 3)
        with pytest.raises(DeadlockError):
            run_ranks(lambda rank: dist.barrier() if rank else None, 2)


def _between(rank: int) -> list[float]:
    found = []
    for size in (2, 3):
        x = torch.tensor([1.0 + rank])
        dist.all_reduce(x)
        found += [x.item(), run_ranks(_sum, size)[0][0]]
    return found


def test_between_collectives_of_processes(two_ranks: RankPool) -> None:
    assert two_ranks.run(_between) == [[3.0, 1.0, 3.0, 3.0]] * 2


def test_other_threads_see_the_process() -> None:
    def run(rank: int) -> None:
        if rank == 0:
            thread = threading.Thread(target=lambda: seen.append(dist.is_initialized()))
            thread.start()
            thread.join()

    seen: list[bool] = []
    run_ranks(run, 2)
    assert seen == [False]


# ---- the store -----------------------------------------------------------------------------------


def test_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")  # groups are made with its help then

    def run(rank: int) -> list[Any]:
        group = dist.new_group()
        store = dist.PrefixStore("own", distributed_c10d._get_default_store())
        arrived = store.add("arrived", 1)
        if rank == 2:
            store.set("key", "value")
            store.multi_set(["a", "b"], ["1", "2"])
        got = store.get("key")
        store.wait(["a", "b"], timedelta(seconds=1))
        store.append(f"mine{rank}", "x")
        store.append(f"mine{rank}", "y")
        found = [
            got,
            store.multi_get(["a", "b", f"mine{rank}"]),
            store.check(["a"]),
            store.check(["nothing"]),
            store.compare_set(f"swap{rank}", "", "first"),
            store.compare_set(f"swap{rank}", "first", "second"),
            store.compare_set(f"swap{rank}", "first", "third"),
            store.delete_key(f"swap{rank}"),
            store.delete_key(f"swap{rank}"),
            1 <= arrived <= 3,
            store.num_keys() > 3,
        ]
        dist.barrier(group=group)
        return found

    values = [b"value", [b"1", b"2", b"xy"], True, False, b"first", b"second", b"second"]
    for seed in range(3):
        assert run_ranks(run, 3, seed=seed) == [[*values, True, False, True, True]] * 3


def test_a_key_that_nobody_sets() -> None:
    def run(rank: int) -> None:
        if rank == 0:
            distributed_c10d._get_default_store().get("key")

    assert _message(run, 2).splitlines()[1:] == [
        "  rank 0 waits for default_pg/0//key in the store",
        "  rank 1 has returned",
    ]


# ---- order ---------------------------------------------------------------------------------------


def _events(seed: int, ranks: int = 4) -> list[tuple[int, int]]:
    events: list[tuple[int, int]] = []

    def run(rank: int) -> None:
        for step in range(5):
            events.append((rank, step))
            dist.all_reduce(torch.ones(1))

    run_ranks(run, ranks, seed=seed)
    return events


def test_a_seed_is_an_order() -> None:
    orders = [_events(seed) for seed in range(10)]
    assert orders == [_events(seed) for seed in range(10)]
    assert len(set(map(tuple, orders))) > 5


def test_one_at_a_time() -> None:
    running: list[int] = []

    def run(rank: int) -> None:
        for _ in range(20):
            running.append(rank)
            sum(range(2000))  # many bytecodes, where threads could change
            assert running == [rank]
            running.remove(rank)
            dist.all_reduce(torch.ones(1))

    run_ranks(run, 4)


@pytest.mark.parametrize("seed", range(4))
def test_callbacks_run_on_the_rank_s_own_thread(seed: int) -> None:
    def run(rank: int) -> list[int]:
        ranks: list[int] = []
        groups = [dist.new_group(), dist.new_group()]
        for group in groups if rank == 0 else reversed(groups):  # so that one is incomplete
            future = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()
            done.append(future.done())
            future.then(lambda future: ranks.append(dist.get_rank()))
        dist.barrier()
        return ranks

    done: list[bool] = []
    assert run_ranks(run, 2, seed=seed) == [[0, 0], [1, 1]]
    assert False in done


def test_collectives_in_callbacks() -> None:
    def run(rank: int) -> float:
        def again(future: Any) -> torch.Tensor:
            (x,) = future.value()
            dist.all_reduce(x)
            return x

        work = dist.all_reduce(torch.ones(1), async_op=True)
        return work.get_future().then(again).wait().item()

    for seed in range(5):
        assert run_ranks(run, 3, seed=seed) == [9.0] * 3


def test_polling() -> None:
    def run(rank: int) -> int:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        polls = 0
        while not work.is_completed():
            polls += 1
        return polls

    for seed in range(5):
        assert max(run_ranks(run, 4, seed=seed)) < 50


Plan = tuple[list[list[int]], list[tuple[str, int]]]


def _carry_out(rank: int, plan: Plan) -> float:
    """Collectives on groups that overlap, each waited for in one way or another."""
    members, operations = plan
    groups = [dist.new_group(ranks) for ranks in members]
    total, pending = 0.0, []
    for kind, number in operations:
        if rank not in members[number]:
            continue
        x = torch.tensor([rank + 1.0])
        work = dist.all_reduce(x, group=groups[number], async_op=True)
        pending.append((work.get_future() if kind == "future" else work, x))
        if kind == "poll":
            while not work.is_completed():
                pass
        if kind == "wait":
            for waits, x in pending:
                waits.wait()
                total = 1.1 * total + x.item()  # depends on the order
            pending = []
    for waits, x in pending:
        waits.wait()
        total += x.item()
    return total


@pytest.mark.parametrize("number", range(10))
def test_a_program_gives_the_same_in_any_order(number: int) -> None:
    draw = random.Random(number)
    ranks = draw.choice([2, 3, 5])
    members = [sorted(draw.sample(range(ranks), draw.randint(1, ranks))) for _ in range(4)]
    kinds = ("wait", "later", "future", "poll")
    plan = (members, [(draw.choice(kinds), draw.randrange(4)) for _ in range(40)])
    found = [run_ranks(_carry_out, ranks, plan, seed=seed) for seed in range(4)]
    assert found == [found[0]] * 4


def _crossed(rank: int, take: Callable[[Any], None]) -> list[float]:
    """Each rank begins with another group, and takes the Future before it goes to the other."""
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.tensor([1.0 + rank]), torch.tensor([10.0 + rank])]
    order = (0, 1) if rank == 0 else (1, 0)
    futures = []
    for i in order:
        work = dist.all_reduce(tensors[i], group=groups[i], async_op=True)
        futures.append(work.get_future())
    for future in futures:
        take(future)
    return [x.item() for x in tensors]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "take",
    [
        lambda future: future.wait(),
        lambda future: future.then(lambda done: done.value()).wait(),  # in C++
        lambda future: torch.futures.wait_all([future]),
    ],
    ids=["wait", "then", "wait_all"],
)
def test_futures_of_two_groups_in_other_orders(take: Callable[[Any], None], seed: int) -> None:
    assert run_ranks(_crossed, 2, take, seed=seed) == [[3.0, 21.0]] * 2


def test_polling_while_another_rank_asks_for_a_future() -> None:
    def run(rank: int) -> None:
        groups = [dist.new_group(), dist.new_group()]
        first = dist.all_reduce(torch.ones(1), group=groups[rank], async_op=True)
        if rank == 0:
            first.get_future()
        else:
            while not first.is_completed():
                pass
        dist.all_reduce(torch.ones(1), group=groups[1 - rank], async_op=True)

    run_ranks(run, 2)


# ---- ends that are none --------------------------------------------------------------------------


def _message(fn: Callable[[int], Any], ranks: int, seed: int = 0) -> str:
    with pytest.raises(DeadlockError) as raised:
        run_ranks(fn, ranks, seed=seed)
    return str(raised.value)


@pytest.mark.parametrize("seed", range(3))
def test_a_skipped_collective(seed: int) -> None:
    def run(rank: int) -> None:
        dist.all_reduce(torch.ones(3))
        if rank != 1:
            dist.all_reduce(torch.ones(3))

    assert _message(run, 3, seed) == (
        "run_ranks: no rank can go on:\n"
        "  rank 0 waits for allreduce 2 on group '0': float32 [3], sum; not there: rank 1\n"
        "  rank 1 has returned\n"
        "  rank 2 waits for allreduce 2 on group '0': float32 [3], sum; not there: rank 1"
    )


def test_crossed_messages() -> None:
    def receive(rank: int) -> None:
        x = torch.ones(2)
        dist.recv(x, 1 - rank)
        dist.send(x, 1 - rank)

    def send(rank: int) -> None:
        x = torch.ones(2)
        dist.send(x, 1 - rank, tag=4)
        dist.recv(x, 1 - rank, tag=4)

    assert _message(receive, 2).splitlines()[1:] == [
        "  rank 0 waits for recv on group '0': float32 [2] from rank 1, tag 0; not there: rank 1",
        "  rank 1 waits for recv on group '0': float32 [2] from rank 0, tag 0; not there: rank 0",
    ]
    assert _message(send, 2).splitlines()[1] == (
        "  rank 0 waits for send on group '0': float32 [2] to rank 1, tag 4; not there: rank 1"
    )


def test_another_tag_and_any_source() -> None:
    def run(rank: int) -> None:
        x = torch.ones(2)
        if rank == 0:
            dist.send(x, 1, tag=1)
        else:
            dist.recv(x, None, tag=2)

    assert _message(run, 2).splitlines()[1:] == [
        "  rank 0 waits for send on group '0': float32 [2] to rank 1, tag 1; not there: rank 1",
        "  rank 1 waits for recv_anysource on group '0': float32 [2] from any rank, tag 2",
    ]


@pytest.mark.parametrize("barrier", ["barrier", "monitored_barrier"])
def test_a_barrier_that_a_rank_does_not_come_to(barrier: str) -> None:
    def run(rank: int) -> None:
        if rank:
            work = getattr(dist.group.WORLD, barrier)()
            if work is not None:
                work.wait()

    assert _message(run, 3).splitlines()[1:] == [
        "  rank 0 has returned",
        f"  rank 1 waits for {barrier} 1 on group '0'; not there: rank 0",
        f"  rank 2 waits for {barrier} 1 on group '0'; not there: rank 0",
    ]


def test_groups_in_other_orders() -> None:
    def run(rank: int) -> None:
        groups = [dist.new_group(), dist.new_group()]
        for group in groups if rank == 0 else reversed(groups):
            dist.barrier(group=group)

    assert _message(run, 2).splitlines()[1:] == [
        "  rank 0 waits for barrier 1 on group '1'; not there: rank 1",
        "  rank 1 waits for barrier 1 on group '2'; not there: rank 0",
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


def test_a_future_that_is_never_complete() -> None:
    def run(rank: int) -> None:
        if rank == 0:
            dist.all_reduce(torch.ones(1), async_op=True).get_future()

    assert "waits for allreduce 1 on group '0'" in _message(run, 2)


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


def test_interrupted() -> None:
    def run(rank: int) -> None:
        if rank == 0:
            _thread.interrupt_main()
        while True:
            dist.barrier()

    with pytest.raises(KeyboardInterrupt):
        run_ranks(run, 3)
    assert run_ranks(_sum, 2)[0][0] == 1.0


@pytest.mark.parametrize("there_are", [0, 3])
def test_no_more_threads(monkeypatch: pytest.MonkeyPatch, there_are: int) -> None:
    start, started = threading.Thread.start, []

    def some(thread: threading.Thread) -> None:
        if len(started) == there_are:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", some)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run_ranks(_sum, 5)
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
        run_ranks(run, 3, timeout=0.1)
    lines = str(raised.value).splitlines()
    assert lines[0] == (
        "run_ranks: rank 1 has run for 0.1 s and neither ended nor come to a collective"
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

    with pytest.raises(TimeoutError, match=r"rank 0 has run for 0.05 s"):
        run_ranks(run, 2, timeout=0.05)
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
            time.sleep(0.03)
            dist.barrier()

    run_ranks(run, 2, timeout=0.2)


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
    assert seen == ["run_ranks: one must end before the next, and another thread runs one"]


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


def test_any_callable() -> None:
    class Sum:
        def __call__(self, rank: int, term: float) -> float:
            return _sum(rank, term)[0]

    assert run_ranks(Sum(), 2, 1.0) == [3.0, 3.0]
    assert run_ranks(functools.partial(_sum), 1) == [(0.0, 0, 1)]


def test_the_examples_in_the_docs() -> None:
    text = (Path(__file__).parents[1] / "docs" / "testing.md").read_text()
    names: dict[str, Any] = {}
    raised: list[str] = []
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        try:
            exec(block, names)
        except DeadlockError as error:
            raised.append(f"DeadlockError: {error}\n")
    assert raised == re.findall(r"```\n(DeadlockError.*?)```", text, re.DOTALL)


def test_the_mismatch_in_the_docs() -> None:
    def run(rank: int) -> None:
        dist.broadcast(torch.ones(4), 0) if rank else dist.all_reduce(torch.ones(4))

    text = (Path(__file__).parents[1] / "docs" / "testing.md").read_text()
    with pytest.raises(MismatchedCollectiveError) as raised:
        run_ranks(run, 2)
    assert f"```\nMismatchedCollectiveError: {raised.value}\n```" in text
