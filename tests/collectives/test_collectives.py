"""Collectives: values, bytes on the wire, errors, and the same code traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from collective_cases import NO_GROUP
from rank_pool import RankPool
from torch import Tensor

from torch_commhook import collectives
from torch_commhook.metrics import WireMeter, counting
from torch_commhook.testing import run_ranks


def reduced(x: Tensor) -> Tensor:
    return collectives.all_reduce(x.clone()).wait()


def gathered(x: Tensor) -> Tensor:
    return collectives.all_gather(x).wait()


def exchanged(x: Tensor) -> Tensor:
    return collectives.all_to_all(x).wait()


def unevenly_exchanged(x: Tensor) -> Tensor:
    rank = dist.get_rank()
    # Rank 0 sends 1 and 3 rows, rank 1 sends 2 and 2.
    sends, gets = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    return collectives.all_to_all(x, input_split_sizes=sends, output_split_sizes=gets).wait()


def scattered(x: Tensor) -> Tensor:
    return collectives.reduce_scatter(x.clone()).wait()


def broadcasted(x: Tensor) -> Tensor:
    return collectives.broadcast(x.clone(), src=1).wait()


def chained(x: Tensor) -> Tensor:
    future = collectives.all_reduce(x.clone())
    return future.then(lambda done: done.value() * 3).wait()


def _input(rank: int) -> Tensor:
    return torch.arange(12.0).view(4, 3) + 100 * rank


#: Each with what rank r must get, and the bytes that it sends of 48.
WANT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[int], Tensor], list[int]]] = {
    "all_reduce": (reduced, lambda r: _input(0) + _input(1), [48, 48]),
    "all_gather": (gathered, lambda r: torch.stack([_input(0), _input(1)]), [48, 48]),
    "all_to_all": (
        exchanged,
        lambda r: torch.cat([_input(0)[2 * r : 2 * r + 2], _input(1)[2 * r : 2 * r + 2]]),
        [24, 24],
    ),
    "all_to_all, uneven": (
        unevenly_exchanged,
        lambda r: torch.cat([(_input(0)[:1], _input(0)[1:])[r], (_input(1)[:2], _input(1)[2:])[r]]),
        [36, 24],
    ),
    "reduce_scatter": (
        scattered, lambda r: (_input(0) + _input(1))[2 * r : 2 * r + 2], [24, 24],
    ),
    "broadcast": (broadcasted, lambda r: _input(1), [24, 24]),
    "then": (chained, lambda r: 3 * (_input(0) + _input(1)), [48, 48]),
}  # fmt: skip


def _run(rank: int, name: str, compiled: bool, dtype: torch.dtype) -> tuple[Tensor, int]:
    function = WANT[name][0]
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True)
    meter = WireMeter()
    with counting(meter):
        result = function(_input(rank).to(dtype))
    return (result.real if dtype.is_complex else result).float(), meter.bytes_sent


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str
)
@pytest.mark.parametrize("name", WANT)
def test_eager(two_ranks: RankPool, name: str, dtype: torch.dtype) -> None:
    _, want, wire = WANT[name]
    for rank, (got, sent) in enumerate(two_ranks.run(_run, name, False, dtype)):
        assert torch.equal(got, want(rank))
        assert sent == wire[rank] * dtype.itemsize // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("name", WANT)
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_traced(two_ranks: RankPool, name: str, dtype: torch.dtype) -> None:
    for rank, (got, _) in enumerate(two_ranks.run(_run, name, True, dtype)):
        assert torch.equal(got, WANT[name][1](rank))


def _counted(rank: int, name: str) -> tuple[Tensor, int, int]:
    got, sent = _run(rank, name, False, torch.float32)
    return got, sent, dist.group.WORLD.bytes_sent


@pytest.mark.parametrize("name", WANT)
def test_a_simulated_group_counts_as_much(name: str) -> None:
    for rank, (got, sent, by_group) in enumerate(run_ranks(_counted, 2, name)):
        assert torch.equal(got, WANT[name][1](rank))
        assert sent == by_group == WANT[name][2][rank]


def _is_asynchronous(rank: int) -> bool:
    """Two are in flight at once, and come in any order."""
    first = collectives.all_gather(torch.full((1000,), float(rank)))
    second = collectives.all_reduce(torch.ones(3))
    return second.wait().tolist() == [2, 2, 2] and first.wait()[1, 5] == 1


def test_several_in_flight(two_ranks: RankPool) -> None:
    assert two_ranks.run(_is_asynchronous) == [True, True]


@pytest.mark.usefixtures("one_rank")
class TestOneRank:
    def test_are_complete_at_once(self) -> None:
        x = torch.arange(6.0).view(2, 3)
        assert torch.equal(collectives.all_reduce(x).value(), x)
        assert torch.equal(collectives.all_gather(x).value(), x.unsqueeze(0))
        assert torch.equal(collectives.all_to_all(x).value(), x)
        assert torch.equal(collectives.reduce_scatter(x).value(), x)
        assert torch.equal(collectives.broadcast(x).value(), x)


X = torch.ones(4, 2)
TRANSPOSED = torch.ones(2, 4).t()
FREED = torch.ones(4)
FREED.untyped_storage().resize_(0)
ERRORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no tensor": (
        lambda: collectives.all_reduce([1]),
        TypeError,
        "all_reduce: tensor must be a torch.Tensor, got list",
    ),
    "strides": (
        lambda: collectives.all_reduce(TRANSPOSED),
        ValueError,
        r"all_reduce: tensor must be contiguous, got sizes \[4, 2\] with strides \[1, 4\]",
    ),
    "strides to gather": (lambda: collectives.all_gather(TRANSPOSED), ValueError, "contiguous"),
    "strides to exchange": (lambda: collectives.all_to_all(TRANSPOSED), ValueError, "contiguous"),
    "strides to scatter": (
        lambda: collectives.reduce_scatter(TRANSPOSED),
        ValueError,
        "contiguous",
    ),
    "strides to send": (lambda: collectives.broadcast(TRANSPOSED), ValueError, "contiguous"),
    "expanded": (lambda: collectives.all_reduce(torch.ones(1).expand(3)), ValueError, "contiguous"),
    "meta": (
        lambda: collectives.all_reduce(torch.ones(1, device="meta")),
        ValueError,
        "must have memory",
    ),
    "sparse": (lambda: collectives.all_gather(X.to_sparse()), TypeError, "must be dense"),
    "conjugate": (
        lambda: collectives.broadcast(X.to(torch.complex64).conj()),
        ValueError,
        "must be resolved",
    ),
    "few rows": (
        lambda: collectives.all_to_all(X, input_split_sizes=[3]),
        ValueError,
        r"input_split_sizes must add up to the tensor's 4 rows, got \[3\]",
    ),
    "negative rows": (
        lambda: collectives.all_to_all(X, input_split_sizes=[-4]),
        ValueError,
        "input_split_sizes must be 1 numbers of rows, one for each rank",
    ),
    "many splits": (
        lambda: collectives.all_to_all(X, output_split_sizes=[2, 2]),
        ValueError,
        "output_split_sizes must be 1 numbers of rows",
    ),
    "splits of text": (
        lambda: collectives.all_to_all(X, input_split_sizes="4"),
        TypeError,
        "input_split_sizes must be a list of ints",
    ),
    "no rows": (
        lambda: collectives.all_to_all(torch.ones(())),
        ValueError,
        "at least one dimension",
    ),
    "none to scatter": (
        lambda: collectives.reduce_scatter(torch.ones(())),
        ValueError,
        "at least one dimension",
    ),
    "no such rank": (
        lambda: collectives.broadcast(X, src=3),
        ValueError,
        "src must be a rank below 1, got 3",
    ),
    "no rank": (
        lambda: collectives.broadcast(X, src="0"),
        TypeError,
        "src must be an int, got str",
    ),
    "freed": (lambda: collectives.all_reduce(FREED), ValueError, "storage has been freed"),
    "no group": (lambda: collectives.all_gather(X, group=3), *NO_GROUP),
    **{
        f"a timeout of {name} in seconds": (
            lambda name=name: getattr(collectives, name)(X, timeout=3),
            TypeError,
            f"{name}: timeout must be a timedelta or None, got int",
        )
        for name in ("all_reduce", "all_gather", "all_to_all")
    },
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call()


def _uneven(rank: int) -> str:
    try:
        collectives.reduce_scatter(torch.ones(3))
    except ValueError as error:
        return str(error)
    return ""


def test_rows_that_do_not_divide(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_uneven):
        assert "reduce_scatter: tensor must have a multiple of 2 rows" in message
