"""Block quantisation: values as integers of 8 or 4 bits, with a step for each block of values.

In ``csrc/ops/codecs`` stand the schemas and reference kernels (``blockwise.cpp``), the arithmetic
(``blockwise_math.h``) and the CPU kernels (``blockwise_cpu.cpp``).
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


def blockwise_shards(
    numel: int, *, bits: int = 8, block_size: int = 256, symmetric: bool = True, shards: int = 1
) -> list[Shard]:
    """The parts of a message of ``numel`` values, in order.

    Each has about equally many whole blocks; the last block of all may be shorter. With fewer
    blocks than shards, some are empty.

    Raises:
        ValueError: as :func:`blockwise_encode`.
    """
    op = "blockwise_shards"
    return _form(op, bits, block_size, symmetric).shards(op, numel, shards)


def blockwise_bytes(
    numel: int, *, bits: int = 8, block_size: int = 256, symmetric: bool = True
) -> int:
    """Bytes of a message of ``numel`` values: ``bits / 8 + 4 / block_size`` for each, symmetric.

    Raises:
        ValueError: as :func:`blockwise_encode`.
    """
    return _form("blockwise_bytes", bits, block_size, symmetric).nbytes(numel)


def _form(op: str, bits: int, block_size: int, symmetric: bool) -> BlockForm:
    torch._check_value(bits in (4, 8), lambda: f"{op}: bits must be 4 or 8, got {bits}")
    check_block_size(op, block_size, 8)
    return BlockForm(block_size, bits, 1 if symmetric else 2)


# ---- encode --------------------------------------------------------------------------------------


def blockwise_encode(
    tensors: Sequence[Tensor],
    message: Tensor,
    *,
    bits: int = 8,
    block_size: int = 256,
    symmetric: bool = True,
    shards: int = 1,
    scale: float = 1.0,
    error: Tensor | None = None,
    rounding: Tensor | None = None,
) -> None:
    """Quantise tensors in blocks, in one pass over memory.

    Their values, in the order of :func:`torch_commhook._ops.flatten`, are cut into blocks across
    the tensors' borders. With p a value in float32, times ``scale``, plus its ``error``:

    - symmetric: ``p ~ q * step``, ``step = max|p| / n``, q from -n to n, n = 127 or 7;
    - else: ``p ~ low + q * step``, ``step = (max - min) / n``, q from 0 to n, n = 255 or 15.

    Rounded to the nearest (ties to even), p is off by at most half a step; stochastically by less
    than a step, and by nothing on average. A block of zeros comes back as zeros. A block with an
    infinity or NaN in it comes back as NaN, and its error stays as it was.

    Args:
        tensors: as for ``flatten``: dense, of dtype float64, float32, float16 or bfloat16, of any
            shapes and strides, on one device.
        message: written; contiguous, uint8, :func:`blockwise_bytes` long, at an address that is a
            multiple of 4.
        bits: 8 or 4.
        block_size: values in a block; a multiple of 8 up to 4096.
        symmetric: whether zero is the middle of what a block can hold.
        shards: parts of the message that can be decoded by themselves; see
            :func:`blockwise_shards`.
        scale: factor, applied in float32.
        error: what earlier messages have lost, in float32, flat, as many as the values. Added to
            them, and replaced by what this message loses.
        rounding: int64, ``[seed, step]`` on the tensors' device: rounding is stochastic, with
            numbers that follow from these two and a value's place alone (Philox4x32-10, 16 bits for
            each value; the step's lowest 32 bits count).

    Raises:
        TypeError: a tensor of another dtype or layout.
        ValueError: no tensors, several devices, sizes that do not fit, or memory that is shared.
        RuntimeError: a tensor requires grad while gradients are recorded.
    """
    _ops.blockwise_encode(
        tensors,
        message,
        bits=bits,
        block_size=block_size,
        symmetric=symmetric,
        shards=shards,
        scale=scale,
        error=error,
        rounding=rounding,
    )


@torch.library.register_fake("commhook::blockwise_encode")
def _encode_fake(
    tensors: Sequence[Tensor],
    message: Tensor,
    *,
    bits: int,
    block_size: int,
    symmetric: bool,
    shards: int = 1,
    scale: float = 1.0,
    error: Tensor | None = None,
    rounding: Tensor | None = None,
) -> None:
    op = "blockwise_encode"
    form = _form(op, bits, block_size, symmetric)
    check_encode(op, form, tensors, message, shards, error, rounding)


# ---- decode --------------------------------------------------------------------------------------


def blockwise_decode(
    message: Tensor,
    tensors: Sequence[Tensor],
    *,
    bits: int = 8,
    block_size: int = 256,
    symmetric: bool = True,
    shards: int = 1,
) -> None:
    """Write a message's values into tensors, in one pass over memory.

    Args:
        message: what :func:`blockwise_encode` has written, with the same settings.
        tensors: dense destinations of any strides that reach each element once, with as many
            elements as the message has values, sharing no memory.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`blockwise_encode`.
    """
    _ops.blockwise_decode(
        message, tensors, bits=bits, block_size=block_size, symmetric=symmetric, shards=shards
    )


@torch.library.register_fake("commhook::blockwise_decode")
def _decode_fake(
    message: Tensor,
    tensors: Sequence[Tensor],
    *,
    bits: int,
    block_size: int,
    symmetric: bool,
    shards: int = 1,
) -> None:
    op = "blockwise_decode"
    check_decode(op, _form(op, bits, block_size, symmetric), message, tensors, shards)


# ---- reduce --------------------------------------------------------------------------------------


def blockwise_reduce(
    messages: Tensor,
    message: Tensor,
    numel: int,
    *,
    bits: int = 8,
    block_size: int = 256,
    symmetric: bool = True,
    scale: float = 1.0,
    error: Tensor | None = None,
    rounding: Tensor | None = None,
) -> None:
    """Write the message of a sum of messages, in one pass over memory.

    The values of the messages are added up in float32, in their order, and encoded as
    :func:`blockwise_encode` does, each ``scale * sum + error``.

    Args:
        messages: of shape ``(messages, bytes)``, each of ``numel`` values in one shard.
        message: written; of as many bytes as one of them.
        numel: values in each.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`blockwise_encode`.
    """
    _ops.blockwise_reduce(
        messages,
        message,
        numel,
        bits=bits,
        block_size=block_size,
        symmetric=symmetric,
        scale=scale,
        error=error,
        rounding=rounding,
    )


@torch.library.register_fake("commhook::blockwise_reduce")
def _reduce_fake(
    messages: Tensor,
    message: Tensor,
    numel: int,
    *,
    bits: int,
    block_size: int,
    symmetric: bool,
    scale: float = 1.0,
    error: Tensor | None = None,
    rounding: Tensor | None = None,
) -> None:
    op = "blockwise_reduce"
    form = _form(op, bits, block_size, symmetric)
    check_reduce(op, form, messages, message, numel, error, rounding)


# ---- the codec -----------------------------------------------------------------------------------

_DEFAULTS: dict[str, Any] = {
    "bits": 8,
    "block_size": 256,
    "symmetric": True,
    "rounding": "nearest",
}


@register_codec
class blockwise(Codec):  # noqa: N801 (a codec is written as it is called)
    """Integers of 8 or 4 bits, with a step for each block of values; see :func:`blockwise_encode`.

    Bytes for each value: ``bits / 8 + 4 / block_size``, and ``4 / block_size`` more where it is not
    symmetric.

    Args:
        bits: 8 or 4.
        block_size: values in a block; a multiple of 8 up to 4096.
        symmetric: whether zero is the middle of what a block can hold; else blocks reach from their
            least value to their largest.
        rounding: ``"nearest"``, or ``"stochastic"``: right on average, with twice the mean square
            error.

    Raises:
        ValueError: another setting.
    """

    def __init__(
        self,
        bits: int = 8,
        block_size: int = 256,
        *,
        symmetric: bool = True,
        rounding: str = "nearest",
    ) -> None:
        _form("blockwise", bits, block_size, symmetric)
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f"blockwise: rounding must be 'nearest' or 'stochastic', got {rounding!r}"
            )
        self._form: dict[str, Any] = {
            "bits": bits,
            "block_size": block_size,
            "symmetric": bool(symmetric),
        }
        self._rounding = rounding

    @classmethod
    def examples(cls) -> list[blockwise]:
        return [
            cls(),
            cls(bits=4),
            cls(bits=8, symmetric=False),
            cls(bits=4, block_size=64, symmetric=False),
            cls(rounding="stochastic"),
        ]

    @property
    def is_random(self) -> bool:
        return self._rounding == "stochastic"

    def shards(self, numel: int, shards: int = 1) -> list[Shard]:
        return blockwise_shards(numel, shards=shards, **self._form)

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
        drawn = self._checked("encode", rounding)
        blockwise_encode(
            tensors,
            message,
            shards=shards,
            scale=scale,
            error=error,
            rounding=drawn,
            **self._form,
        )

    def decode(
        self,
        message: Tensor,
        tensors: Sequence[Tensor],
        *,
        shards: int = 1,
        rounding: Tensor | None = None,
    ) -> None:
        blockwise_decode(message, tensors, shards=shards, **self._form)

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
        drawn = self._checked("reduce", rounding)
        blockwise_reduce(
            messages, message, numel, scale=scale, error=error, rounding=drawn, **self._form
        )

    def _checked(self, method: str, rounding: Tensor | None) -> Tensor | None:
        if not self.is_random:
            return None
        if rounding is None:
            raise ValueError(f"{self}.{method}: rounding must be given, [seed, step], got None")
        return rounding

    def __repr__(self) -> str:
        return text_of("blockwise", {**self._form, "rounding": self._rounding}, _DEFAULTS)
