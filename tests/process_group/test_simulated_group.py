"""The simulated process group: Gloo's results, formulas, and collectives that it refuses."""

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
from on_ranks import on_ranks
from rank_pool import RankPool
from refusals import assert_refused
from torch import Tensor

from torch_commhook.process_group import SimulatedProcessGroup
from torch_commhook.process_group.operations import COLLECTIVES
from torch_commhook.process_group.simulated import SimulatedProcessGroup as Group
from torch_commhook.testing import MismatchedCollectiveError, run_ranks

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


@on_ranks(4)
@pytest.mark.parametrize("name", CASES)
def test_on_a_new_group(rank: int, name: str) -> None:
    assert same(_case(rank, name), _case(rank, name, dist.new_group()))


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


@on_ranks(5)
def test_reduce_operations_over_five_ranks(rank: int) -> None:
    every = _of_all(5, 50, dtype=torch.int64)
    for op, combine in OPERATIONS.items():
        x = every[rank].clone()
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        assert torch.equal(x, functools.reduce(combine, every)), op


@on_ranks(3)
def test_more_reductions(rank: int) -> None:
    half = torch.tensor([1.0, 2.0**-11, 2.0**-11], dtype=torch.float16)[rank].reshape(1)
    dist.all_reduce(half)
    assert half.tolist() == [1.0]  # rounded at each step
    whole = torch.tensor([-5, 7], dtype=torch.int32)
    dist.all_reduce(whole.mul_(rank), dist.ReduceOp.AVG)
    assert whole.tolist() == [-5, 7]
    scaled = torch.full((2,), 3.0)
    dist.all_reduce(scaled, torch._C._distributed_c10d._make_nccl_premul_sum(0.5))
    assert scaled.tolist() == [4.5, 4.5]


# ---- ways of calling -----------------------------------------------------------------------------

base = dist.ProcessGroup


@on_ranks(3)
def test_ways_to_a_method(rank: int) -> None:
    """The same through PyTorch's bindings, which go to the virtual methods, and in short forms."""
    group = dist.group.WORLD
    for call in (
        lambda x: group.allreduce([x], dist.AllreduceOptions()),
        lambda x: base.allreduce(group, [x], dist.AllreduceOptions()),
        lambda x: group.allreduce(x, dist.ReduceOp.SUM),
        lambda x: base.allreduce(group, x, dist.ReduceOp.SUM),
        lambda x: group.allreduce([x]),
    ):
        x = torch.full((2,), 1.0 + rank)
        work = call(x)
        assert work.wait(timedelta(seconds=5)) and work.is_completed() and work.is_success()
        assert work.result()[0].tolist() == work.get_future().wait()[0].tolist() == [6.0, 6.0]
        assert x.tolist() == [6.0, 6.0]


@on_ranks(3)
def test_short_forms(rank: int) -> None:
    group, own = dist.group.WORLD, torch.full((2,), float(rank))
    x, y = own.clone(), own.clone()
    group.broadcast(x, 1).wait()
    group.reduce(y, 0, dist.ReduceOp.MAX).wait()
    assert (x.tolist(), y.tolist()) == ([1.0] * 2, [2.0 if rank == 0 else float(rank)] * 2)
    outputs = [torch.empty(2) for _ in range(3)]
    group.allgather(outputs, own).wait()
    scattered, shared = torch.empty(2), torch.empty(2)
    group.scatter(scattered, outputs if rank == 2 else [], 2).wait()
    assert torch.equal(scattered, own)
    group.reduce_scatter(shared, outputs, dist.ReduceOp.SUM).wait()
    assert torch.equal(shared, 3 * own)
    assert [output.tolist() for output in outputs] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
    group.barrier(timedelta(seconds=1)).wait()
    everything, gathered = torch.empty(6), torch.full((6,), -1.0)
    base._allgather_base(group, everything, shared).wait()  # an older name
    group.gather_single(gathered, shared).wait()
    assert everything.tolist() == [0.0, 0.0, 3.0, 3.0, 6.0, 6.0]
    assert gathered.tolist() == (everything.tolist() if rank == 0 else [-1.0] * 6)


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


