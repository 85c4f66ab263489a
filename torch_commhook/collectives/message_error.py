"""The error of a message, measured on a sample of its values.

Measuring takes a few passes over the values. On all of them it would cost more than the rest of a
step, in time and in memory; so a large message is measured on some of its values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.codecs.base import Codec
from torch_commhook.metrics import CallMeter

#: Values that are measured: all of so few, one in so many of more, and never more than so many.
_LEAST, _ONE_IN, _MOST = 1 << 14, 32, 1 << 20
#: Values that follow each other in a sample: whole blocks of any codec that has blocks.
_PIECE = 1 << 12


class MessageError:
    """A sample of the values that a message is to hold, taken before it is encoded.

    Args:
        sources: the values, as a codec encodes them.
        error: what is added to them; flat.
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
        """Note what has been lost.

        Args:
            meter: of the messages.
            codec: that has encoded the message.
            error: what the message has lost, where that is remembered. Else the sample is encoded
                by itself: a codec that chooses among all values then chooses among those.
            rounding: as the codec was given it.
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
    """A sample of what is to be encoded, where its error is to be measured.

    Args:
        meter: of the messages; None where nothing is measured.
        sources, error: as :class:`MessageError`.
    """
    if meter is None or not meter.is_due():
        return None
    return MessageError(sources, error)


def _places(numel: int) -> list[tuple[int, int]]:
    """Where the sample's values are: pieces, each by its begin and end."""
    if numel <= _LEAST:
        return [(0, numel)]
    pieces = min(max(numel // _ONE_IN, _LEAST), _MOST) // _PIECE
    between = numel // pieces // _PIECE * _PIECE
    return [(i * between, i * between + _PIECE) for i in range(pieces)]


def _values_at(tensors: Sequence[Tensor], places: Sequence[tuple[int, int]]) -> Tensor:
    """Values of tensors, one after another, as float32.

    Args:
        tensors: whose values follow each other in the order of ``flatten``.
        places: in their order.
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
