"""The simulated process group: Gloo's results on two ranks, and what the formulas say on others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from collective_cases import CASES, FUNCTIONAL, REDUCTIONS, reduce_scatter_single, values
from rank_pool import RankPool
from torch import Tensor

from torch_commhook.process_group import SimulatedProcessGroup
from torch_commhook.process_group.operations import COLLECTIVES
from torch_commhook.process_group.simulated import SimulatedProcessGroup as Group
from torch_commhook.testing import run_ranks

ALL = {**CASES, **REDUCTIONS}
Found = list[Tensor] | str


def _every_case(rank: int) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for name in ALL:
        try:
            found[name] = _case(rank, name)
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)
    return found


def _case(rank: int, name: str, group: Any = None) -> list[Tensor]:
    return ALL[name](rank, dist.get_world_size(), group)


@pytest.fixture(scope="module")
def gloo(two_ranks: RankPool) -> list[dict[str, Found]]:
    """What each case gives on each of two ranks; the message where Gloo has none of it."""
    return two_ranks.run(_every_case, timeout=120)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", ALL)
def test_as_gloo(gloo: list[dict[str, Found]], name: str) -> None:
    expected = [found[name] for found in gloo]
    if isinstance(expected[0], str) and "does not support alltoall" in expected[0]:
        pytest.skip("Gloo of this torch has none")
    for got, of_gloo in zip(run_ranks(_case, 2, name), expected, strict=True):
        assert same(got, of_gloo)


def _on_groups(rank: int, name: str) -> list[list[Tensor]]:
    return [_case(rank, name, group) for group in (None, dist.new_group())]


@pytest.mark.parametrize("name", CASES)
def test_on_a_new_group(name: str) -> None:
    for default, new in run_ranks(_on_groups, 4, name):
        assert same(default, new)


# ---- formulas ------------------------------------------------------------------------------------


def _sum(tensors: list[Tensor]) -> Tensor:
    """In the order of ranks."""
    return functools.reduce(torch.add, tensors)


def _of_all(size: int, *shape: int, **options: Any) -> list[Tensor]:
    return [values(rank, *shape, **options) for rank in range(size)]


#: What a rank gets, of how many ranks. test_group_table compares other collectives with Gloo's.
FORMULAS: dict[str, Callable[[int, int], list[Tensor]]] = {
    "all_reduce_coalesced": lambda rank, size: [_sum(_of_all(size, 4)), _sum(_of_all(size, 2, 3))],
    "all_reduce_not_contiguous": lambda rank, size: [_sum(_of_all(size, 4, 6)).t()],
    "broadcast": lambda rank, size: [values(size - 1, 4), values(0, 3, dtype=torch.bool)],
    "reduce": lambda rank, size: (
        [torch.stack(_of_all(size, 5)).amax(0)] if rank == size - 1 else []
    ),
    "all_gather_in_place": lambda rank, size: [torch.cat(_of_all(size, 3))],
    "reduce_scatter": lambda rank, size: [
        _sum([values(10 * other + rank, 3) for other in range(size)])
    ],
    "reduce_scatter_single": lambda rank, size: [
        _sum(_of_all(size, size * 2, 3))[2 * rank : 2 * rank + 2]
    ],
    "ring": lambda rank, size: [values((rank - 1) % size, 4)],
    "any_source": lambda rank, size: _of_all(size, 4)[1:] if rank == 0 else [],
    "futures": lambda rank, size: [2 * _sum(_of_all(size, 2)), 2 * _sum(_of_all(size, 4))],
    "objects": lambda rank, size: [torch.tensor([2 * other for other in range(size)] + [0])],
}


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name: str, size: int) -> None:
    for rank, got in enumerate(run_ranks(_case, size, name)):
        assert same(got, FORMULAS[name](rank, size))


def test_all_collectives_are_there() -> None:
    assert [name for name in COLLECTIVES if name not in vars(Group)] == []


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _ops_on_integers(rank: int) -> dict[str, Tensor]:
    found = {op: values(rank, 50, dtype=torch.int64) for op in OPERATIONS}
    for op, x in found.items():
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
    return found


def test_reduce_operations_over_five_ranks() -> None:
    every = _of_all(5, 50, dtype=torch.int64)
    for found in run_ranks(_ops_on_integers, 5):
        for op, combine in OPERATIONS.items():
            assert torch.equal(found[op], functools.reduce(combine, every)), op


def _more_reductions(rank: int) -> dict[str, list[Any]]:
    found = {}
    half = torch.tensor([1.0, 2.0**-11, 2.0**-11], dtype=torch.float16)[rank].reshape(1)
    dist.all_reduce(half)
    found["rounded at each step"] = half.tolist()
    whole = torch.tensor([-5, 7], dtype=torch.int32)
    dist.all_reduce(whole.mul_(rank), dist.ReduceOp.AVG)
    found["average of integers"] = whole.tolist()
    scaled = torch.full((2,), 3.0)
    dist.all_reduce(scaled, torch._C._distributed_c10d._make_nccl_premul_sum(0.5))
    found["scaled"] = scaled.tolist()
    return found


def test_more_reductions() -> None:
    for found in run_ranks(_more_reductions, 3):
        assert found == {
            "rounded at each step": [1.0],
            "average of integers": [-5, 7],
            "scaled": [4.5, 4.5],
        }


# ---- ways of calling -----------------------------------------------------------------------------

base = dist.ProcessGroup


def _calls(rank: int) -> dict[str, list[Any]]:
    """The same through PyTorch's bindings, which go to the virtual methods, and in short forms."""
    group = dist.group.WORLD
    found: dict[str, Any] = {}
    for name, call in {
        "options": lambda x: group.allreduce([x], dist.AllreduceOptions()),
        "bindings": lambda x: base.allreduce(group, [x], dist.AllreduceOptions()),
        "short": lambda x: group.allreduce(x, dist.ReduceOp.SUM),
        "short binding": lambda x: base.allreduce(group, x, dist.ReduceOp.SUM),
        "nothing more": lambda x: group.allreduce([x]),
    }.items():
        x = torch.full((2,), 1.0 + rank)
        work = call(x)
        assert work.wait(timedelta(seconds=5)) and work.is_completed() and work.is_success()
        assert work.result()[0].tolist() == work.get_future().wait()[0].tolist() == x.tolist()
        found[name] = x.tolist()
    return found


