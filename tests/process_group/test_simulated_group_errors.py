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


#: A call, and how the collective is named.
Issued = tuple[Callable[[], Any], str]
SUM_OF_4: Issued = lambda: dist.all_reduce(_x(4)), "allreduce of float32 [4], sum"


def _from(root: int) -> Issued:
    return lambda: dist.broadcast(_x(4), root), f"broadcast of float32 [4] from rank {root}"


#: What rank 0 and rank 1 issue.
MISMATCHES: dict[str, tuple[Issued, Issued]] = {
    "operation": (SUM_OF_4, _from(0)),
    "size": (SUM_OF_4, (lambda: dist.all_reduce(_x(2, 3)), "allreduce of float32 [2, 3], sum")),
    "dtype": (
        SUM_OF_4,
        (lambda: dist.all_reduce(_x(4, dtype=torch.float64)), "allreduce of float64 [4], sum"),
    ),
    "reduce operation": (
        SUM_OF_4,
        (lambda: dist.all_reduce(_x(4), dist.ReduceOp.MAX), "allreduce of float32 [4], max"),
    ),
    "root": (_from(0), _from(1)),
    "splits": (
        (
            lambda: dist.all_to_all_single(_x(3), _x(4), [2, 1], [2, 2]),
            "all_to_all_single of float32, sends [2, 2] and gets [2, 1]",
        ),
        (
            lambda: dist.all_to_all_single(_x(4), _x(4), [2, 2], [2, 2]),
            "all_to_all_single of float32, sends [2, 2] and gets [2, 2]",
        ),
    ),
    "rows": (
        (
            lambda: dist.all_to_all_single(_x(2, 3), _x(2, 3)),
            "all_to_all_single of float32, rows of 3, sends [1, 1] and gets [1, 1]",
        ),
        (
            lambda: dist.all_to_all_single(_x(2, 4), _x(2, 4)),
            "all_to_all_single of float32, rows of 4, sends [1, 1] and gets [1, 1]",
        ),
    ),
    "number of tensors": (
        (
            lambda: dist.group.WORLD.allreduce_coalesced([_x(4), _x(2)]),
            "allreduce_coalesced of float32 [4], float32 [2], sum",
        ),
        (
            lambda: dist.group.WORLD.allreduce_coalesced([_x(4)]),
            "allreduce_coalesced of float32 [4], sum",
        ),
    ),
    "gather": (
        (lambda: dist.gather(_x(4), FOUR, 0), "gather of float32 [4] to rank 0"),
        (lambda: dist.gather(_x(3), None, 0), "gather of float32 [3] to rank 0"),
    ),
    "barrier": (
        (dist.barrier, "barrier"),
        (lambda: dist.all_reduce(_x(1)), "allreduce of float32 [1], sum"),
    ),
}


def _mismatched(rank: int, name: str) -> str:
    dist.barrier()
    with pytest.raises(MismatchedCollectiveError) as raised:
        MISMATCHES[name][rank][0]()
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
    (_, first), (_, second) = MISMATCHES[name]
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


HALVES = [2, 2]
#: A method, arguments that no rank may give it, and the error.
WRONG: dict[str, tuple[str, tuple[Any, ...], type[Exception], str]] = {
    "no tensor": ("allreduce", ([3],), TypeError, "tensors must be tensors, got"),
    "no list": ("allreduce", (3,), TypeError, "tensors must be a list of tensors, got int"),
    "two tensors": ("allreduce", ([X, X],), ValueError, "tensors must be 1 tensors, got 2"),
    "no operation": ("allreduce", ([X], "sum"), TypeError, "op must be a ReduceOp, got str"),
    "an operation of integers": (
        "allreduce",
        ([X], dist.ReduceOp.BAND),
        ValueError,
        "op must be one for tensors of torch.float32, got band",
    ),
    "an operation that complex numbers have not": (
        "allreduce",
        ([X.to(torch.complex64)], dist.ReduceOp.MAX),
        ValueError,
        "op must be one for tensors of torch.complex64, got max",
    ),
    "a dtype that has no sum": (
        "allreduce",
        ([X.to(torch.float8_e4m3fn)],),
        ValueError,
        "op must be one for tensors of torch.float8_e4m3fn, got sum",
    ),
    "sparse": (
        "broadcast",
        ([X.to_sparse()], 0),
        TypeError,
        "tensors must be dense .torch.strided., got layout torch.sparse_coo",
    ),
    "sparse maximum": (
        "allreduce",
        ([X.to_sparse()], dist.ReduceOp.MAX),
        ValueError,
        "op must be sum for sparse tensors, got max",
    ),
    "no such root": ("broadcast", ([X], 2), ValueError, "root must be a rank below 2, got 2"),
    "a negative root": ("reduce", ([X], -1), ValueError, "root must be a rank below 2, got -1"),
    "no rank": ("send", ([X], "1"), TypeError, "destination must be a rank, got str"),
    "no such source": ("recv", ([X], 5), ValueError, "source must be a rank below 2, got 5"),
    "outputs": ("allgather", ([[X]], [X]), ValueError, "outputs must be 2 tensors, got 1"),
    "an output's size": (
        "allgather",
        ([[X, _x(3)]], [X]),
        ValueError,
        "outputs must be of 4 elements of torch.float32 each, got float32 .3.",
    ),
    "coalesced lists": (
        "allgather_coalesced",
        ([[X]], [X]),
        ValueError,
        "outputs must be 2 lists, one for each rank, got 1",
    ),
    "a single output's size": (
        "all_gather_single",
        (X, X),
        ValueError,
        "outputs must be of 2 times 4 elements of torch.float32, got float32",
    ),
    "shares": (
        "reduce_scatter_single",
        (_x(3), X),
        ValueError,
        "inputs must be of 2 times 3 elements of torch.float32, got",
    ),
    "rows": (
        "all_to_all_single",
        (_x(3), _x(3)),
        ValueError,
        "output must have a multiple of 2 rows, or splits, got float32 .3.",
    ),
    "splits": (
        "all_to_all_single",
        (X, X, [1, 2], HALVES),
        ValueError,
        r"output_splits must be 2 sizes that add up to 4 rows, got \[1, 2\]",
    ),
    "what goes to itself": (
        "all_to_all_single",
        (X, X, HALVES, [1, 3]),
        ValueError,
        r"input_splits must be 2 for rank .* itself, as output_splits, got \[",
    ),
    "no dimension": (
        "all_to_all_single",
        (_x(), X),
        ValueError,
        r"output must have at least one dimension, got shape \[\]",
    ),
    "other rows": (
        "all_to_all_single",
        (_x(2, 3), _x(2, 2)),
        ValueError,
        "output must have rows of 2 elements, as input has, got float32 .2, 3.",
    ),
    "two dtypes": (
        "alltoall",
        ([X, X.double()], [X, X]),
        ValueError,
        "tensors must be of one dtype, got float32, float64",
    ),
    "end": ("end_coalescing", (), RuntimeError, r"start_coalescing\(\) must be called first"),
}


def _wrong(rank: int, name: str) -> float:
    method, arguments, kind, message = WRONG[name]
    with pytest.raises(kind, match=f"{method}: {message}"):
        getattr(dist.group.WORLD, method)(*arguments)
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
