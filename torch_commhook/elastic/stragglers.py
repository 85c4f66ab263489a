"""Measures how long each member of a training computes for a step, and finds slow ones."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

_log = logging.getLogger("torch_commhook.elastic")


class StepTimer:
    """Measures this rank's computing time, and compares the times of all members.

    Each member sends its own time at the end of a step. All use the same times, so all find the
    same stragglers.

    Args:
        factor: a member is slow if its time exceeds this many times the median.
        steps: a member is a straggler if it was slow in this many consecutive steps.
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
        self._counts: dict[int, int] = {}  # consecutive steps in which a member was slow
        self.stragglers: dict[int, float] = {}

    def begin(self) -> None:
        """Start to measure: a step has ended, and the next one begins."""
        self._began, self._ended = self._now(), None

    def end(self) -> None:
        """Stop measuring: this rank waits for others."""
        self._ended = self._now()

    def skip(self) -> None:
        """Do not measure the open step: ranks connect in it, or repeat it."""
        self._began = None

    def seconds(self, steps: int = 1) -> float | None:
        """The computing time of each of some steps from :meth:`begin` to :meth:`end`, or until now.

        None if it is not measured.
        """
        if self._began is None or steps < 1:
            return None
        ended = self._now() if self._ended is None else self._ended
        return (ended - self._began) / steps

    def compare(self, own: int, seconds: Mapping[int, float]) -> None:
        """Compare the times of the members that have measured a step, and log new stragglers."""
        if len(seconds) < 2:
            return
        # The lower median: of two ranks, one can be slow.
        median = statistics.median_low(seconds.values())
        for rank, each in seconds.items():
            ratio = each / median
            if ratio <= self._factor:
                self._counts.pop(rank, None)
                if self.stragglers.pop(rank, None) is not None:
                    _log.warning("rank %d: rank %d is no longer slow", own, rank)
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
        """Forget all ranks that are not members."""
        for table in (self._counts, self.stragglers):
            for rank in set(table) - set(members):
                del table[rank]


#: The bytes of a member's time, in float32.
_TIME_BYTES = 4
#: A member's word: it is too slow, or it leaves by itself.
_IS_SLOW, _LEAVES = 1, 2


class StepReport:
    """The members' messages at the end of a step, combined by a maximum of bytes.

    Each member writes its own bytes; the others have zeros there.

    Args:
        size: the number of members.
        compares: whether they compare their times.
        joins: whether some of them receive their state in pieces.
        values: uint8, as combined from all members; None for a new note.

    Attributes:
        values: uint8, flat.
    """

    def __init__(
        self, size: int, *, compares: bool, joins: bool = False, values: Tensor | None = None
    ) -> None:
        self._size = size
        self._compares = compares
        self._joins = joins
        length = 1 + size * (1 + _TIME_BYTES * compares + joins)
        self.values = (
            torch.zeros(length, dtype=torch.uint8, device="cpu") if values is None else values
        )

    @property
    def wants_change(self) -> bool:
        """Whether a member knows of a rank that wants to join."""
        return bool(self.values[0])

    @wants_change.setter
    def wants_change(self, value: bool) -> None:
        self.values[0] = value

    def write_time(self, place: int, seconds: float | None) -> None:
        """Write the computing time of the member at a place."""
        time = torch.tensor([seconds or 0.0], dtype=torch.float32, device="cpu")
        self._times()[place] = time.view(torch.uint8)

    def times(self) -> dict[int, float]:
        """The measured times, by place."""
        if not self._compares:
            return {}
        # A copy: a float32 must begin at a multiple of its size.
        times = self._times().clone().view(torch.float32).flatten().tolist()
        return {place: each for place, each in enumerate(times) if each}

    def leave_out(self, place: int) -> None:
        """Write that the member at a place is to be left out, since it is slow."""
        self._words()[place] = _IS_SLOW

    def left_out(self) -> list[int]:
        """The places of the members that are to be left out."""
        return self._places_of(_IS_SLOW)

    def write_leaves(self, place: int) -> None:
        """Write that the member at a place leaves after this step."""
        self._words()[place] = _LEAVES

    def leaving(self) -> list[int]:
        """The places of the members that leave after this step."""
        return self._places_of(_LEAVES)

    def write_has_all(self, place: int) -> None:
        """Write that the member at a place has received all pieces."""
        self.values[-self._size :][place] = 1

    def having_all(self) -> list[int]:
        """The places of the members that have just received all pieces."""
        return self.values[-self._size :].nonzero().flatten().tolist() if self._joins else []

    def _places_of(self, word: int) -> list[int]:
        return [place for place, each in enumerate(self._words().tolist()) if each == word]

    def _words(self) -> Tensor:
        return self.values[1 : 1 + self._size]

    def _times(self) -> Tensor:
        begin = 1 + self._size
        return self.values[begin : begin + _TIME_BYTES * self._size].view(self._size, _TIME_BYTES)
