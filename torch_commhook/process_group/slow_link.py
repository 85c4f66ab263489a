"""The times at which Gloo's collectives end on a link of given bandwidth and latency."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from torch_commhook.process_group.gloo_messages import Messages

#: Called with the time of the event, in seconds.
Event = Callable[[float], object]


class SlowLink:
    """A rank's link, which carries one message after another.

    The caller gives the time, in seconds of any clock. Events happen only in :meth:`advance`.

    Args:
        bandwidth: bits per second, each way.
        latency: the latency of a message, one way, in seconds.
        burst: bytes that it carries at once after a sufficient pause.
    """

    def __init__(self, bandwidth: float, latency: float, burst: float = 0.0) -> None:
        self.bandwidth = bandwidth
        self.latency = latency
        self.burst = burst
        #: All events up to this time have happened.
        self.now = 0.0
        #: When the last byte sent so far leaves.
        self.is_free = 0.0
        self._would_be_free = 0.0  # without bursts
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()

    def at(self, when: float, event: Event) -> None:
        """Let :meth:`advance` call ``event(when)``."""
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def next_event(self) -> float | None:
        """The time of the next event, or None."""
        return self._events[0][0] if self._events else None

    def advance(self, until: float) -> None:
        """Call the events up to and including a time."""
        while self._events and self._events[0][0] <= until:
            when, _, event = heapq.heappop(self._events)
            self.now = max(self.now, when)
            event(when)
        self.now = max(self.now, until)

    def finish(self) -> None:
        """Call all events, including those that events add."""
        while self._events:
            self.advance(self._events[0][0])

    def carry(self, when: float, nbytes: float) -> float:
        """Send bytes behind all earlier ones. Returns the time when the last byte leaves."""
        self._would_be_free = max(when, self._would_be_free) + nbytes * 8 / self.bandwidth
        self.is_free = max(when, self._would_be_free - self.burst * 8 / self.bandwidth)
        return self.is_free


class GlooGroup:
    """A group of ranks over Gloo, seen from one rank.

    Args:
        link: this rank's link. Other groups may use it too.
        threads: the number of collectives that run at once; others wait in order.
    """

    def __init__(self, link: SlowLink, threads: int) -> None:
        self.link = link
        self.threads = threads
        self._running = 0
        self._waiting: deque[tuple[Sequence[Messages], Event]] = deque()

    def issue(self, when: float, parts: Sequence[Messages], done: Event) -> None:
        """Begin a collective at a time that :meth:`SlowLink.advance` has not passed.

        Args:
            when: the time in seconds.
            parts: the parts of the collective; without any it ends at once.
            done: called with the time of its end.
        """
        self._waiting.append((parts, done))
        self._begin_next(when)

    def send(self, when: float, parts: Sequence[Messages], done: Event) -> None:
        """Begin messages between two ranks, which occupy no thread; as :meth:`issue`."""
        _Collective(self.link, parts, done).begin(when)

    def _begin_next(self, when: float) -> None:
        while self._waiting and self._running < self.threads:
            parts, done = self._waiting.popleft()
            self._running += 1
            _Collective(self.link, parts, self._ended(done)).begin(when)

    def _ended(self, done: Event) -> Event:
        def ended(when: float) -> None:
            self._running -= 1
            self._begin_next(when)
            done(when)

        return ended


class _Collective:
    """The messages of one collective."""

    def __init__(self, link: SlowLink, parts: Sequence[Messages], done: Event) -> None:
        self._link = link
        self._parts = deque(parts)
        self._done = done

    def begin(self, when: float) -> None:
        """Begin the next part, or end."""
        while self._parts and self._parts[0].count == 0:
            self._parts.popleft()
        if not self._parts:
            self._link.at(when, self._done)
            return
        self._part = self._parts.popleft()
        self._latency = self._part.latencies * self._link.latency
        self._begun = self._ended = 0
        for _ in range(min(self._part.at_once, self._part.count)):
            self._request(when)

    def _request(self, when: float) -> None:
        self._begun += 1
        if not self._part.is_requested:
            self._link.at(when, self._send)
            return
        leaves = when
        if self._part.shares_connection:
            leaves = max(when, self._link.is_free)
        self._link.at(leaves + self._latency, self._send)

    def _send(self, when: float) -> None:
        leaves = self._link.carry(when, self._part.nbytes)
        self._link.at(leaves + self._latency, self._arrive)

    def _arrive(self, when: float) -> None:
        self._ended += 1
        if self._begun < self._part.count:
            self._request(when)
        elif self._ended == self._part.count:
            self.begin(when)
