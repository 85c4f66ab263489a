"""8-bit floats, with a scale for each block of values.

In ``csrc/ops/codecs`` stand the schemas and reference kernels (``fp8.cpp``), the arithmetic
(``fp8_math.h``) and the CPU kernels (``fp8_cpu.cpp``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def _form(op: str, format: str, block_size: int) -> BlockForm:
    torch._check_value(
        format in ("e4m3", "e5m2"),
        lambda: f"{op}: format must be 'e4m3' or 'e5m2', got '{format}'",
    )
    check_block_size(op, block_size, 8)
    return BlockForm(block_size, 8, 1)


@torch.library.register_fake("commhook::fp8_encode")
def _encode_fake(
    tensors: Sequence[Tensor],
    message: Tensor,
    *,
    format: str,
    block_size: int,
    shards: int = 1,
    scale: float = 1.0,
    error: Tensor | None = None,
) -> None:
    op = "fp8_encode"
    check_encode(op, _form(op, format, block_size), tensors, message, shards, error)


@torch.library.register_fake("commhook::fp8_decode")
def _decode_fake(
    message: Tensor, tensors: Sequence[Tensor], *, format: str, block_size: int, shards: int = 1
) -> None:
    op = "fp8_decode"
    check_decode(op, _form(op, format, block_size), message, tensors, shards)


@torch.library.register_fake("commhook::fp8_reduce")
def _reduce_fake(
    messages: Tensor,
    message: Tensor,
    numel: int,
    *,
    format: str,
    block_size: int,
    scale: float = 1.0,
    error: Tensor | None = None,
) -> None:
    op = "fp8_reduce"
    check_reduce(op, _form(op, format, block_size), messages, message, numel, error)


@register_codec
class fp8(Codec):  # noqa: N801 (a codec is written as it is called)
    """8-bit floats, with a scale for each block: ``p ~ q * step``, ``step = max|p| / largest``.

    ``"e4m3"`` (``torch.float8_e4m3fn``) reaches from 2^-9 to 448 and is off by at most 2^-4 of a
    value, ``"e5m2"`` from 2^-16 to 57344 and 2^-3; smaller values are off by at most half of the
    least one. A block with an infinity or NaN in it comes back as NaN, and its error stays as it
    was.

    Bytes for each value: ``1 + 4 / block_size``.

    Args:
        format: ``"e4m3"`` or ``"e5m2"``.
        block_size: values in a block; a multiple of 8 up to 4096.

    Raises:
        ValueError: another setting.
    """

    def __init__(self, format: str = "e4m3", block_size: int = 256) -> None:
        self._block_form = _form("fp8", format, block_size)
        self._form: dict[str, Any] = {"format": format, "block_size": block_size}

    @classmethod
    def examples(cls) -> list[fp8]:
        return [cls(), cls("e5m2", 64)]

    def shards(self, numel: int, shards: int = 1) -> list[Shard]:
        return self._block_form.shards("fp8", numel, shards)

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
        _ops.fp8_encode(tensors, message, shards=shards, scale=scale, error=error, **self._form)

    def decode(
        self,
        message: Tensor,
        tensors: Sequence[Tensor],
        *,
        shards: int = 1,
        rounding: Tensor | None = None,
    ) -> None:
        _ops.fp8_decode(message, tensors, shards=shards, **self._form)

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
        _ops.fp8_reduce(messages, message, numel, scale=scale, error=error, **self._form)

    def __repr__(self) -> str:
        return text_of("fp8", self._form, {"format": "e4m3", "block_size": 256})
