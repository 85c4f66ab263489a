"""Plain PyTorch without the library, and compiled by Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from harness import Report
from torch import Tensor

#: For values in 8 bits with one scale for each block, as in ``blockwise``'s default.
BLOCK, LEVELS = 256, 127


def flatten(tensors: Sequence[Tensor], scale: float, narrow: Tensor) -> None:
    """All values, scaled, into one tensor of fewer bits."""
    narrow.copy_(torch.cat([tensor.view(-1) for tensor in tensors]) * scale)


def unflatten(narrow: Tensor, scale: float, tensors: Sequence[Tensor]) -> None:
    """The inverse of :func:`flatten`."""
    pieces = narrow.split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor).float() * scale)


def quantize(tensors: Sequence[Tensor], codes: Tensor, steps: Tensor) -> None:
    """All values as codes, int8 [blocks, BLOCK], and a float32 step for each block."""
    flat = torch.cat([tensor.view(-1) for tensor in tensors])
    blocks = torch.nn.functional.pad(flat, (0, codes.numel() - flat.numel())).view_as(codes)
    largest = blocks.abs().amax(1, keepdim=True)
    steps.copy_(largest.squeeze(1) / LEVELS)
    codes.copy_((blocks * (LEVELS / largest).nan_to_num(0.0, 0.0)).round())


def dequantize(codes: Tensor, steps: Tensor, tensors: Sequence[Tensor]) -> None:
    """The inverse of :func:`quantize`."""
    flat = (codes * steps.unsqueeze(1)).view(-1)
    numels = [tensor.numel() for tensor in tensors]
    pieces = flat[: sum(numels)].split(numels)
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))


def compiled_or_none(
    report: Report, function: Callable[..., None], *arguments: object
) -> Callable[..., None] | None:
    """The function, compiled for these arguments; a note reports if Inductor cannot compile it."""
    compiled = torch.compile(function, dynamic=False)
    try:
        compiled(*arguments)
    except RuntimeError as error:
        first = str(error).splitlines()[0] if str(error) else ""
        report.note(f"{function.__name__} is not compiled: {type(error).__name__}: {first}")
        return None
    return compiled