def test_ways_to_a_method() -> None:
    for found in run_ranks(_calls, 3):
        assert set(map(tuple, found.values())) == {(6.0, 6.0)}


def _short_forms(rank: int) -> list[list[float]]:
    group = dist.group.WORLD
    x, y = torch.full((2,), float(rank)), torch.full((2,), float(rank))
    group.broadcast(x, 1).wait()
    group.reduce(y, 0, dist.ReduceOp.MAX).wait()
    outputs = [torch.empty(2) for _ in range(3)]
    group.allgather(outputs, torch.full((2,), float(rank))).wait()
    scattered = torch.empty(2)
    group.scatter(scattered, outputs if rank == 2 else [], 2).wait()
    shared = torch.empty(2)
    group.reduce_scatter(shared, outputs, dist.ReduceOp.SUM).wait()
    group.barrier(timedelta(seconds=1)).wait()
    outputs.append(torch.empty(6))
    base._allgather_base(group, outputs[3], shared).wait()  # an older name
    gathered = torch.empty(6)
    group.gather_single(gathered, shared).wait()
    return [t.tolist() for t in (x, y, *outputs, scattered, gathered if rank == 0 else shared)]


def test_short_forms() -> None:
    for rank, found in enumerate(run_ranks(_short_forms, 3)):
        reduced = 2.0 if rank == 0 else float(rank)
        shared = [0.0, 0.0, 3.0, 3.0, 6.0, 6.0]
        last = shared if rank == 0 else [3.0 * rank] * 2
        expected = [[1.0] * 2, [reduced] * 2, [0.0] * 2, [1.0] * 2, [2.0] * 2]
        assert found == [*expected, shared, [float(rank)] * 2, last]


def _functional(rank: int, name: str, backend: str | None) -> list[Any]:
    x = values(rank, 4)
    run = FUNCTIONAL[name]
    call = run if backend is None else torch.compile(run, backend=backend, fullgraph=True)
    second = dist.new_group()
    assert second.group_name != dist.group.WORLD.group_name
    return [call(x, group.group_name).tolist() for group in (dist.group.WORLD, second)]


@pytest.fixture(scope="module")
def gloo_functional(two_ranks: RankPool) -> list[dict[str, list[Any]]]:
    return two_ranks.run(_every_functional)


def _every_functional(rank: int) -> dict[str, list[Any]]:
    return {name: _functional(rank, name, None) for name in FUNCTIONAL}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_collectives_by_name(
    gloo_functional: list[dict[str, list[Any]]], name: str, backend: str | None
) -> None:
    expected = [found[name] for found in gloo_functional]
    assert run_ranks(_functional, 2, name, backend) == expected


def _outputs_that_are_not_contiguous(rank: int) -> list[list[Any]]:
    gathered, shared = torch.zeros(3, 4).t(), torch.zeros(3, 2).t()
    functions = dist.group.WORLD
    functions.all_gather_single(gathered, values(rank, 2, 3)).wait()
    functions.reduce_scatter_single(shared, gathered).wait()
    stacked = torch.zeros(2, 2, 3)
    functions.all_gather_single(stacked, values(rank, 2, 3)).wait()
    return [gathered.tolist(), shared.tolist(), stacked.flatten(0, 1).tolist()]


