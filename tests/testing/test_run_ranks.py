"""Ranks as threads: their order, what they see, how a run ends, and models that train there."""

from __future__ import annotations

import functools
import random
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layered_net import BUCKET_CAP_MB, Net, batch, gradients_of, train
from on_ranks import on_processes, on_ranks
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from trained_models import KINDS, trained

from torch_commhook import attach, hooks
from torch_commhook.hooks.base import Hook
from torch_commhook.process_group.simulated import scheduler
from torch_commhook.testing import DeadlockError, run_ranks
from torch_commhook.testing import ranks as worlds

pytestmark = pytest.mark.usefixtures("run_ranks_restores")


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


@on_ranks(2)
def test_it_can_be_initialized_again(rank: int) -> None:
    """Groups then have the names of others before, and nothing of what was under way in these."""
    for _ in range(3):
        for _ in range(1 + rank):  # ranks leave their groups at different numbers
            dist.all_reduce(torch.ones(1), group=dist.new_group([rank]))
        assert _sum(rank)[0] == 1.0
        if rank == 0:
            dist.broadcast(torch.ones(5), 0, async_op=True)  # to which the other never comes
        dist.destroy_process_group()
        dist.init_process_group("simulated", store=dist.HashStore(), rank=rank, world_size=2)


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


@on_processes
def test_between_collectives_of_processes(rank: int) -> None:
    for size in (2, 3):
        x = torch.tensor([1.0 + rank])
        dist.all_reduce(x)
        assert x.item() == 3.0
        assert run_ranks(_sum, size)[0][0] == (1.0 if size == 2 else 3.0)


def test_other_threads_see_the_process() -> None:
    def run(rank: int) -> None:
        if rank == 0:
            thread = threading.Thread(target=lambda: seen.append(dist.is_initialized()))
            thread.start()
            thread.join()

    seen: list[bool] = []
    run_ranks(run, 2)
    assert seen == [False]


@on_ranks(3, seeds=3)
def test_two_ranks_that_poll_while_another_asks_for_a_future(rank: int) -> None:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [0, 2], [0, 1])]
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=groups[2], async_op=True).get_future()
        for group in groups[:2]:
            dist.all_reduce(torch.ones(1), group=group)
        return
    work = dist.all_reduce(torch.ones(1), group=groups[rank - 1], async_op=True)
    while not work.is_completed():
        pass
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=groups[2])


# ---- the store -----------------------------------------------------------------------------------


@pytest.fixture
def init_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are made with the store's help."""
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")


@pytest.mark.usefixtures("init_barrier")
@on_ranks(3, seeds=3)
def test_the_store(rank: int) -> None:
    group = dist.new_group()
    store = dist.PrefixStore("own", distributed_c10d._get_default_store())
    arrived = store.add("arrived", 1)
    if rank == 2:
        store.set("key", "value")
        store.multi_set(["a", "b"], ["1", "2"])
    assert store.get("key") == b"value"
    store.wait(["a", "b"], timedelta(seconds=1))
    store.append(f"mine{rank}", "x")
    store.append(f"mine{rank}", "y")
    assert store.multi_get(["a", "b", f"mine{rank}"]) == [b"1", b"2", b"xy"]
    assert store.check(["a"]) and not store.check(["nothing"])
    swap = f"swap{rank}"
    assert store.compare_set(swap, "", "first") == b"first"
    assert store.compare_set(swap, "first", "second") == b"second"
    assert store.compare_set(swap, "first", "third") == b"second"
    assert store.delete_key(swap) and not store.delete_key(swap)
    assert 1 <= arrived <= 3 and store.num_keys() > 3
    dist.barrier(group=group)


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


def test_plans_of_dtensor_end_before_their_thread() -> None:
    """Two threads that free theirs when they have ended can deadlock."""
    found: list[str] = []

    class Plans:
        """In place of those that PyTorch keeps for each thread."""

    def keep(rank: int) -> None:
        plans = Plans()
        weakref.finalize(plans, lambda: found.append(threading.current_thread().name))
        of_thread = worlds.values_of_thread()
        of_thread["__DTensor_fastpath_thread_cache_cleanup"] = plans

    run_ranks(keep, 3)
    assert sorted(found) == ["rank 0", "rank 1", "rank 2"]


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


@on_ranks(3, seeds=5)
def test_collectives_in_callbacks(rank: int) -> None:
    def again(future: Any) -> torch.Tensor:
        (x,) = future.value()
        dist.all_reduce(x)
        return x

    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work.get_future().then(again).wait().item() == 9.0


@on_ranks(4, seeds=5)
def test_polling(rank: int) -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    polls = 0
    while not work.is_completed():
        polls += 1
    assert polls < 50


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


@pytest.mark.parametrize(
    "take",
    [
        lambda future: future.wait(),
        lambda future: future.then(lambda done: done.value()).wait(),  # in C++
        lambda future: torch.futures.wait_all([future]),
    ],
    ids=["wait", "then", "wait_all"],
)
@on_ranks(2, seeds=4)
def test_futures_of_two_groups_in_other_orders(rank: int, take: Callable[[Any], None]) -> None:
    """Each rank begins with another group, and takes the Future before it goes to the other."""
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.tensor([1.0 + rank]), torch.tensor([10.0 + rank])]
    futures = []
    for i in (0, 1) if rank == 0 else (1, 0):
        work = dist.all_reduce(tensors[i], group=groups[i], async_op=True)
        futures.append(work.get_future())
    for future in futures:
        take(future)
    assert [x.item() for x in tensors] == [3.0, 21.0]


