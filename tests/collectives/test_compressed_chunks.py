"""Reduce-scatters and all-gathers of messages: values and memory.

Values are those of the codec's own methods, called one after another by hand, and within the
codec's bound of a float64 reference.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunk_cases import (
    CASES,
    LONG,
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

from torch_commhook.codecs import CODECS, Codec
from torch_commhook.collectives import compressed_all_gather, compressed_reduce_scatter
from torch_commhook.collectives.compressed_chunks import chunk_sizes
from torch_commhook.collectives.message_buffers import MessageBuffers
from torch_commhook.testing import run_ranks

RANKS = [1, 2, 3, 4, 8]
STEPS = 2


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


# ---- reduce-scatter ------------------------------------------------------------------------------


def _sums(rank: int, codec: Codec, names: list[str], seed: int) -> list[Any]:
    """Each case, some calls after another with the same memory."""
    world_size = dist.get_world_size()
    found = []
    for name in names:
        numel = sum(sizes_of(name, world_size))
        error, buffers = error_of(codec, rank, numel, seed), MessageBuffers()
        for step in range(STEPS):
            x = values(rank, numel, seed + step)
            before = x.clone()
            future = compressed_reduce_scatter(
                x,
                codec,
                scale=1 / world_size,
                error=error,
                rounding=rounding_of(codec, rank, seed + step),
                buffers=buffers,
                **options_of(name, world_size),
            )
            got = future.wait()
            assert torch.equal(x, before), "what is summed was written"
            found.append((got, None if error is None else error.clone()))
    return found


def check_sums(codec: Codec, ranks: list[list[Any]], names: list[str], seed: int) -> None:
    world_size = len(ranks)
    place = 0
    for name in names:
        sizes = sizes_of(name, world_size)
        errors = [error_of(codec, rank, sum(sizes), seed) for rank in range(world_size)]
        for step in range(STEPS):
            drawn = [rounding_of(codec, rank, seed + step) for rank in range(world_size)]
            messages = [
                encoded(codec, values(rank, sum(sizes), seed + step), sizes, errors[rank], own)
                for rank, own in enumerate(drawn)
            ]
            what = f"{name} in call {step} over {world_size} ranks, seed {seed}"
            for rank, found in enumerate(ranks):
                got, error = found[place]
                right = torch.zeros(sizes[rank])
                for number, (each, own) in enumerate(zip(messages, drawn, strict=True)):
                    restored = decoded(codec, each[rank], sizes[rank], own)
                    right = restored if number == 0 else right + restored
                assert torch.equal(got, right * (1 / world_size)), f"{what}: rank {rank}"
                if error is not None:
                    assert torch.equal(error, errors[rank]), f"{what}: memory of rank {rank}"
            place += 1


@pytest.mark.parametrize("world_size", RANKS)
@of_each_codec
def test_sums_simulated(codec: Codec, world_size: int) -> None:
    seed = random.randrange(1 << 20)
    names = list(CASES)
    check_sums(codec, run_ranks(_sums, world_size, codec, names, seed, seed=seed), names, seed)


@pytest.mark.parametrize("world_size", [2, 3])
@of_each_codec
def test_sums_on_gloo(pools: dict[int, RankPool], codec: Codec, world_size: int) -> None:
    seed = random.randrange(1 << 20)
    names = [*CASES, *LONG]
    check_sums(codec, pools[world_size].run(_sums, codec, names, seed), names, seed)


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


def test_no_rank_is_off_twice() -> None:
    """Four-bit values of one rank come back as one encoding restores them."""
    codec = CODECS["blockwise"](bits=4)
    (got, _) = run_ranks(_alone, 2, codec)
    x = values(0, 2000, 3)
    (message, _) = encoded(codec, x, [1000, 1000], None, None)
    assert torch.equal(got, decoded(codec, message, 1000, None))


def _alone(rank: int, codec: Codec) -> Tensor:
    x = values(0, 2000, 3) if rank == 0 else torch.zeros(2000)
    return compressed_reduce_scatter(x, codec).wait()


# ---- all-gather ----------------------------------------------------------------------------------


def _gathers(rank: int, codec: Codec, names: list[str], seed: int) -> list[Any]:
    world_size = dist.get_world_size()
    found = []
    for name in names:
        sizes = sizes_of(name, world_size)
        error, buffers = error_of(codec, rank, sizes[rank], seed), MessageBuffers()
        equal = len(set(sizes)) == 1
        for step in range(STEPS):
            future = compressed_all_gather(
                values(rank, sizes[rank], seed + step),
                codec,
                sizes=None if equal else sizes,
                error=error,
                rounding=rounding_of(codec, rank, seed + step),
                buffers=buffers,
            )
            found.append((future.wait(), None if error is None else error.clone()))
    return found


def check_gathers(codec: Codec, ranks: list[list[Any]], names: list[str], seed: int) -> None:
    world_size = len(ranks)
    place = 0
    for name in names:
        sizes = sizes_of(name, world_size)
        errors = [error_of(codec, rank, sizes[rank], seed) for rank in range(world_size)]
        for step in range(STEPS):
            pieces = []
            for rank, size in enumerate(sizes):
                drawn = rounding_of(codec, rank, seed + step)
                x = values(rank, size, seed + step)
                (message,) = encoded(codec, x, [size], errors[rank], drawn)
                pieces.append(decoded(codec, message, size, drawn))
            right = torch.cat(pieces)
            for rank, found in enumerate(ranks):
                got, error = found[place]
                what = f"{name} in call {step} over {world_size} ranks, seed {seed}: rank {rank}"
                assert torch.equal(got, right), what
                assert error is None or torch.equal(error, errors[rank]), what
            place += 1


@pytest.mark.parametrize("world_size", RANKS)
@of_each_codec
def test_gathers_simulated(codec: Codec, world_size: int) -> None:
    seed = random.randrange(1 << 20)
    names, ranks = list(CASES), world_size
    check_gathers(codec, run_ranks(_gathers, ranks, codec, names, seed, seed=seed), names, seed)


@pytest.mark.parametrize("world_size", [2, 3])
@of_each_codec
def test_gathers_on_gloo(pools: dict[int, RankPool], codec: Codec, world_size: int) -> None:
    seed = random.randrange(1 << 20)
    names = [*CASES, *LONG]
    check_gathers(codec, pools[world_size].run(_gathers, codec, names, seed), names, seed)
