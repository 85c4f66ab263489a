"""How long each member of a training computes for a step, and who is slow."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

_log = logging.getLogger("torch_commhook.elastic")

#: A time is sent as its logarithm, in 16 bits: so many steps for a factor of two, from _LEAST on.
_PER_OCTAVE = 1024
_LEAST = 1e-7
_MOST_CODE = (1 << 16) - 1


class Pace:
    """Measures this rank's computing time, and compares that of all members.

    Each member tells its own time at the end of a step. So all find the same from the same times.

    Args:
        factor: a member is slow if its time is more than so many times the median.
        steps: a member is a straggler if it was slow in so many steps in a row.
        now: a clock, in seconds.

    Attributes:
        stragglers: maps each straggler to its last time, divided by the median.
    """

    def __init__(
        self, factor: float, steps: int, *, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._factor = factor
        self._steps = steps
        self._now = now
        self._began: float | None = None
        self._ended: float | None = None
        self._counts: dict[int, int] = {}  # steps in a row in which a member was slow
        self.stragglers: dict[int, float] = {}

    def begin(self) -> None:
        """Begin to measure: a step has ended, and the next one begins."""
        self._began, self._ended = self._now(), None

    def end(self) -> None:
        """Measure no longer: this rank waits for others."""
        self._ended = self._now()

    def skip(self) -> None:
        """Do not measure the step that is open: ranks connect in it, or repeat it."""
        self._began = None

    def seconds(self, steps: int = 1) -> float | None:
        """The computing time of a step from :meth:`begin` to :meth:`end`, or to now.

        None where it is not measured.

        Args:
            steps: that were taken since then.
        """
        if self._began is None or steps < 1:
            return None
        ended = self._now() if self._ended is None else self._ended
        return (ended - self._began) / steps

    def compare(self, own: int, seconds: Mapping[int, float]) -> None:
        """Compare the members' times of one step, and log who becomes a straggler.

        Args:
            own: this member.
            seconds: of each member that has measured the step.
        """
        if len(seconds) < 2:
            return
        # The lower one of the two in the middle: of two ranks, one can be slow.
        median = statistics.median_low(seconds.values())
        for rank, each in seconds.items():
            ratio = each / median
            if ratio <= self._factor:
                self._counts.pop(rank, None)
                if self.stragglers.pop(rank, None) is not None:
                    _log.warning("rank %d: rank %d is not slow any more", own, rank)
                continue
            self._counts[rank] = count = self._counts.get(rank, 0) + 1
            if count == self._steps:
                _log.warning(
                    "rank %d: rank %d is slow: it computes for %.3g s a step, %.3g times the "
                    "median, and was slow in the last %d steps",
                    own,
                    rank,
                    each,
                    ratio,
                    count,
                )
            if count >= self._steps:
                self.stragglers[rank] = ratio

    def keep(self, members: Sequence[int]) -> None:
        """Forget all ranks that are not among the members."""
        for table in (self._counts, self.stragglers):
            for rank in set(table) - set(members):
                del table[rank]


def coded_seconds(seconds: float | None) -> tuple[int, int]:
    """Two bytes for a time; zeros for None. :func:`seconds_of` is within 0.04 % of the time."""
    if seconds is None:
        return 0, 0
    code = 1 + round(math.log2(max(seconds, _LEAST) / _LEAST) * _PER_OCTAVE)
    return divmod(min(code, _MOST_CODE), 256)


def seconds_of(high: int, low: int) -> float | None:
    """The time that :func:`coded_seconds` was given, or None."""
    code = 256 * high + low
    return None if code == 0 else _LEAST * 2.0 ** ((code - 1) / _PER_OCTAVE)


class Note:
    """What members tell each other at the end of a step, by a maximum of bytes over them.

    Each member writes its own bytes; the others have zeros there.

    Args:
        size: of the members.
        compares: whether they compare their times.
        joins: whether some of them get their state in pieces.
        values: uint8, as all members have written it; None to write one.

    Attributes:
        values: uint8, flat.
    """

    def __init__(
        self, size: int, *, compares: bool, joins: bool = False, values: Tensor | None = None
    ) -> None:
        self._size = size
        self._compares = compares
        self._joins = joins
        length = 1 + size * (3 * compares + joins)
        self.values = (
            torch.zeros(length, dtype=torch.uint8, device="cpu") if values is None else values
        )

    @property
    def wants_change(self) -> bool:
        """Whether a member knows of somebody who is to be let in."""
        return bool(self.values[0])

    @wants_change.setter
    def wants_change(self, value: bool) -> None:
        self.values[0] = value

    def write_time(self, place: int, seconds: float | None) -> None:
        """Write the computing time of the member at a place."""
        self._rows()[:2, place] = torch.tensor(
            coded_seconds(seconds), dtype=torch.uint8, device="cpu"
        )

    def times(self) -> dict[int, float]:
        """The times that were measured, by place."""
        if not self._compares:
            return {}
        high, low, _ = self._rows().tolist()
        found = {place: seconds_of(*code) for place, code in enumerate(zip(high, low, strict=True))}
        return {place: each for place, each in found.items() if each is not None}

    def leave_out(self, place: int) -> None:
        """Write that the member at a place is to be left out."""
        self._rows()[2, place] = 1

    def left_out(self) -> list[int]:
        """The places of the members that are to be left out."""
        return self._rows()[2].nonzero().flatten().tolist() if self._compares else []

    def write_has_all(self, place: int) -> None:
        """Write that the member at a place has got all pieces."""
        self.values[-self._size :][place] = 1

    def having_all(self) -> list[int]:
        """The places of the members that have got all pieces just now."""
        return self.values[-self._size :].nonzero().flatten().tolist() if self._joins else []

    def _rows(self) -> Tensor:
        return self.values[1 : 1 + 3 * self._size].view(3, self._size)
