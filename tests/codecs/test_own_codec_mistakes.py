"""Codecs of a user's own that do not keep to the interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_commhook import codecs, hooks
from torch_commhook.testing import simulate


class OneShard(codecs.Codec):
    """Has one shard, however many ranks there are."""

    def shards(self, numel: int, shards: int = 1) -> list[codecs.Shard]:
        return [codecs.Shard(numel, 4 * numel)]

    def encode(self, *arguments: Any, **settings: Any) -> None:
        raise AssertionError("never called")

    decode = encode


def test_a_codec_without_a_shard_for_each_rank() -> None:
    gradients = [[torch.ones(8)] for _ in range(2)]
    with pytest.raises(ValueError, match=r"shards\(8, 2\) of OneShard\(\) must return a list with"):
        simulate(hooks.compressed(OneShard()), gradients)
