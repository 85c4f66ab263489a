"""A codec in Python alone: it sends the upper half of each float32.

Importing the file registers the codec and its hook, so that these commands use it::

    python -m torch_commhook train --hook examples/python_codec.py:hook
    cd examples && python -m pytest -p python_codec ../tests/codecs/test_codecs.py

The second runs the tests of all codecs' contract on this codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from torch_commhook import hooks
from torch_commhook.codecs import Codec, Segment, flatten, register_codec, unflatten_into


@register_codec
class truncated(Codec):  # noqa: N801 (a codec is written as it is called)
    """The upper half of each float32: bfloat16, rounded towards zero.

    An infinity is decoded unchanged, and a NaN as an infinity or NaN. For both the error memory
    stays unchanged.

    Bytes for each value: 2.
    """

    def segments(self, numel: int, segments: int = 1) -> list[Segment]:
        if segments < 1 or numel < 0:
            raise ValueError(
                "truncated: segments must be at least 1 and numel at least 0, got "
                f"{segments}, {numel}"
            )
        ends = [numel * number // segments for number in range(segments + 1)]
        counts = [last - first for first, last in pairwise(ends)]
        # Each segment begins at a multiple of four bytes.
        return [Segment(count, (2 * count + 3) // 4 * 4) for count in counts]

    def encode(
        self,
        tensors: Sequence[Tensor],
        message: Tensor,
        *,
        segments: int = 1,
        scale: float = 1.0,
        error: Tensor | None = None,
        rounding: Tensor | None = None,
    ) -> None:
        values = flatten(tensors, dtype=torch.float32, scale=scale)
        if error is not None:
            values = values + error
        # Integers, because a compiler may remove a cast to bfloat16 and back.
        upper = values.view(torch.int32) >> 16
        if error is not None:
            lost = values - (upper << 16).view(torch.float32)
            error.copy_(torch.where(lost.isfinite(), lost, error))
        message.zero_()  # includes the padding of segments
        for part, own in self._parts(message, upper.numel(), segments):
            part.copy_(upper[own])

    def decode(
        self,
        message: Tensor,
        tensors: Sequence[Tensor],
        *,
        segments: int = 1,
        rounding: Tensor | None = None,
    ) -> None:
        numel = sum(tensor.numel() for tensor in tensors)
        upper = torch.cat([part for part, _ in self._parts(message, numel, segments)])
        unflatten_into((upper.int() << 16).view(torch.float32), tensors)

    def _parts(self, message: Tensor, numel: int, segments: int) -> list[tuple[Tensor, slice]]:
        """For each segment its part of the message, as int16, and the range of its values."""
        found, place, first = [], 0, 0
        for count, nbytes in self.segments(numel, segments):
            part = message[place : place + 2 * count].view(torch.int16)
            found.append((part, slice(first, first + count)))
            place, first = place + nbytes, first + count
        return found

    def __repr__(self) -> str:
        return "truncated()"


hook = hooks.error_feedback(hooks.compressed(truncated()))
