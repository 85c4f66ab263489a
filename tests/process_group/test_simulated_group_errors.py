"""Collectives that do not belong together, and arguments that no collective takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.testing import MismatchedCollectiveError, run_ranks

X, FOUR = torch.ones(4), [torch.ones(4), torch.ones(4)]


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


#: What rank 0 does, what rank 1 does, and how each is named.
MISMATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str]] = {
    "operation": (
        lambda: dist.all_reduce(_x(4)),
        lambda: dist.broadcast(_x(4), 0),
        "allreduce of float32 [4], sum",
        "broadcast of float32 [4] from rank 0",
    ),
    "size": (
        lambda: dist.all_reduce(_x(4)),
        lambda: dist.all_reduce(_x(2, 3)),
        "allreduce of float32 [4], sum",
        "allreduce of float32 [2, 3], sum",
    ),
    "dtype": (
        lambda: dist.all_reduce(_x(4)),
        lambda: dist.all_reduce(_x(4, dtype=torch.float64)),
        "allreduce of float32 [4], sum",
        "allreduce of float64 [4], sum",
    ),
    "reduce operation": (
        lambda: dist.all_reduce(_x(4)),
        lambda: dist.all_reduce(_x(4), dist.ReduceOp.MAX),
        "allreduce of float32 [4], sum",
        "allreduce of float32 [4], max",
    ),
    "root": (
        lambda: dist.broadcast(_x(4), 0),
        lambda: dist.broadcast(_x(4), 1),
        "broadcast of float32 [4] from rank 0",
        "broadcast of float32 [4] from rank 1",
    ),
    "splits": (
        lambda: dist.all_to_all_single(_x(3), _x(4), [2, 1], [2, 2]),
        lambda: dist.all_to_all_single(_x(4), _x(4), [2, 2], [2, 2]),
        "all_to_all_single of float32, sends [2, 2] and gets [2, 1]",
        "all_to_all_single of float32, sends [2, 2] and gets [2, 2]",
    ),
    "rows": (
        lambda: dist.all_to_all_single(_x(2, 3), _x(2, 3)),
        lambda: dist.all_to_all_single(_x(2, 4), _x(2, 4)),
        "all_to_all_single of float32, rows of 3, sends [1, 1] and gets [1, 1]",
        "all_to_all_single of float32, rows of 4, sends [1, 1] and gets [1, 1]",
    ),
    "number of tensors": (
        lambda: dist.group.WORLD.allreduce_coalesced([_x(4), _x(2)]),
        lambda: dist.group.WORLD.allreduce_coalesced([_x(4)]),
        "allreduce_coalesced of float32 [4], float32 [2], sum",
        "allreduce_coalesced of float32 [4], sum",
    ),
    "gather": (
        lambda: dist.gather(_x(4), FOUR, 0),
        lambda: dist.gather(_x(3), None, 0),
        "gather of float32 [4] to rank 0",
        "gather of float32 [3] to rank 0",
    ),
    "barrier": (
        dist.barrier,
        lambda: dist.all_reduce(_x(1)),
        "barrier",
        "allreduce of float32 [1], sum",
    ),
}


def _mismatched(rank: int, name: str) -> str:
    dist.barrier()
    with pytest.raises(MismatchedCollectiveError) as raised:
        MISMATCHES[name][rank]()
        dist.barrier()
    seen.append((rank, str(raised.value)))
    return ""


seen: list[tuple[int, str]] = []


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatches(name: str, seed: int) -> None:
    seen.clear()
    with pytest.raises(MismatchedCollectiveError) as raised:
        run_ranks(_mismatched, 2, name, seed=seed)
    first, second = MISMATCHES[name][2:]
    message = f"collective 2 on group '0' is not the same: rank 0: {first}; rank 1: {second}"
    assert str(raised.value) == message
    assert sorted(seen) == [(0, message), (1, message)]


def _mismatched_message(rank: int) -> None:
    if rank == 2:
        dist.send(_x(4), 0, tag=7)
    elif rank == 0:
        dist.recv(_x(3), 2, tag=7)


def test_a_mismatched_message() -> None:
    with pytest.raises(MismatchedCollectiveError) as raised:
        run_ranks(_mismatched_message, 3)
    assert str(raised.value) == (
        "on group '0' is not the same: rank 0: recv of float32 [3] from rank 2, tag 7; "
        "rank 2: send of float32 [4] to rank 0, tag 7"
    )


def test_shapes_may_differ_where_sizes_do_not() -> None:
    def run(rank: int) -> list[float]:
        x = torch.arange(6.0).view((2, 3) if rank else (6,))
        dist.all_reduce(x)
        return x.flatten().tolist()

    assert run_ranks(run, 2) == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]] * 2


#: Arguments that no rank may give, and what the error says.
WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "no tensor": (lambda g: g.allreduce([3]), TypeError, "allreduce: tensors must be tensors, got"),
    "no list": (
        lambda g: g.allreduce(3),
        TypeError,
        "allreduce: tensors must be a list of tensors, got int",
    ),
    "two tensors": (
        lambda g: g.allreduce([X, X]),
        ValueError,
        "allreduce: tensors must be 1 tensors, got 2",
    ),
    "no operation": (
        lambda g: g.allreduce([X], "sum"),
        TypeError,
        "allreduce: op must be a ReduceOp, got str",
    ),
    "an operation of integers": (
        lambda g: g.allreduce([X], dist.ReduceOp.BAND),
        ValueError,
        "allreduce: op must be one for tensors of torch.float32, got band",
    ),
    "an operation that complex numbers have not": (
        lambda g: g.allreduce([X.to(torch.complex64)], dist.ReduceOp.MAX),
        ValueError,
        "allreduce: op must be one for tensors of torch.complex64, got max",
    ),
    "a dtype that has no sum": (
        lambda g: g.allreduce([X.to(torch.float8_e4m3fn)]),
        ValueError,
        "allreduce: op must be one for tensors of torch.float8_e4m3fn, got sum",
    ),
    "sparse": (
        lambda g: g.broadcast([X.to_sparse()], 0),
        TypeError,
        "broadcast: tensors must be dense .torch.strided., got layout torch.sparse_coo",
    ),
    "sparse maximum": (
        lambda g: g.allreduce([X.to_sparse()], dist.ReduceOp.MAX),
        ValueError,
        "allreduce: op must be sum for sparse tensors, got max",
    ),
    "no such root": (
        lambda g: g.broadcast([X], 2),
        ValueError,
        "broadcast: root must be a rank below 2, got 2",
    ),
    "a negative root": (
        lambda g: g.reduce([X], -1),
        ValueError,
        "reduce: root must be a rank below 2, got -1",
    ),
    "no rank": (lambda g: g.send([X], "1"), TypeError, "send: destination must be a rank, got str"),
    "no such source": (
        lambda g: g.recv([X], 5),
        ValueError,
        "recv: source must be a rank below 2, got 5",
    ),
    "outputs": (
        lambda g: g.allgather([[X]], [X]),
        ValueError,
        "allgather: outputs must be 2 tensors, got 1",
    ),
    "an output's size": (
        lambda g: g.allgather([[X, torch.ones(3)]], [X]),
        ValueError,
        "allgather: outputs must be of 4 elements of torch.float32 each, got float32 .3.",
    ),
    "coalesced lists": (
        lambda g: g.allgather_coalesced([[X]], [X]),
        ValueError,
        "allgather_coalesced: outputs must be 2 lists, one for each rank, got 1",
    ),
    "a single output's size": (
        lambda g: g.all_gather_single(X, X),
        ValueError,
        "all_gather_single: outputs must be of 2 times 4 elements of torch.float32, got float32",
    ),
    "shares": (
        lambda g: g.reduce_scatter_single(torch.ones(3), X),
        ValueError,
        "reduce_scatter_single: inputs must be of 2 times 3 elements of torch.float32, got",
    ),
    "rows": (
        lambda g: g.all_to_all_single(torch.ones(3), torch.ones(3)),
        ValueError,
        "all_to_all_single: output must have a multiple of 2 rows, or splits, got float32 .3.",
    ),
    "splits": (
        lambda g: g.all_to_all_single(X, X, [1, 2], [2, 2]),
        ValueError,
        r"all_to_all_single: output_splits must be 2 sizes that add up to 4 rows, got \[1, 2\]",
    ),
    "what goes to itself": (
        lambda g: g.all_to_all_single(X, X, [2, 2], [1, 3]),
        ValueError,
        r"all_to_all_single: input_splits must be 2 for rank .* itself, as output_splits, got \[",
    ),
    "no dimension": (
        lambda g: g.all_to_all_single(torch.tensor(1.0), X),
        ValueError,
        r"all_to_all_single: output must have at least one dimension, got shape \[\]",
    ),
    "other rows": (
        lambda g: g.all_to_all_single(torch.ones(2, 3), torch.ones(2, 2)),
        ValueError,
        "all_to_all_single: output must have rows of 2 elements, as input has, got float32 .2, 3.",
    ),
    "two dtypes": (
        lambda g: g.alltoall([X, X.double()], [X, X]),
        ValueError,
        "alltoall: tensors must be of one dtype, got float32, float64",
    ),
    "end": (
        lambda g: g.end_coalescing(),
        RuntimeError,
        r"end_coalescing: start_coalescing\(\) must be called first",
    ),
}


def _wrong(rank: int, name: str) -> float:
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call(dist.group.WORLD)
    x = torch.ones(1)
    dist.all_reduce(x)  # nothing has been issued
    return x.item()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    assert run_ranks(_wrong, 2, name) == [2.0, 2.0]


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
