"""Codecs that wrap another one, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torch_commhook.codecs import Codec, Shard


class Around(Codec):
    """Wraps a codec, and calls a function before each of its methods.

    Args:
        inner: the wrapped codec.
        before: called with the method's name.
    """

    def __init__(self, inner: Codec, before: Callable[[str], None]) -> None:
        self.inner = inner
        self.before = before

    @property
    def exchange(self) -> str:  # type: ignore[override]
        return self.inner.exchange

    @property
    def is_random(self) -> bool:
        return self.inner.is_random

    @property
    def takes_error(self) -> bool:
        return self.inner.takes_error

    def shards(self, numel: int, shards: int = 1) -> list[Shard]:
        return self.inner.shards(numel, shards)

    def encode(self, tensors: Sequence[Tensor], message: Tensor, **options: Any) -> None:
        self.before("encode")
        self.inner.encode(tensors, message, **options)

    def decode(self, message: Tensor, tensors: Sequence[Tensor], **options: Any) -> None:
        self.before("decode")
        self.inner.decode(message, tensors, **options)

    def decode_sum(self, messages: Tensor, tensors: Sequence[Tensor], **options: Any) -> None:
        self.before("decode_sum")
        self.inner.decode_sum(messages, tensors, **options)

    def reduce(self, messages: Tensor, message: Tensor, numel: int, **options: Any) -> None:
        self.before("reduce")
        self.inner.reduce(messages, message, numel, **options)

    def __repr__(self) -> str:
        return f"Around({self.inner})"
