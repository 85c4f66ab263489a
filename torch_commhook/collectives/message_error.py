"""Measures the error of a message, on a sample of its values.

A measurement takes a few passes over the values. On all values it would cost more than the rest of
a step, in time and in memory. So large messages are measured on some of their values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.codecs.base import Codec
from torch_commhook.metrics import CallMeter

#: The sample: all values of a small message, one in so many of a larger one, up to a maximum.
_LEAST, _ONE_IN, _MOST = 1 << 14, 32, 1 << 20
#: Consecutive values in a sample: whole blocks of any codec that has blocks.
_PIECE = 1 << 12


class MessageError:
    """A sample of the values of a message, taken before the message is encoded.

    Args:
        sources: the values, as for a codec's ``encode``.
        error: the error that is added to them; flat.
    """

    def __init__(self, sources: Sequence[Tensor], error: Tensor | None) -> None:
        numel = sum(tensor.numel() for tensor in sources)
        self._places = _places(numel)
        with torch.no_grad():
            self._values = _values_at(sources, self._places)
            if error is not None:
                self._values += _values_at([error], self._places)

    def note(
        self, meter: CallMeter, codec: Codec, error: Tensor | None, rounding: Tensor | None
    ) -> None:
        """Record the message's error.

        Args:
            meter: records it.
            codec: the codec that has encoded the message.
            error: the message's error, if it is remembered. Otherwise the sample is encoded by
                itself: a codec that chooses among all values then chooses among these.
            rounding: the codec's ``rounding``.
        """
        values = self._values
        with torch.no_grad():
            if error is not None:
                lost = _values_at([error], self._places)
            else:
                message = torch.empty(
                    codec.nbytes(values.numel()), dtype=torch.uint8, device=values.device
                )
                lost = torch.empty_like(values)
                codec.encode([values], message, rounding=rounding)
                codec.decode(message, [lost], rounding=rounding)
                torch.sub(values, lost, out=lost)
            norms = [torch.linalg.vector_norm(v, dtype=torch.float64) for v in (lost, values)]
            meter.note_squares(norms[0].square(), norms[1].square())


def begin_measuring(
    meter: CallMeter | None, sources: Sequence[Tensor], error: Tensor | None
) -> MessageError | None:
    """Take a sample of the values to encode, if their error is to be measured.

    Args:
        meter: records the error; None to measure nothing.
        sources, error: as for :class:`MessageError`.
    """
    if meter is None or not meter.is_due():
        return None
    return MessageError(sources, error)


def _places(numel: int) -> list[tuple[int, int]]:
    """The positions of the sample's values: pieces, each by begin and end."""
    if numel <= _LEAST:
        return [(0, numel)]
    pieces = min(max(numel // _ONE_IN, _LEAST), _MOST) // _PIECE
    between = numel // pieces // _PIECE * _PIECE
    return [(i * between, i * between + _PIECE) for i in range(pieces)]


def _values_at(tensors: Sequence[Tensor], places: Sequence[tuple[int, int]]) -> Tensor:
    """Values of tensors, one after another, as float32.

    Args:
        tensors: tensors whose values are numbered in the order of ``flatten``.
        places: pieces in ascending order.
    """
    found: list[Tensor] = []
    waiting = list(reversed(places))
    begin = 0
    for tensor in tensors:
        end = begin + tensor.numel()
        flat: Tensor | None = None
        while waiting and waiting[-1][0] < end:
            first, last = waiting.pop()
            if flat is None:
                flat = tensor.reshape(-1)
            found.append(flat[first - begin : min(last, end) - begin])
            if last > end:
                waiting.append((end, last))
        begin = end
    if not found:
        return tensors[0].new_empty(0, dtype=torch.float32)
    return torch.cat([piece.to(torch.float32) for piece in found])
