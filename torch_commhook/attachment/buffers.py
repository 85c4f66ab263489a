"""Packs a model's buffers, such as running statistics, into one message between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torch_commhook.attachment.parameters import ignored_names


def buffers_of(module: nn.Module) -> list[Tensor]:
    """Returns the module's buffers that rank 0 sends to the others: DDP ignores none of them."""
    ignored = ignored_names(module)
    return [
        buffer.detach()
        for name, buffer in module.named_buffers()
        if name not in ignored and buffer.layout is torch.strided and buffer.numel()
    ]


@torch.no_grad()
def packed(buffers: Sequence[Tensor]) -> Tensor:
    """Returns the bytes of all buffers as a flat uint8 tensor. They must be on one device."""
    pieces = [
        buffer.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for buffer in _in_order(buffers)
    ]
    return torch.cat(pieces)


@torch.no_grad()
def unpack(sent: Tensor, buffers: Sequence[Tensor]) -> None:
    """Writes the bytes that another rank's :func:`packed` returned into the buffers."""
    ordered = _in_order(buffers)
    sizes = [buffer.numel() * buffer.element_size() for buffer in ordered]
    for buffer, piece in zip(ordered, sent.split(sizes), strict=True):
        buffer.copy_(piece.view(buffer.dtype).view(buffer.shape))


def _in_order(buffers: Sequence[Tensor]) -> list[Tensor]:
    """Sorts by element size, the largest first, so that each buffer's bytes are aligned."""
    return sorted(buffers, key=lambda buffer: -buffer.element_size())
