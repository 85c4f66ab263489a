"""Collectives: values, bytes on the wire, errors, and the same code traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_cases import NO_GROUP
from on_ranks import on_processes, on_ranks
from rank_pool import RankPool
from torch import Tensor

from torch_commhook.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from torch_commhook.metrics import WireMeter, counting


def unevenly_exchanged(x: Tensor) -> Tensor:
    rank = dist.get_rank()
    # Rank 0 sends 1 and 3 rows, rank 1 sends 2 and 2.
    sends, gets = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    return all_to_all(x, input_split_sizes=sends, output_split_sizes=gets).wait()


def _input(rank: int) -> Tensor:
    return torch.arange(12.0).view(4, 3) + 100 * rank


#: Each with what rank r must get, and the bytes that it sends of 48.
WANT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[int], Tensor], list[int]]] = {
    "all_reduce": (
        lambda x: all_reduce(x.clone()).wait(), lambda r: _input(0) + _input(1), [48, 48],
    ),
    "all_gather": (
        lambda x: all_gather(x).wait(), lambda r: torch.stack([_input(0), _input(1)]), [48, 48],
    ),
    "all_to_all": (
        lambda x: all_to_all(x).wait(),
        lambda r: torch.cat([_input(0)[2 * r : 2 * r + 2], _input(1)[2 * r : 2 * r + 2]]),
        [24, 24],
    ),
    "all_to_all, uneven": (
        unevenly_exchanged,
        lambda r: torch.cat([(_input(0)[:1], _input(0)[1:])[r], (_input(1)[:2], _input(1)[2:])[r]]),
        [36, 24],
    ),
    "reduce_scatter": (
        lambda x: reduce_scatter(x.clone()).wait(),
        lambda r: (_input(0) + _input(1))[2 * r : 2 * r + 2],
        [24, 24],
    ),
    "broadcast": (lambda x: broadcast(x.clone(), src=1).wait(), lambda r: _input(1), [24, 24]),
    "then": (
        lambda x: all_reduce(x.clone()).then(lambda done: done.value() * 3).wait(),
        lambda r: 3 * (_input(0) + _input(1)),
        [48, 48],
    ),
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


@on_ranks(2)
@pytest.mark.parametrize("name", WANT)
def test_a_simulated_group_counts_as_much(rank: int, name: str) -> None:
    got, sent = _run(rank, name, False, torch.float32)
    assert torch.equal(got, WANT[name][1](rank))
    assert sent == dist.group.WORLD.bytes_sent == WANT[name][2][rank]


@on_processes
def test_several_in_flight(rank: int) -> None:
    """Two are in flight at once, and come in any order."""
    first = all_gather(torch.full((1000,), float(rank)))
    second = all_reduce(torch.ones(3))
    assert second.wait().tolist() == [2, 2, 2] and first.wait()[1, 5] == 1


@pytest.mark.usefixtures("one_rank")
def test_one_rank_is_complete_at_once() -> None:
    x = torch.arange(6.0).view(2, 3)
    for call in (all_reduce, all_to_all, reduce_scatter, broadcast):
        assert torch.equal(call(x).value(), x)
    assert torch.equal(all_gather(x).value(), x.unsqueeze(0))


X, STRIDES = torch.ones(4, 2), r"got sizes \[4, 2\] with strides \[1, 4\]"
FREED = torch.ones(4)
FREED.untyped_storage().resize_(0)
#: The call, its arguments, and the message.
Wrong = dict[str, tuple[Callable[..., object], dict[str, Any], str]]

TYPES: Wrong = {
    "no tensor": (
        all_reduce,
        {"tensor": [1]},
        "all_reduce: tensor must be a torch.Tensor, got list",
    ),
    "sparse": (all_gather, {"tensor": X.to_sparse()}, "must be dense"),
    "splits of text": (
        all_to_all,
        {"input_split_sizes": "4"},
        "input_split_sizes must be a list of ints",
    ),
    "no rank": (broadcast, {"src": "0"}, "src must be an int, got str"),
    "no group": (all_gather, {"group": 3}, NO_GROUP[1]),
    **{
        f"a timeout of {call.__name__} in seconds": (
            call,
            {"timeout": 3},
            f"{call.__name__}: timeout must be a timedelta or None, got int",
        )
        for call in (all_reduce, all_gather, all_to_all)
    },
}
VALUES: Wrong = {
    **{
        f"strides in {call.__name__}": (
            call,
            {"tensor": torch.ones(2, 4).t()},
            f"{call.__name__}: tensor must be contiguous, {STRIDES}",
        )
        for call in (all_reduce, all_gather, all_to_all, reduce_scatter, broadcast)
    },
    "expanded": (all_reduce, {"tensor": torch.ones(1).expand(3)}, "contiguous"),
    "meta": (all_reduce, {"tensor": torch.ones(1, device="meta")}, "must have memory"),
    "conjugate": (broadcast, {"tensor": X.to(torch.complex64).conj()}, "must be resolved"),
    "few rows": (
        all_to_all,
        {"input_split_sizes": [3]},
        r"input_split_sizes must add up to the tensor's 4 rows, got \[3\]",
    ),
    "negative rows": (
        all_to_all,
        {"input_split_sizes": [-4]},
        "input_split_sizes must be 1 numbers of rows, one for each rank",
    ),
    "many splits": (
        all_to_all,
        {"output_split_sizes": [2, 2]},
        "output_split_sizes must be 1 numbers of rows",
    ),
    "no rows": (all_to_all, {"tensor": torch.ones(())}, "at least one dimension"),
    "none to scatter": (reduce_scatter, {"tensor": torch.ones(())}, "at least one dimension"),
    "no such rank": (broadcast, {"src": 3}, "src must be a rank below 1, got 3"),
    "freed": (all_reduce, {"tensor": FREED}, "storage has been freed"),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", [*TYPES, *VALUES])
def test_errors(name: str) -> None:
    call, given, message = {**TYPES, **VALUES}[name]
    with pytest.raises(TypeError if name in TYPES else ValueError, match=message):
        call(**{"tensor": X, **given})


@on_ranks(2)
def test_rows_that_do_not_divide(rank: int) -> None:
    with pytest.raises(ValueError, match="reduce_scatter: tensor must have a multiple of 2 rows"):
        reduce_scatter(torch.ones(3))
