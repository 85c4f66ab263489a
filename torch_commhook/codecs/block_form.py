"""What the codecs share that send values in blocks: the length of a message, and the checks of the
fakes. The same in C++: ``csrc/ops/codecs/block_codec.h``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_commhook._ops import BUCKET_DTYPES
from torch_commhook.codecs.base import Shard

_MAX_BLOCK_SIZE = 4096
_MOST_SHARDS = 1 << 20


@dataclass(frozen=True)
class BlockForm:
    """A few bits for each value, and a few float32 parameters for each block.

    Attributes:
        block_size: values in a block.
        bits: of a value.
        parameters: of a block.
    """

    block_size: int
    bits: int
    parameters: int

    def shards(self, op: str, numel: int, shards: int) -> list[Shard]:
        """The parts of a message, each of about equally many whole blocks."""
        check_shards(op, shards)
        torch._check_value(numel >= 0, lambda: f"{op}: numel must be at least 0, got {numel}")
        size = self.block_size
        blocks = (numel + size - 1) // size
        found = []
        for shard in range(shards):
            first, last = blocks * shard // shards, blocks * (shard + 1) // shards
            count = min(numel, last * size) - min(numel, first * size)
            found.append(Shard(count, self._bytes(count, last - first)))
        return found

    def nbytes(self, numel: int) -> int:
        """Bytes of a message, however many its shards."""
        return self._bytes(numel, (numel + self.block_size - 1) // self.block_size)

    def _bytes(self, count: int, blocks: int) -> int:
        return ((count * self.bits + 7) // 8 + 3) // 4 * 4 + blocks * self.parameters * 4


def check_block_size(op: str, block_size: int, multiple: int) -> None:
    torch._check_value(
        multiple <= block_size <= _MAX_BLOCK_SIZE and block_size % multiple == 0,
        lambda: (
            f"{op}: block_size must be a multiple of {multiple} of at most {_MAX_BLOCK_SIZE}, got "
            f"{block_size}"
        ),
    )


def check_shards(op: str, shards: int) -> None:
    torch._check_value(
        1 <= shards <= _MOST_SHARDS,
        lambda: f"{op}: shards must be at least 1 and at most 2^20, got {shards}",
    )


# ---- for fakes -----------------------------------------------------------------------------------


def check_encode(
    op: str,
    form: BlockForm,
    tensors: Sequence[Tensor],
    message: Tensor,
    shards: int,
    error: Tensor | None,
    rounding: Tensor | None = None,
) -> None:
    check_shards(op, shards)
    numel = _check_values(op, tensors)
    _check_message(op, "message", message, _known_bytes(form, numel))
    _check_memory(op, error, rounding, numel)


def check_decode(
    op: str, form: BlockForm, message: Tensor, tensors: Sequence[Tensor], shards: int
) -> None:
    check_shards(op, shards)
    _check_message(op, "message", message, _known_bytes(form, _check_values(op, tensors)))


def check_reduce(
    op: str,
    form: BlockForm,
    messages: Tensor,
    message: Tensor,
    numel: int,
    error: Tensor | None,
    rounding: Tensor | None = None,
) -> None:
    torch._check_value(
        messages.dim() == 2 and messages.shape[0] >= 1,
        lambda: (
            f"{op}: messages must have two dimensions, one row for each message, got sizes "
            f"{list(messages.shape)}"
        ),
    )
    known = _known_bytes(form, numel)
    _check_message(op, "message", message, known)
    _check_message(op, "messages", messages, None if known is None else known * len(messages))
    _check_memory(op, error, rounding, numel)


def _known_bytes(form: BlockForm, numel: int) -> int | None:
    """What a message must hold, where that is known without a guard; the kernel sees the rest."""
    return form.nbytes(numel) if isinstance(numel, int) else None


def _check_values(op: str, tensors: Sequence[Tensor]) -> int:
    torch._check_value(
        len(tensors) > 0, lambda: f"{op}: tensors must hold at least one tensor, got none"
    )
    total = 0
    for i, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"{op}: tensors[{i}] must be dense (torch.strided), got layout {tensor.layout}"
            )
        if tensor.dtype not in BUCKET_DTYPES:
            raise TypeError(
                f"{op}: tensors[{i}] must be of dtype float64, float32, float16 or bfloat16, got "
                f"{tensor.dtype}"
            )
        total = total + tensor.numel()
    return total


def _check_message(op: str, name: str, message: Tensor, nbytes: int | None) -> None:
    if message.dtype is not torch.uint8:
        raise TypeError(f"{op}: {name} must be of dtype uint8, got {message.dtype}")
    torch._check_value(
        message.is_contiguous() and (nbytes is None or message.numel() == nbytes),
        lambda: (
            f"{op}: {name} must be contiguous and hold {nbytes} bytes, got sizes "
            f"{list(message.shape)} with strides {list(message.stride())}"
        ),
    )


def _check_memory(op: str, error: Tensor | None, rounding: Tensor | None, numel: int) -> None:
    if error is not None:
        if error.dtype is not torch.float32:
            raise TypeError(f"{op}: error must be of dtype float32, got {error.dtype}")
        torch._check_value(
            error.is_contiguous() and error.numel() == numel,
            lambda: (
                f"{op}: error must be contiguous and hold {numel} elements, got sizes "
                f"{list(error.shape)} with strides {list(error.stride())}"
            ),
        )
    if rounding is not None:
        if rounding.dtype is not torch.int64:
            raise TypeError(
                f"{op}: rounding must be a dense tensor of dtype int64, got {rounding.dtype}"
            )
        torch._check_value(
            rounding.numel() == 2,
            lambda: (
                f"{op}: rounding must hold two numbers, seed and step, got sizes "
                f"{list(rounding.shape)}"
            ),
        )