@on_ranks(2)
def test_outputs_that_are_not_contiguous(rank: int) -> None:
    group, own = dist.group.WORLD, values(rank, 2, 3)
    expected = torch.cat(_of_all(2, 2, 3))
    gathered, shared, stacked = torch.zeros(3, 4).t(), torch.zeros(3, 2).t(), torch.zeros(2, 2, 3)
    group.all_gather_single(gathered, own).wait()
    group.reduce_scatter_single(shared, gathered).wait()
    group.all_gather_single(stacked, own).wait()
    assert torch.equal(gathered, expected) and torch.equal(stacked.flatten(0, 1), expected)
    assert torch.equal(shared, 2 * own)


@on_ranks(2)
def test_autograd_sees_nothing(rank: int) -> None:
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
    assert torch.equal(x.grad, torch.ones(2).exp() * 2)
    assert leaf.tolist() == [2.0, 2.0]


# ---- groups --------------------------------------------------------------------------------------


@on_ranks(4)
def test_subgroups(rank: int) -> None:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = halves[rank % 2]
    assert dist.get_rank(own) == rank // 2
    x, y = torch.tensor([float(rank)]), torch.tensor([float(rank)])
    dist.all_reduce(x, group=own)
    dist.broadcast(y, src=2 + rank % 2, group=own)
    assert halves[1 - rank % 2] is dist.GroupMember.NON_GROUP_MEMBER
    split = dist.group.WORLD.split_group([0, 1, 3])
    if split is not None:
        split.allreduce([x]).wait()
        assert (split.size(), split.rank()) == (3, (0, 1, None, 2)[rank])
    assert x.item() == (2.0 if rank == 2 else 10.0)  # 0 + 2; else ranks 0, 1 and 3 add theirs again
    group, _ = dist.new_subgroups(2)
    assert dist.get_process_group_ranks(group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    dist.destroy_process_group(group)
    again = dist.new_group([0, 1, 2, 3])
    dist.all_reduce(y, group=again)
    assert y.item() == 10.0


@on_ranks(2)
def test_a_destroyed_group(rank: int) -> None:
    group = dist.new_group()
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="allreduce: group '1' has been destroyed"):
        group.allreduce([torch.ones(1)])


@on_ranks(2)
def test_coalescing(rank: int) -> None:
    group = dist.group.WORLD
    x, y = torch.ones(2), torch.ones(3)
    group.start_coalescing(torch.device("cpu"))
    group.allreduce([x])
    group.send([y], 1 - rank) if rank == 0 else group.recv([y.zero_()], 1 - rank)
    work = group.end_coalescing(torch.device("cpu"))
    work.wait()
    assert work.is_completed() and work.is_success()
    assert [t.tolist() for t in work.get_future().value()] == [x.tolist(), y.tolist()]
    assert (x.tolist(), y.tolist()) == ([2.0, 2.0], [1.0, 1.0, 1.0])
    assert group._get_sequence_number_for_group() == 1


@on_ranks(4)
def test_bytes_sent(rank: int) -> None:
    group = dist.group.WORLD
    assert isinstance(group, SimulatedProcessGroup)
    x, four = torch.ones(8), [torch.ones(8) for _ in range(4)]
    is_root = rank == 0
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "all_reduce": (lambda: dist.all_reduce(x), 48),
        "all_reduce bfloat16": (lambda: dist.all_reduce(x.bfloat16()), 24),
        "all_gather": (lambda: dist.all_gather(four, x), 96),
        "reduce_scatter": (lambda: reduce_scatter_single(torch.empty(2), x), 24),
        "all_to_all": (lambda: dist.all_to_all_single(torch.empty(8), x), 24),
        "broadcast": (lambda: dist.broadcast(x, 0), 24),
        "reduce": (lambda: dist.reduce(x, 0), 24),
        "gather": (lambda: dist.gather(x, four if is_root else None, 0), 0 if is_root else 32),
        "scatter": (lambda: dist.scatter(x, four if is_root else None, 0), 96 * is_root),
        "send": (
            lambda: [dist.send, dist.recv][rank](x, 1 - rank) if rank < 2 else None,
            32 * is_root,
        ),
        "barrier": (dist.barrier, 0),
    }
    for name, (call, sent) in calls.items():
        before = group.bytes_sent
        call()
        assert group.bytes_sent - before == sent, name


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


