"""Checks of the fakes of all codecs' operators. In C++: ``csrc/ops/codecs/codec_checks.h``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.native.bucket_ops import BUCKET_DTYPES

#: The dtypes of errors.
ERROR_DTYPES = (torch.float32, torch.bfloat16)

#: The highest number of ranks that may share memory.
MOST_RANKS = 16


def check_values(op: str, tensors: Sequence[Tensor]) -> int:
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


def check_message(op: str, name: str, message: Tensor, nbytes: int | None) -> None:
    if message.dtype is not torch.uint8:
        raise TypeError(f"{op}: {name} must be of dtype uint8, got {message.dtype}")
    torch._check_value(
        message.is_contiguous() and (nbytes is None or message.numel() == nbytes),
        lambda: (
            f"{op}: {name} must be contiguous and hold {nbytes} bytes, got sizes "
            f"{list(message.shape)} with strides {list(message.stride())}"
        ),
    )


def check_memory(op: str, error: Tensor | None, rounding: Tensor | None, numel: int) -> None:
    if error is not None:
        if error.dtype not in ERROR_DTYPES:
            raise TypeError(f"{op}: error must be of dtype float32 or bfloat16, got {error.dtype}")
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


def check_messages(op: str, messages: Tensor) -> None:
    torch._check_value(
        messages.dim() == 2 and messages.shape[0] >= 1,
        lambda: (
            f"{op}: messages must have two dimensions, one row for each message, got sizes "
            f"{list(messages.shape)}"
        ),
    )


def check_ranks(op: str, name: str, ranks: int, least: int) -> None:
    """Refuse a list with too few or too many tensors. It must have one for each rank."""
    torch._check_value(
        least <= ranks <= MOST_RANKS,
        lambda: (
            f"{op}: {name} must be {least} to {MOST_RANKS} tensors, one for each rank, got {ranks}"
        ),
    )


def check_failed(op: str, failed: Tensor | None) -> None:
    """Refuse anything but one int64."""
    if failed is None:
        return
    if failed.dtype is not torch.int64:
        raise TypeError(f"{op}: failed must be a dense tensor of dtype int64, got {failed.dtype}")
    torch._check_value(
        failed.numel() == 1,
        lambda: f"{op}: failed must hold one number, got sizes {list(failed.shape)}",
    )
