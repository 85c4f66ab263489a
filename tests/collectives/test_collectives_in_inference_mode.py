"""Collectives of codecs' messages in ``torch.inference_mode()``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from chunk_cases import of_each_codec, rounding_of, values
from rank_pool import RankPool
from torch import Tensor

from torch_commhook.codecs import Codec
from torch_commhook.collectives import (
    compressed_all_gather,
    compressed_all_reduce,
    compressed_reduce_scatter,
)


def _in_inference_mode(rank: int, codec: Codec) -> bool:
    """Results are made on other threads, whose mode is another."""
    drawn = rounding_of(codec, rank, 3)
    calls: list[Callable[..., torch.futures.Future[Tensor]]] = [compressed_all_gather]
    if codec.exchange != "all_gather":
        calls.append(compressed_reduce_scatter)
    if drawn is None:
        calls.append(compressed_all_reduce)
    same = []
    for call in calls:
        right = call(values(rank, 700, 1), codec, rounding=drawn).wait().clone()
        with torch.inference_mode():
            got = call(values(rank, 700, 1), codec, rounding=drawn).wait()
            same.append(got.is_inference() and torch.equal(got, right))
    return all(same)


@of_each_codec
def test_inference_mode(two_ranks: RankPool, codec: Codec) -> None:
    assert two_ranks.run(_in_inference_mode, codec) == [True, True]
