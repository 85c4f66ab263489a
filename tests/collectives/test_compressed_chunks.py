"""Reduce-scatters and all-gathers of messages: values and memory.

Values are those of the codec's own methods, called one after another by hand, and within the
codec's bound of a float64 reference.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunk_cases import (
    CASES,
    LONG,
    RANKS,
    STEPS,
    error_of,
    most_lost,
    of_each_codec,
    options_of,
    rounding_of,
    sizes_of,
    values,
)
from rank_pool import RankPool
from torch import Tensor

from torch_commhook.codecs import Codec
from torch_commhook.collectives import compressed_all_gather, compressed_reduce_scatter
from torch_commhook.collectives.compressed_chunks import chunk_sizes
from torch_commhook.collectives.message_buffers import MessageBuffers
from torch_commhook.testing import run_ranks

KINDS: dict[str, Callable[..., torch.futures.Future[Tensor]]] = {
    "sums": compressed_reduce_scatter,
    "gathers": compressed_all_gather,
}
of_each_kind = pytest.mark.parametrize("kind", KINDS)


def encoded(
    codec: Codec, x: Tensor, sizes: list[int], error: Tensor | None, rounding: Tensor | None
) -> list[Tensor]:
    """A message for each chunk."""
    nbytes = [part.nbytes for part in codec.chunks(sizes)]
    message = torch.empty(sum(nbytes), dtype=torch.uint8)
    codec.encode_chunks([x], message, sizes, error=error, rounding=rounding)
    return list(message.split(nbytes))


def decoded(codec: Codec, message: Tensor, numel: int, rounding: Tensor | None) -> Tensor:
    out = torch.empty(numel)
    if numel:
        codec.decode(message, [out], rounding=rounding)
    return out


# ---- against the codec's own methods -------------------------------------------------------------


def lengths(kind: str, sizes: list[int]) -> list[int]:
    """How many elements each rank gives."""
    return sizes if kind == "gathers" else [sum(sizes)] * len(sizes)


def _calls(rank: int, kind: str, codec: Codec, names: list[str], seed: int) -> list[Any]:
    """Each case, some calls after another with the same memory."""
    world_size = dist.get_world_size()
    found = []
    for name in names:
        sizes = sizes_of(name, world_size)
        numel = lengths(kind, sizes)[rank]
        options: dict[str, Any] = {"buffers": MessageBuffers()}
        if kind == "sums":
            options |= {"scale": 1 / world_size, **options_of(name, world_size)}
        elif len(set(sizes)) > 1:
            options["sizes"] = sizes
        error = error_of(codec, rank, numel, seed)
        for step in range(STEPS):
            x = values(rank, numel, seed + step)
            before = x.clone()
            drawn = rounding_of(codec, rank, seed + step)
            got = KINDS[kind](x, codec, error=error, rounding=drawn, **options).wait()
            assert torch.equal(x, before), "what is sent was written"
            found.append((got, None if error is None else error.clone()))
    return found


def by_hand(
    kind: str, codec: Codec, sizes: list[int], seed: int, errors: list[Tensor | None]
) -> list[Tensor]:
    """The result of each rank."""
    restored = []
    for rank, numel in enumerate(lengths(kind, sizes)):
        drawn = rounding_of(codec, rank, seed)
        chunks = sizes if kind == "sums" else [numel]
        messages = encoded(codec, values(rank, numel, seed), chunks, errors[rank], drawn)
        restored.append(
            [decoded(codec, *each, drawn) for each in zip(messages, chunks, strict=True)]
        )
    if kind == "gathers":
        return [torch.cat([own for (own,) in restored])] * len(sizes)
    return [
        functools.reduce(torch.add, rows) * (1 / len(sizes)) for rows in zip(*restored, strict=True)
    ]


def check(kind: str, codec: Codec, ranks: list[list[Any]], names: list[str], seed: int) -> None:
    world_size = len(ranks)
    calls = zip(*ranks, strict=True)
    for name in names:
        sizes = sizes_of(name, world_size)
        numels = lengths(kind, sizes)
        errors = [error_of(codec, rank, numel, seed) for rank, numel in enumerate(numels)]
        for step in range(STEPS):
            right = by_hand(kind, codec, sizes, seed + step, errors)
            for rank, (got, error) in enumerate(next(calls)):
                what = f"{name} in call {step} over {world_size} ranks, seed {seed}: rank {rank}"
                assert torch.equal(got, right[rank]), what
                assert error is None or torch.equal(error, errors[rank]), f"{what}: memory"
    assert next(calls, None) is None


@pytest.mark.parametrize("world_size", RANKS)
@of_each_codec
@of_each_kind
def test_simulated(kind: str, codec: Codec, world_size: int) -> None:
    seed, names = random.randrange(1 << 20), list(CASES)
    ranks = run_ranks(_calls, world_size, kind, codec, names, seed, seed=seed)
    check(kind, codec, ranks, names, seed)


@pytest.mark.parametrize("world_size", [2, 3])
@of_each_codec
@of_each_kind
def test_on_gloo(pools: dict[int, RankPool], kind: str, codec: Codec, world_size: int) -> None:
    seed, names = random.randrange(1 << 20), [*CASES, *LONG]
    check(kind, codec, pools[world_size].run(_calls, kind, codec, names, seed), names, seed)


# ---- how far a sum is off ------------------------------------------------------------------------


def _sum(rank: int, codec: Codec, numel: int, seed: int) -> Tensor:
    rounding = rounding_of(codec, rank, seed)
    return compressed_reduce_scatter(values(rank, numel, seed), codec, rounding=rounding).wait()


@pytest.mark.parametrize("world_size", RANKS)
@of_each_codec
def test_a_sum_is_off_by_one_encoding_of_each_rank(codec: Codec, world_size: int) -> None:
    seed, numel = 4 * random.randrange(1 << 18) + 2, 5003
    sizes = chunk_sizes(numel, world_size)
    every = [values(rank, numel, seed).split(sizes) for rank in range(world_size)]
    for rank, got in enumerate(run_ranks(_sum, world_size, codec, numel, seed)):
        exact = torch.stack([chunks[rank].double() for chunks in every]).sum(0)
        bound = sum(most_lost(codec, chunks[rank]) for chunks in every)
        assert float((got - exact).norm()) <= bound * (1 + 1e-5) + 1e-4
