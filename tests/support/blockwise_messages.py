"""Messages of ``blockwise``: encodes and decodes tensors, and reads the steps of their blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_commhook.codecs.blockwise import blockwise

LEVELS = {
    (8, True): 127,
    (4, True): 7,
    (2, True): 1,
    (8, False): 255,
    (4, False): 15,
    (2, False): 3,
}


def codec_for(rounding: Tensor | None = None, **form: Any) -> blockwise:
    return blockwise(rounding="nearest" if rounding is None else "stochastic", **form)


def encode(
    tensors: list[Tensor],
    *,
    shards: int = 1,
    scale: float = 1.0,
    error: Tensor | None = None,
    rounding: Tensor | None = None,
    **form: Any,
) -> Tensor:
    codec = codec_for(rounding, **form)
    numel = sum(tensor.numel() for tensor in tensors)
    message = torch.full((codec.nbytes(numel, shards),), 77, dtype=torch.uint8)
    codec.encode(tensors, message, shards=shards, scale=scale, error=error, rounding=rounding)
    return message


def restore(
    x: Tensor,
    *,
    shards: int = 1,
    scale: float = 1.0,
    error: Tensor | None = None,
    rounding: Tensor | None = None,
    **form: Any,
) -> Tensor:
    message = encode([x], shards=shards, scale=scale, error=error, rounding=rounding, **form)
    out = torch.empty_like(x)
    blockwise(**form).decode(message, [out], shards=shards)
    return out


def steps_of(x: Tensor, bits: int, symmetric: bool, block_size: int) -> Tensor:
    blocks = x.view(-1, block_size)
    span = blocks.abs().amax(1) if symmetric else blocks.amax(1) - blocks.amin(1)
    return (span / LEVELS[bits, symmetric])[:, None]
