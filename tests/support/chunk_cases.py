"""Chunks of ranks, codecs, and what a rank has in a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_commhook.codecs import CODECS, Codec
from torch_commhook.collectives.compressed_chunks import chunk_sizes

EXAMPLES = [example for cls in CODECS.values() for example in cls.examples()]
FIRST = [cls.examples()[0] for cls in CODECS.values()]
of_each_codec = pytest.mark.parametrize("codec", EXAMPLES, ids=repr)

#: Elements of all chunks, or of each chunk for a number of ranks.
Sizes = int | Callable[[int], list[int]]
CASES: dict[str, Sizes] = {
    **{f"{n} values": n for n in (0, 1, 2, 7, 257, 4000, 9001)},
    "unequal": lambda ranks: [700 * rank + 5 for rank in range(ranks)],
    "the first has none": lambda ranks: [0 if rank == 0 else 300 for rank in range(ranks)],
    "the last has all": lambda ranks: [1000 if rank == ranks - 1 else 0 for rank in range(ranks)],
}

#: Those that go point to point over Gloo, among 2 and 3 ranks.
LONG: dict[str, Sizes] = {"long messages": 600_000}


def sizes_of(name: str, world_size: int) -> list[int]:
    case = {**CASES, **LONG}[name]
    return chunk_sizes(case, world_size) if isinstance(case, int) else case(world_size)


def options_of(name: str, world_size: int) -> dict[str, Any]:
    return {} if isinstance({**CASES, **LONG}[name], int) else {"sizes": sizes_of(name, world_size)}


def values(rank: int, numel: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 31 + rank)
    return torch.randn(numel, generator=generator) * 10.0 ** (seed % 4 - 2)


def rounding_of(codec: Codec, rank: int, seed: int) -> Tensor | None:
    own = 0 if codec.exchange == "all_reduce" else rank
    return torch.tensor([seed + own, 5]) if codec.is_random else None


def error_of(codec: Codec, rank: int, numel: int, seed: int) -> Tensor | None:
    return values(rank, numel, 4 * seed + 100) * 0.01 if codec.takes_error else None