# ---- what ranks must not issue -------------------------------------------------------------------

X, HALVES = torch.ones(4), [2, 2]
ones = torch.ones

#: The calls of rank 0 and rank 1, by their names in the error.
MISMATCHES: dict[str, dict[str, Callable[[], Any]]] = {
    "operation": {
        "allreduce of float32 [4], sum": lambda: dist.all_reduce(ones(4)),
        "broadcast of float32 [4] from rank 0": lambda: dist.broadcast(ones(4), 0),
    },
    "size": {
        "allreduce of float32 [4], sum": lambda: dist.all_reduce(ones(4)),
        "allreduce of float32 [2, 3], sum": lambda: dist.all_reduce(ones(2, 3)),
    },
    "dtype": {
        "allreduce of float32 [4], sum": lambda: dist.all_reduce(ones(4)),
        "allreduce of float64 [4], sum": lambda: dist.all_reduce(ones(4).double()),
    },
    "reduce operation": {
        "allreduce of float32 [4], sum": lambda: dist.all_reduce(ones(4)),
        "allreduce of float32 [4], max": lambda: dist.all_reduce(ones(4), dist.ReduceOp.MAX),
    },
    "root": {
        "broadcast of float32 [4] from rank 0": lambda: dist.broadcast(ones(4), 0),
        "broadcast of float32 [4] from rank 1": lambda: dist.broadcast(ones(4), 1),
    },
    "splits": {
        f"all_to_all_single of float32, sends [2, 2] and gets {gets}": (
            lambda gets=gets: dist.all_to_all_single(ones(sum(gets)), ones(4), gets, HALVES)
        )
        for gets in ([2, 1], [2, 2])
    },
    "rows": {
        f"all_to_all_single of float32, rows of {row}, sends [1, 1] and gets [1, 1]": (
            lambda row=row: dist.all_to_all_single(ones(2, row), ones(2, row))
        )
        for row in (3, 4)
    },
    "number of tensors": {
        f"allreduce_coalesced of float32 [4]{more}, sum": (
            lambda more=more: dist.group.WORLD.allreduce_coalesced(
                [ones(4), ones(2)][: 1 + bool(more)]
            )
        )
        for more in (", float32 [2]", "")
    },
    "gather": {
        "gather of float32 [4] to rank 0": lambda: dist.gather(ones(4), [ones(4), ones(4)], 0),
        "gather of float32 [3] to rank 0": lambda: dist.gather(ones(3), None, 0),
    },
    "barrier": {
        "barrier": dist.barrier,
        "allreduce of float32 [1], sum": lambda: dist.all_reduce(ones(1)),
    },
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatches(name: str, seed: int) -> None:
    (first, on_first), (second, on_second) = MISMATCHES[name].items()
    seen: list[tuple[int, str]] = []

    def run(rank: int) -> None:
        dist.barrier()
        with pytest.raises(MismatchedCollectiveError) as raised:
            (on_first, on_second)[rank]()
            dist.barrier()
        seen.append((rank, str(raised.value)))

    with pytest.raises(MismatchedCollectiveError) as raised:
        run_ranks(run, 2, seed=seed)
    message = f"collective 2 on group '0' is not the same: rank 0: {first}; rank 1: {second}"
    assert str(raised.value) == message
    assert sorted(seen) == [(0, message), (1, message)]


def test_a_mismatched_message() -> None:
    def run(rank: int) -> None:
        if rank == 2:
            dist.send(ones(4), 0, tag=7)
        elif rank == 0:
            dist.recv(ones(3), 2, tag=7)

    with pytest.raises(MismatchedCollectiveError) as raised:
        run_ranks(run, 3)
    assert str(raised.value) == (
        "on group '0' is not the same: rank 0: recv of float32 [3] from rank 2, tag 7; "
        "rank 2: send of float32 [4] to rank 0, tag 7"
    )


@on_ranks(2)
def test_shapes_may_differ_where_sizes_do_not(rank: int) -> None:
    x = torch.arange(6.0).view((2, 3) if rank else (6,))
    dist.all_reduce(x)
    assert x.flatten().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


REFUSED = """\
group.allreduce([3])
    TypeError: allreduce: tensors must be tensors, got int
group.allreduce(3)
    TypeError: allreduce: tensors must be a list of tensors, got int
group.allreduce([X, X])
    ValueError: allreduce: tensors must be 1 tensors, got 2
group.allreduce([X], "sum")
    TypeError: allreduce: op must be a ReduceOp, got str
group.allreduce([X], op.BAND)
    ValueError: allreduce: op must be one for tensors of torch.float32, got band
group.allreduce([X.to(torch.complex64)], op.MAX)
    ValueError: allreduce: op must be one for tensors of torch.complex64, got max
group.allreduce([X.to(torch.float8_e4m3fn)])
    ValueError: allreduce: op must be one for tensors of torch.float8_e4m3fn, got sum
group.broadcast([X.to_sparse()], 0)
    TypeError: broadcast: tensors must be dense (torch.strided), got layout torch.sparse_coo
group.allreduce([X.to_sparse()], op.MAX)
    ValueError: allreduce: op must be sum for sparse tensors, got max
group.broadcast([X], 2)
    ValueError: broadcast: root must be a rank below 2, got 2
group.reduce([X], -1)
    ValueError: reduce: root must be a rank below 2, got -1
group.send([X], "1")
    TypeError: send: destination must be a rank, got str
group.recv([X], 5)
    ValueError: recv: source must be a rank below 2, got 5
group.allgather([[X]], [X])
    ValueError: allgather: outputs must be 2 tensors, got 1
group.allgather([[X, ones(3)]], [X])
    ValueError: allgather: outputs must be of 4 elements of torch.float32 each, got float32 [3]
group.allgather_coalesced([[X]], [X])
    ValueError: allgather_coalesced: outputs must be 2 lists, one for each rank, got 1
group.all_gather_single(X, X)
    ValueError: all_gather_single: outputs must be of 2 times 4 elements of torch.float32, got float32 [4]
group.reduce_scatter_single(ones(3), X)
    ValueError: reduce_scatter_single: inputs must be of 2 times 3 elements of torch.float32, got float32 [4]
group.all_to_all_single(ones(3), ones(3))
    ValueError: all_to_all_single: output must have a multiple of 2 rows, or splits, got float32 [3]
group.all_to_all_single(X, X, [1, 2], [2, 2])
    ValueError: all_to_all_single: output_splits must be 2 sizes that add up to 4 rows, got [1, 2]
group.all_to_all_single(X, X, [2, 2], [1, 3])
    ValueError: all_to_all_single: input_splits must be 2 for rank RANK itself, as output_splits, got [1, 3]
group.all_to_all_single(ones([]), X)
    ValueError: all_to_all_single: output must have at least one dimension, got shape []
group.all_to_all_single(ones(2, 3), ones(2, 2))
    ValueError: all_to_all_single: output must have rows of 2 elements, as input has, got float32 [2, 3]
group.alltoall([X, X.double()], [X, X])
    ValueError: alltoall: tensors must be of one dtype, got float32, float64
group.end_coalescing()
    RuntimeError: end_coalescing: start_coalescing() must be called first
"""  # noqa: E501


@on_ranks(2)
def test_wrong_arguments(rank: int) -> None:
    group = dist.group.WORLD
    given = {"group": group, "X": X, "ones": ones, "op": dist.ReduceOp, "torch": torch}
    assert_refused(given, REFUSED.replace("RANK", str(rank)))
    assert group._get_sequence_number_for_group() == 0  # nothing has been issued
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2.0


def test_a_group_of_another_rank_or_thread() -> None:
    groups: dict[int, Any] = {}

    def run(rank: int) -> None:
        groups[rank] = dist.group.WORLD
        dist.barrier()
        with pytest.raises(RuntimeError, match=r"allreduce: a group of rank . must be used on"):
            groups[1 - rank].allreduce([torch.ones(1)])

    run_ranks(run, 2)
    with pytest.raises(RuntimeError, match=r"while run_ranks.. is running, got a call from the"):
        groups[0].allreduce([torch.ones(1)])
    with pytest.raises(RuntimeError, match="'simulated': a group must be made inside of"):
        dist.init_process_group("simulated", store=dist.HashStore(), rank=0, world_size=1)