@on_ranks(2)
def test_polling_while_another_rank_asks_for_a_future(rank: int) -> None:
    groups = [dist.new_group(), dist.new_group()]
    first = dist.all_reduce(torch.ones(1), group=groups[rank], async_op=True)
    if rank == 0:
        first.get_future()
    else:
        while not first.is_completed():
            pass
    dist.all_reduce(torch.ones(1), group=groups[1 - rank], async_op=True)


def test_any_callable() -> None:
    class Sum:
        def __call__(self, rank: int, term: float) -> float:
            return _sum(rank, term)[0]

    assert run_ranks(Sum(), 2, 1.0) == [3.0, 3.0]
    assert run_ranks(functools.partial(_sum), 1) == [(0.0, 0, 1)]


# ---- models --------------------------------------------------------------------------------------


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _lists(rank: int, kind: str) -> list[Any]:
    return [tensor.tolist() for tensor in trained(rank, kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_as_on_gloo(two_ranks: RankPool, kind: str) -> None:
    expected = two_ranks.run(_lists, kind)
    for seed in range(3):
        assert run_ranks(_lists, 2, kind, seed=seed) == expected


@on_ranks(3)
def test_on_three_ranks(rank: int) -> None:
    local, model = _net(), DDP(_net())
    model(batch(rank, 0)).square().sum().backward()
    for each in range(3):  # what all ranks do, here
        (local(batch(each, 0)).square().sum() / 3).backward()
    for got, expected in zip(gradients_of(model), gradients_of(local), strict=True):
        torch.testing.assert_close(got, expected)


def _ddp(rank: int, backend: str | None) -> list[Any]:
    model: nn.Module = DDP(_net())
    return train(model if backend is None else torch.compile(model, backend=backend), rank)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_ddp(backend: str) -> None:
    eager, compiled = run_ranks(_ddp, 2, None), run_ranks(_ddp, 2, backend)
    for one, other in zip(eager[0], compiled[1], strict=True):
        torch.testing.assert_close(one, other)


def test_a_rank_that_runs_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP waits for its Futures in C++."""
    monkeypatch.setattr(scheduler, "_LOST_LOOKS", 10)

    def run(rank: int) -> None:
        model = DDP(_net(), bucket_cap_mb=BUCKET_CAP_MB)
        loss = model(batch(rank, 0)).square().sum()
        if rank == 0:
            loss.backward()
        else:
            dist.recv(torch.ones(1), 0)

    with pytest.raises(DeadlockError, match="rank 1 waits for recv on group '0'"):
        run_ranks(run, 2)


def test_a_hook_that_fails_on_one_rank() -> None:
    def fail(state: object, bucket: Any) -> Tensor:
        if dist.get_rank() == 1:
            raise KeyError("in the hook")
        dist.all_reduce(bucket.buffer(), group=bucket.process_group())
        return bucket.buffer()

    def run(rank: int) -> None:
        model = _net()
        attach(model, fail, bucket_cap_mb=BUCKET_CAP_MB)
        model(batch(rank, 0)).square().sum().backward()

    with pytest.raises(KeyError, match="in the hook"):
        run_ranks(run, 3)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["DDP", "module", "DDP's own"])
def test_hooks_in_cpp(rank: int, kind: str) -> None:
    """They take tensors from Futures, and not the Python objects that a group puts there."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    if kind == "DDP's own":
        net: Any = DDP(model)
        fp16 = dist.BuiltinCommHookType.FP16_COMPRESS
        dist._register_builtin_comm_hook(net.reducer, fp16)
    else:
        net = DDP(model) if kind == "DDP" else model
        attach(net, hooks.cpp("allreduce"))
    net(torch.full((3,), 1.0 + rank)).sum().backward()
    assert model.weight.grad.flatten().tolist() == [1.5] * 6


# ---- many ranks ----------------------------------------------------------------------------------

LEARNING_RATE = 0.125
STEPS = 2

#: Makers of hooks, with the largest error of an element of the parameters after both steps.
HOOKS: dict[str, tuple[Callable[[], Hook], float]] = {
    "allreduce": (hooks.allreduce, 1e-6),
    "4 bits": (lambda: hooks.blockwise(bits=4), 0.04),
}


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def _batch(rank: int) -> Tensor:
    return torch.linspace(-1, 1, 16).view(2, 8) * (rank % 7)


def _parameters(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _train(rank: int, make: Callable[[], Hook]) -> Tensor:
    model = _model()
    handle = attach(model, make())
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(_batch(rank)).square().mean().backward()
        optimizer.step()
    handle.remove()
    return _parameters(model)


def _train_alone(ranks: int) -> Tensor:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = [model(_batch(rank)).square().mean() for rank in range(ranks)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return _parameters(model)


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("ranks", [128, pytest.param(1024, marks=pytest.mark.long)])
def test_attach_and_train(ranks: int, name: str) -> None:
    make, tolerance = HOOKS[name]
    first, *others = run_ranks(_train, ranks, make, timeout=600)
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, _train_alone(ranks), rtol=0, atol=tolerance)
    assert not torch.allclose(first, _parameters(_model()), rtol=0, atol=2 * tolerance)
