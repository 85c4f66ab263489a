"""Messages of ``blockwise``: encodes and decodes tensors, and reads the steps of their blocks."""

from __future__ import annotations

from typing import Any

import codec_examples
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
_SETTINGS = ("bits", "block_size", "symmetric")


def _codec_and_arguments(options: dict[str, Any]) -> tuple[blockwise, dict[str, Any]]:
    """The codec, whose rounding is random if ``rounding`` is given, and its arguments."""
    settings = {name: options.pop(name) for name in _SETTINGS if name in options}
    rounding = "nearest" if options.get("rounding") is None else "stochastic"
    return blockwise(rounding=rounding, **settings), options


def encode(tensors: list[Tensor], **options: Any) -> Tensor:
    codec, arguments = _codec_and_arguments(options)
    return codec_examples.encode(codec, tensors, **arguments)


def restore(x: Tensor, **options: Any) -> Tensor:
    codec, arguments = _codec_and_arguments(options)
    return codec_examples.restore(codec, x, **arguments)


def steps_of(x: Tensor, bits: int, symmetric: bool, block_size: int) -> Tensor:
    blocks = x.view(-1, block_size)
    span = blocks.abs().amax(1) if symmetric else blocks.amax(1) - blocks.amin(1)
    return (span / LEVELS[bits, symmetric])[:, None]
