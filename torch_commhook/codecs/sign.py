"""Signs: a bit for each value, with the mean magnitude of each block of values.

In ``csrc/ops/codecs`` stand the schemas and reference kernels (``sign.cpp``) and the CPU kernels
(``sign_cpu.cpp``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.codecs.base import Codec, Shard, register_codec, text_of
from torch_commhook.codecs.block_form import (
    BlockForm,
    check_block_size,
    check_decode,
    check_encode,
    check_reduce,
)

_ops = torch.ops.commhook


def _form(op: str, block_size: int) -> BlockForm:
    check_block_size(op, block_size, 32)
    return BlockForm(block_size, 1, 1)


@torch.library.register_fake("commhook::sign_encode")
def _encode_fake(
    tensors: Sequence[Tensor],
    message: Tensor,
    *,
    block_size: int,
    shards: int = 1,
    scale: float = 1.0,
    error: Tensor | None = None,
) -> None:
    op = "sign_encode"
    check_encode(op, _form(op, block_size), tensors, message, shards, error)


@torch.library.register_fake("commhook::sign_decode")
def _decode_fake(
    message: Tensor, tensors: Sequence[Tensor], *, block_size: int, shards: int = 1
) -> None:
    op = "sign_decode"
    check_decode(op, _form(op, block_size), message, tensors, shards)


@torch.library.register_fake("commhook::sign_reduce")
def _reduce_fake(
    messages: Tensor,
    message: Tensor,
    numel: int,
    *,
    block_size: int,
    scale: float = 1.0,
    error: Tensor | None = None,
) -> None:
    op = "sign_reduce"
    check_reduce(op, _form(op, block_size), messages, message, numel, error)


@register_codec
class sign(Codec):  # noqa: N801 (a codec is written as it is called)
    """The sign of each value, and the mean magnitude of each block: ``p ~ s`` or ``-s``.

    With p the values of a block of d, the squared error is ``|p|^2 - |p|_1^2 / d``, which no other
    magnitude betters: of Gaussian values, 1 - 2 / pi of their square. A block with an infinity or
    NaN in it, or whose magnitudes add up to more than float32 holds, comes back as NaN, and its
    error stays as it was. Without error feedback a sum of signs can be stuck.

    Bytes for each value: ``1 / 8 + 4 / block_size``.

    Args:
        block_size: values in a block; a multiple of 32 up to 4096.

    Raises:
        ValueError: another block size.
    """

    def __init__(self, block_size: int = 1024) -> None:
        self._block_form = _form("sign", block_size)

    @classmethod
    def examples(cls) -> list[sign]:
        return [cls(), cls(32)]

    def shards(self, numel: int, shards: int = 1) -> list[Shard]:
        return self._block_form.shards("sign", numel, shards)

    def encode(
        self,
        tensors: Sequence[Tensor],
        message: Tensor,
        *,
        shards: int = 1,
        scale: float = 1.0,
        error: Tensor | None = None,
        rounding: Tensor | None = None,
    ) -> None:
        size = self._block_form.block_size
        _ops.sign_encode(tensors, message, block_size=size, shards=shards, scale=scale, error=error)

    def decode(
        self,
        message: Tensor,
        tensors: Sequence[Tensor],
        *,
        shards: int = 1,
        rounding: Tensor | None = None,
    ) -> None:
        size = self._block_form.block_size
        _ops.sign_decode(message, tensors, block_size=size, shards=shards)

    def reduce(
        self,
        messages: Tensor,
        message: Tensor,
        numel: int,
        *,
        scale: float = 1.0,
        error: Tensor | None = None,
        rounding: Tensor | None = None,
    ) -> None:
        size = self._block_form.block_size
        _ops.sign_reduce(messages, message, numel, block_size=size, scale=scale, error=error)

    def __repr__(self) -> str:
        settings = {"block_size": self._block_form.block_size}
        return text_of("sign", settings, {"block_size": 1024})
