"""Measures the link between the ranks, as a part of ``bench``."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from torch_commhook.planning.link import MOST_BYTES, LinkFigures, measure_figures
from torch_commhook.planning.link_file import Message
from torch_commhook.planning.wire import Wire

SIZES = tuple(1 << power for power in range(10, 27, 2))
#: The share of the part's time for the rate and the round trip.
_FIGURES = 0.5
_LEAST_TRIES, _MOST_TRIES = 3, 30


@dataclass(frozen=True)
class LinkPart:
    """The measurements of the link.

    Attributes:
        figures: the rates and the round trip.
        messages: the times of messages, by size.
        left_out: the reason for each size in bytes that was not measured.
    """

    figures: LinkFigures
    messages: list[Message]
    left_out: dict[int, str]


def measure_link_part(wire: Wire, seconds: float) -> LinkPart:
    """Measure the link, and messages of 1 KiB to 64 MiB in both directions at once.

    Args:
        wire: the link between the ranks.
        seconds: the approximate time of all measurements.
    """
    begun = time.perf_counter()
    figures = measure_figures(wire, seconds * _FIGURES)
    left = seconds - float(wire.shared(time.perf_counter() - begun).max())
    messages, left_out = [], {}
    for number, size in enumerate(SIZES):
        sent = size * (wire.ranks - 1)
        bits_per_second = min(figures.rates.values())
        wanted = figures.round_trip + sent * 8 / bits_per_second
        if sent > MOST_BYTES:
            left_out[size] = f"{wire.ranks} ranks would need too much memory"
        elif number and wanted * (1 + _LEAST_TRIES) > left:
            left_out[size] = f"one takes about {wanted:.1f} s; give more --seconds"
        else:
            begun = time.perf_counter()
            share = left / (len(SIZES) - number)
            messages.append(Message(size, _median(wire, size, share)))
            left -= float(wire.shared(time.perf_counter() - begun).max())
    return LinkPart(figures, messages, left_out)


def _median(wire: Wire, nbytes: int, seconds: float) -> float:
    """The median time in seconds in which each rank sends a message, on the slowest rank."""
    begun = time.perf_counter()
    wire.seconds(nbytes)  # allocates memory, and lets TCP adapt
    found: list[float] = []
    while len(found) < _MOST_TRIES:
        values = wire.shared(wire.seconds(nbytes), time.perf_counter() - begun)
        took, elapsed = values.amax(0).tolist()
        found.append(took)
        if len(found) >= _LEAST_TRIES and elapsed > seconds:
            break
    return statistics.median(found)
