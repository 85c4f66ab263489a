"""Sums by exchanges: the values, the bytes, and what waits for what."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor, nn

from torch_commhook import PeerError, attach, hooks
from torch_commhook.collectives import all_reduce, direct_sum
from torch_commhook.collectives.direct_sum import direct_bytes, is_gathered, sums_directly

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def _values(rank: int, numel: int, dtype: torch.dtype, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def _in_order(ranks: int, numel: int, dtype: torch.dtype, number: int = 0) -> Tensor:
    """The sum in the order of the ranks, in float32 or wider, rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = _values(0, numel, dtype, number).to(wide)
    for rank in range(1, ranks):
        total += _values(rank, numel, dtype, number).to(wide)
    return total.to(dtype)


def _sums(rank: int, sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    """All under way at once, each in place."""
    tensors = [_values(rank, numel, dtype, number) for number, numel in enumerate(sizes)]
    futures = [all_reduce(tensor) for tensor in tensors]
    found = [future.wait() for future in futures]
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(found, tensors, strict=True))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_ranks_add_up_in_their_order(three_ranks: RankPool, dtype: torch.dtype) -> None:
    sizes = [1, 2, 5, 1000, 30_000, 100_000]
    assert [is_gathered(numel * dtype.itemsize, 3) for numel in sizes] == [
        2 * numel * dtype.itemsize <= 64 * 1024 for numel in sizes
    ]
    for found in three_ranks.run(_sums, sizes, dtype):
        for number, (numel, got) in enumerate(zip(sizes, found, strict=True)):
            assert torch.equal(got, _in_order(3, numel, dtype, number))


def _shapes(rank: int) -> list[Any]:
    with torch.inference_mode():
        inference = all_reduce(torch.ones(4)).wait()
    matrix = all_reduce(torch.full((3, 40_000), rank + 1.0)).wait()
    whole = all_reduce(torch.tensor(2.5)).wait()
    return [inference.clone(), matrix, whole]


def test_shapes_and_inference_mode(two_ranks: RankPool) -> None:
    for inference, matrix, whole in two_ranks.run(_shapes):
        assert inference.tolist() == [2.0] * 4
        assert matrix.shape == (3, 40_000)
        assert matrix.eq(3.0).all()
        assert whole.item() == 5.0


@pytest.mark.parametrize("rank", range(3))
def test_bytes_are_those_of_a_ring_or_of_a_gather(rank: int) -> None:
    assert direct_bytes(torch.empty(10), rank, 3) == (80, 80)
    own = 4 * (33_334 if rank == 0 else 33_333)
    assert direct_bytes(torch.empty(100_000), rank, 3) == (400_000 - own + 2 * own,) * 2


def _kinds(rank: int) -> list[bool]:
    group = dist.group.WORLD
    tensors = (
        torch.ones(4),
        torch.ones(4, dtype=torch.int32),
        torch.ones(4).to_sparse(),
        torch.ones(0),
        torch.ones((4 << 20) // 4 + 1),
    )
    return [sums_directly(tensor, group) for tensor in tensors]


def test_which_tensors(two_ranks: RankPool) -> None:
    assert two_ranks.run(_kinds) == [[True, False, False, False, False]] * 2


def _fails_between(rank: int) -> list[str | Tensor]:
    """What each of two steps gives; in the first, rank 0 cannot add up what it has got."""
    model = nn.Linear(300, 300, bias=False)
    attach(model, hooks.allreduce(), bucket_cap_mb=25)
    found: list[str | Tensor] = []
    for fails in (rank == 0, False):
        model.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(direct_sum, "sum_rows", _raise)
            try:
                model(torch.full((1, 300), rank + 1.0)).sum().backward()
                found.append(model.weight.grad)
            except (ValueError, PeerError) as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def _raise(*args: object) -> None:
    raise ValueError("no sum")


def test_a_rank_that_fails_between_two_exchanges_ends_the_step_of_all(
    three_ranks: RankPool,
) -> None:
    assert not is_gathered(4 * 300 * 300, 3)
    for rank, (said, gradient) in enumerate(three_ranks.run(_fails_between, timeout=60)):
        assert re.match("ValueError" if rank == 0 else "PeerError.* on rank 0: ValueError", said)
        assert "no sum" in said
        assert gradient.eq(2.0).all()
