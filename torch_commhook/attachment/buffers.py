"""A model's buffers, such as running statistics, on their way from one rank to the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def buffers_of(module: nn.Module) -> list[Tensor]:
    """Returns the buffers that ranks send to each other."""
    return [
        buffer.detach()
        for buffer in module.buffers()
        if buffer.layout is torch.strided and buffer.numel()
    ]


@torch.no_grad()
def packed(buffers: Sequence[Tensor]) -> Tensor:
    """Returns the bytes of all buffers, flat, for one broadcast. They are on one device."""
    pieces = [
        buffer.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for buffer in _in_order(buffers)
    ]
    return torch.cat(pieces)


@torch.no_grad()
def unpack(sent: Tensor, buffers: Sequence[Tensor]) -> None:
    """Writes the bytes that :func:`packed` returned on another rank into the buffers."""
    ordered = _in_order(buffers)
    sizes = [buffer.numel() * buffer.element_size() for buffer in ordered]
    for buffer, piece in zip(ordered, sent.split(sizes), strict=True):
        buffer.copy_(piece.view(buffer.dtype).view(buffer.shape))


def _in_order(buffers: Sequence[Tensor]) -> list[Tensor]:
    """Sorts by element size, the largest first, so that each piece is aligned."""
    return sorted(buffers, key=lambda buffer: -buffer.element_size())