def test_outputs_that_are_not_contiguous() -> None:
    gathered = torch.cat(_of_all(2, 2, 3))
    for rank, found in enumerate(run_ranks(_outputs_that_are_not_contiguous, 2)):
        shared = 2 * gathered[2 * rank : 2 * rank + 2]
        assert found == [gathered.tolist(), shared.tolist(), gathered.tolist()]


def _autograd(rank: int) -> list[float]:
    """Collectives write past autograd, as backends do."""
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    version = y._version
    dist.all_reduce(y)
    assert y._version == version
    leaf = torch.ones(2, requires_grad=True)
    dist.all_reduce(leaf.detach())
    dist.broadcast(leaf, 0)
    y.sum().backward()
    return x.grad.tolist() + leaf.tolist()


def test_autograd_sees_nothing() -> None:
    expected = [*(torch.ones(2).exp() * 2).tolist(), 2.0, 2.0]
    assert run_ranks(_autograd, 2) == [expected, expected]


# ---- groups --------------------------------------------------------------------------------------


def _subgroups(rank: int) -> list[Any]:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = halves[rank % 2]
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=own)
    y = torch.tensor([float(rank)])
    dist.broadcast(y, src=2 + rank % 2, group=own)
    assert halves[1 - rank % 2] is dist.GroupMember.NON_GROUP_MEMBER
    split = dist.group.WORLD.split_group([0, 1, 3])
    if split is not None:
        split.allreduce([x]).wait()
        assert (split.size(), split.rank()) == (3, (0, 1, None, 2)[rank])
    group, _ = dist.new_subgroups(2)
    assert dist.get_process_group_ranks(group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    dist.destroy_process_group(group)
    again = dist.new_group([0, 1, 2, 3])
    dist.all_reduce(y, group=again)
    return [x.item(), y.item(), dist.get_rank(own)]


def test_subgroups() -> None:
    # 0 + 2 and 1 + 3, of which ranks 0, 1 and 3 add theirs again.
    assert run_ranks(_subgroups, 4) == [
        [10.0, 10.0, 0],
        [10.0, 10.0, 0],
        [2.0, 10.0, 1],
        [10.0, 10.0, 1],
    ]


def _destroyed(rank: int) -> None:
    group = dist.new_group()
    dist.destroy_process_group(group)
    group.allreduce([torch.ones(1)])


def test_a_destroyed_group() -> None:
    with pytest.raises(RuntimeError, match="allreduce: group '1' has been destroyed"):
        run_ranks(_destroyed, 2)


def _coalesced(rank: int) -> list[Any]:
    group = dist.group.WORLD
    x, y = torch.ones(2), torch.ones(3)
    group.start_coalescing(torch.device("cpu"))
    group.allreduce([x])
    group.send([y], 1 - rank) if rank == 0 else group.recv([y.zero_()], 1 - rank)
    work = group.end_coalescing(torch.device("cpu"))
    work.wait()
    assert work.is_completed() and work.is_success()
    assert [t.tolist() for t in work.get_future().value()] == [x.tolist(), y.tolist()]
    return [x.tolist(), y.tolist(), group._get_sequence_number_for_group()]


def test_coalescing() -> None:
    expected = [[2.0, 2.0], [1.0, 1.0, 1.0], 1]
    assert run_ranks(_coalesced, 2) == [expected, expected]


def _bytes(rank: int) -> dict[str, int]:
    group = dist.group.WORLD
    assert isinstance(group, SimulatedProcessGroup)
    x, four = torch.ones(8), [torch.ones(8) for _ in range(4)]
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce bfloat16": lambda: dist.all_reduce(x.bfloat16()),
        "all_gather": lambda: dist.all_gather(four, x),
        "reduce_scatter": lambda: reduce_scatter_single(torch.empty(2), x),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(8), x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "gather": lambda: dist.gather(x, four if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(x, four if rank == 0 else None, 0),
        "send": lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None,
        "barrier": dist.barrier,
    }
    found = {}
    for name, call in calls.items():
        before = group.bytes_sent
        call()
        found[name] = group.bytes_sent - before
    return found


def test_bytes_sent() -> None:
    for rank, found in enumerate(run_ranks(_bytes, 4)):
        assert found == {
            "all_reduce": 48,
            "all_reduce bfloat16": 24,
            "all_gather": 96,
            "reduce_scatter": 24,
            "all_to_all": 24,
            "broadcast": 24,
            "reduce": 24,
            "gather": 0 if rank == 0 else 32,
            "scatter": 96 if rank == 0 else 0,
            "send": 32 if rank == 0 else 0,
            "barrier": 0,
        }


def test_what_is_waited_for_after_the_run() -> None:
    def run(rank: int) -> list[Any]:
        waits = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        dist.barrier()
        return [waits, work]

    for waits, work in run_ranks(run, 2):
        assert waits.tolist() == [2.0, 2.0]
        assert work.wait() and work.is_completed()
        assert work.get_future().wait()[0].tolist() == [2.0]
