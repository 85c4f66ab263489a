"""The link between a group's ranks: measured, and used by several connections.

Over a far link, messages can use several connections to each rank (``attach(connections=)``), which
share the chunks of a message. In one round trip a TCP connection carries at most the contents of
its buffers, and each lost packet slows it down. This module measures whether several are faster.
``commhook bench``, ``measure_link`` and ``auto`` measure the same, for longer.
"""

from __future__ import annotations

import hashlib
import logging
import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import (
    destroy_group,
    exchanges,
    group_name,
    group_store,
    group_timeout,
    is_gloo_or_own,
    lacks_cpu,
    make_group,
    resolve_group,
    state_of,
)
from torch_commhook.collectives.hosts import machine
from torch_commhook.collectives.issuing import FEW_RANKS, issue_all_to_all, place_in
from torch_commhook.step.connected_group import ConnectedGroup

#: The share of an Ethernet frame that is not headers (Ethernet, IP and TCP).
PAYLOAD = 1448 / 1514
#: The number of connections that a link is tested with, and gets if they are faster.
MANY = 4
#: The least round trip for which more connections are measured.
_FAR_SECONDS = 5e-3
#: The required speedup of several connections.
_LEAST_GAIN = 1.3


@dataclass(frozen=True)
class MeasuredLink:
    """A rank's link to the other ranks of a group.

    Args:
        bits_per_second: the rate each way, with the headers of packets. Ranks that share a network
            card divide its rate.
        delay_seconds: the delay of a message, one way: half of a round trip.

    Raises:
        TypeError: an argument is not a number.
        ValueError: the rate is not positive and finite, or the delay is negative or not finite.

    Example:
        >>> MeasuredLink(bits_per_second=200e6, delay_seconds=0.025)
        MeasuredLink(bits_per_second=200000000.0, delay_seconds=0.025)
    """

    bits_per_second: float
    delay_seconds: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"MeasuredLink: {name} must be a number, got {_C.type_name(value)}")
        if not 0 < self.bits_per_second < math.inf:
            raise ValueError(
                f"MeasuredLink: bits_per_second must be positive and finite, got "
                f"{self.bits_per_second}"
            )
        if not 0 <= self.delay_seconds < math.inf:
            raise ValueError(
                f"MeasuredLink: delay_seconds must be at least 0 and finite, got "
                f"{self.delay_seconds}"
            )


@dataclass(frozen=True)
class Link:
    """The measurements of a group's link; the same on all ranks.

    Attributes:
        round_trip: the round trip in seconds; 0 if all ranks are on one machine.
        rates: bits per second each way, with headers, by the number of connections.
    """

    round_trip: float
    rates: dict[int, float] = field(default_factory=dict)

    @property
    def connections(self) -> int:
        """The number of connections that large messages should use."""
        is_faster = MANY in self.rates and self.rates[MANY] >= _LEAST_GAIN * self.rates[1]
        return MANY if is_faster else 1

    @property
    def measured(self) -> MeasuredLink:
        """The link over :attr:`connections` connections."""
        return MeasuredLink(self.rates[self.connections], self.round_trip / 2)


# ---- times messages between all ranks of a group -------------------------------------------------
#
# All ranks send at once, as hooks do. Ranks base their decisions on shared numbers
# (:meth:`Wire.shared`), so they issue the same messages.


class Wire:
    """Sends messages between the ranks of a group, and times them.

    Each rank creates one, and all call the same methods in the same order.

    Args:
        group: two or more ranks; None for the default group.
        device: the messages' device; None for the CPU if the group has a backend for it, else CUDA.
        to_all: whether the messages of :meth:`arrivals` go to all other ranks in turn. By default
            they go to the opposite rank, which is on another host if consecutive ranks share hosts.

    Attributes:
        flows: the group whose connections carry the messages of :meth:`arrivals`.
        distances: from a rank to those that get these messages.

    Raises:
        RuntimeError, TypeError: as :func:`torch_commhook.collectives.resolve_group`.
        ValueError: as there, or the group has one rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        *,
        to_all: bool = False,
    ) -> None:
        self.group = resolve_group(group)
        self.ranks: int = self.group.size()
        if self.ranks < 2:
            raise ValueError(
                f"measure_link: group must have two or more ranks, got {self.ranks}: one rank has "
                "no link"
            )
        if device is None:
            device = "cuda" if lacks_cpu(self.group) else "cpu"
        self.device = torch.device(device)
        self.flows = self.group
        self.distances: Sequence[int] = range(1, self.ranks) if to_all else [self.ranks // 2]
        self._rank: int = self.group.rank()
        self._memory: dict[str, Tensor] = {}

    def seconds(self, nbytes: int) -> float:
        """The seconds in which this rank sends a message to each other rank and receives theirs.

        That is the time of the bytes and one to two delays: ranks begin at times that differ by up
        to a delay.
        """
        total = nbytes * (self.ranks - 1)
        sent, received = self._bytes("sent", total), self._bytes("received", total)
        splits = [nbytes] * self.ranks
        splits[self._rank] = 0
        self.shared(0.0)  # all ranks begin
        begun = time.perf_counter()
        issue_all_to_all(sent, splits, splits, received, self.group).wait()
        self._synchronize()
        return time.perf_counter() - begun

    def trip(self, first: int, others: Sequence[int], quiet_seconds: float) -> float:
        """The seconds in which a byte goes from ``first`` to others and back; 0 on other ranks.

        All further ranks sleep for ``quiet_seconds``, since they may share processors.
        """
        there = {(first, other) for other in others}
        back = {(other, first) for other in others}
        ways = [there, back]
        if self.device.type == "cpu" and not exchanges(self.group):
            ways = [there | back]  # Gloo's receivers ask for each message
        sent, received = self._bytes("sent", self.ranks), self._bytes("received", self.ranks)
        self.shared(0.0)
        begun = time.perf_counter()
        for way in ways:
            sends = [int((self._rank, rank) in way) for rank in range(self.ranks)]
            gets = [int((rank, self._rank) in way) for rank in range(self.ranks)]
            issue_all_to_all(
                sent[: sum(sends)], sends, gets, received[: sum(gets)], self.group
            ).wait()
            self._synchronize()
        if self._rank == first:
            return time.perf_counter() - begun
        if self._rank not in others:
            time.sleep(quiet_seconds)
        return 0.0

    def arrivals(self, nbytes: int, count: int) -> list[float]:
        """The arrival times of messages that are under way at once: seconds on this rank, in order.

        This rank sends ``count`` messages of ``nbytes``, which take turns on the connections, and
        receives as many. The ranks' beginning is uncertain by the delay. Ranks that exchange
        messages have memory for all of them beforehand.
        """
        sent = self._bytes("sent", nbytes)
        received = self._bytes("received", nbytes * count).view(count, nbytes)
        routes = []  # the rank that gets each message, the one that sends the other, its memory
        for number, row in enumerate(received):
            distance = self.distances[number % len(self.distances)]
            to, source = (self._rank + distance) % self.ranks, (self._rank - distance) % self.ranks
            routes.append((to, source, row))
        if self.device.type == "cpu" and exchanges(self.group):
            return self._exchanged(sent, routes)
        self.shared(0.0)
        begun = time.perf_counter()
        futures = []
        for to, source, row in routes:
            sends, gets = [0] * self.ranks, [0] * self.ranks
            sends[to] = gets[source] = nbytes
            futures.append(issue_all_to_all(sent, sends, gets, row, self.group))
        found = []
        for future in futures:
            future.wait()
            self._synchronize()
            found.append(time.perf_counter() - begun)
        return found

    def _exchanged(self, sent: Tensor, routes: Sequence[tuple[int, int, Tensor]]) -> list[float]:
        """The arrival times of messages that have an exchange each, in order."""
        none = sent[:0]
        issued = []
        for to, source, row in routes:
            inputs, outputs = [none] * self.ranks, [none] * self.ranks
            inputs[to], outputs[source] = sent, row
            place = place_in(self.flows)
            place.expect(0, outputs)
            issued.append((place, inputs, outputs))
        self.shared(0.0)  # all ranks have said so, and begin
        found: list[float] = []
        begun = time.perf_counter()

        def came(future: torch.futures.Future[Tensor]) -> None:
            found.append(time.perf_counter() - begun)
            future.value()  # raises if it failed

        futures = [
            place.exchange(0, inputs, outputs, none).then(came) for place, inputs, outputs in issued
        ]
        torch.futures.wait_all(futures)
        return sorted(found)

    def shared(self, *values: float) -> Tensor:
        """The numbers of all ranks, on each rank: a float64 tensor of shape ``[ranks, values]``."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        every = own.new_empty((self.ranks, len(values)))
        rows = [len(values)] * self.ranks
        sent = own.repeat(self.ranks)
        issue_all_to_all(sent, rows, rows, every.flatten(), self.group).wait()
        return every.cpu()

    def largest(self, *values: float) -> list[float]:
        """The maximum of each number over the ranks, on each rank."""
        found: list[float] = self.shared(*values).amax(0).tolist()
        return found

    def _bytes(self, name: str, count: int) -> Tensor:
        """A buffer that later calls use again, so that no message waits for new pages."""
        found = self._memory.get(name)
        if found is None or found.numel() < count:
            self._memory.pop(name, None)  # frees the old buffer first
            found = torch.zeros(count, dtype=torch.uint8, device=self.device)
            self._memory[name] = found
        return found[:count]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


# ---- measures a link: the round trip, and the rate -----------------------------------------------
#
# The rate is that of a steady flow. Many messages are under way at once, and their arrival times
# give the rate. So it contains neither the delay, nor TCP's slow start, nor the burst of a token
# bucket. Flows repeat until the rate no longer grows.


#: The default time of :func:`measure_link`.
SECONDS = 5.0
#: The most bytes of a rank's messages that are under way at once.
MOST_BYTES = 1 << 26
#: A round trip's measurement: the least and the most tries, and its share of the time. A busy
#: machine lengthens many tries and shortens none.
_LEAST_TRIES, _MOST_TRIES, _TRY_SHARE = 3, 100, 0.2
#: Up to this number of ranks, all pairs are measured.
_FEW_PAIRED = 4
#: The least and the most seconds that the other ranks wait meanwhile.
_LEAST_QUIET, _MOST_QUIET = 0.005, 0.1
#: Rough flows: the bytes of the first one. Each next one has four times as many, until a flow takes
#: this many seconds (in a brief measurement those of a flow) and this many round trips.
_FIRST_BYTES, _GROWTH, _ROUGH_SECONDS, _ROUGH_ROUND_TRIPS = 1 << 16, 4, 0.1, 4
#: Measured flows: their seconds, or their round trips if these take longer.
_FLOW_SECONDS, _FLOW_ROUND_TRIPS = 0.4, 16
#: In a brief measurement: the seconds of a flow and those after which no flow begins, or the round
#: trips if these take longer.
_BRIEF_FLOW_SECONDS, _BRIEF_FLOW_ROUND_TRIPS = 0.03, 6
_BRIEF_SECONDS, _BRIEF_ROUND_TRIPS = 0.1, 24
#: The least and the most messages of a flow, and their bytes: a flow has more than the least number
#: only if each message is large, and no message is smaller than the least one.
_LEAST_MESSAGES, _MOST_MESSAGES = 12, 40
_LARGE_MESSAGE = 1 << 15
_LEAST_MESSAGE = 1 << 10
#: The seconds that a flow's first bytes may take beyond two round trips.
_LATE_SECONDS = 0.02
#: The share of a flow, at its beginning, that does not count.
_BEGINNING = 0.25
#: Flows end when there are this many, and the best of the last ones gains at most this share.
_LEAST_FLOWS, _STEADY_FLOWS, _STEADY = 4, 3, 0.02
#: A flow that is slower than the best one by more than this share does not count: other traffic
#: disturbed it, or TCP was still slow.
_DISTURBED = 0.1


def measure_link(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    seconds: float = SECONDS,
) -> MeasuredLink:
    """Measure the link between the ranks of a group: its rate each way and its delay.

    All ranks call it at the same point, and get the same result: that of the slowest rank. Each
    rank sends to another one and receives from one, all at once. If a round trip takes 5 ms or
    more, it also measures four connections over Gloo, as :func:`torch_commhook.attach` does. The
    result is the link over as many connections as ``attach`` would use.

    Args:
        group: two or more ranks; None for the default group.
        device: the messages' device; None for the CPU if the group has a backend for it, else CUDA.
        seconds: the approximate time of the measurement. The rate is too low if a flow ends before
            TCP reaches the rate of the link.

    Raises:
        TypeError, RuntimeError: as :func:`torch_commhook.collectives.resolve_group`.
        ValueError: as there; the group has one rank; ``seconds`` is not positive and finite.

    Example:
        >>> link = run_ranks(lambda rank: measure_link(seconds=0.1), 2)[0]
        >>> link.bits_per_second > 0
        True
    """
    return measure(Wire(group, device), seconds).measured


def measure(wire: Wire, seconds: float = SECONDS) -> Link:
    """The measurements of :func:`measure_link`."""
    if not 0 < seconds < math.inf:
        raise ValueError(f"measure_link: seconds must be positive and finite, got {seconds}")
    round_trip = measure_round_trip(wire, seconds * _TRY_SHARE)
    is_far = round_trip >= _FAR_SECONDS and _can_connect(wire.group)
    share = seconds * (1 - 2 * _TRY_SHARE) / (2 if is_far else 1)
    rates = {1: measure_rate(wire, round_trip, share)}
    if is_far:
        with _more_connections(wire):
            rates[MANY] = measure_rate(wire, round_trip, share)
    # A second measurement, since other programs may have disturbed the first one.
    again = measure_round_trip(wire, seconds * _TRY_SHARE)
    return Link(min(round_trip, again), rates)


def measure_briefly(wire: Wire, connect: Callable[[], object]) -> Link:
    """The measurements of ``attach``: nothing on one machine, and no rates of a near link.

    ``connect`` gives large messages of the group :data:`MANY` connections from then on.
    """
    if _is_local(wire):
        return Link(0.0)
    round_trip = measure_round_trip(wire, 0.0, is_brief=True)
    if round_trip < _FAR_SECONDS:
        return Link(round_trip)
    seconds = max(_BRIEF_SECONDS, _BRIEF_ROUND_TRIPS * round_trip)
    flow_seconds = max(_BRIEF_FLOW_SECONDS, _BRIEF_FLOW_ROUND_TRIPS * round_trip)
    one = measure_rate(wire, round_trip, seconds, flow_seconds)
    connect()
    return Link(round_trip, {1: one, MANY: measure_rate(wire, round_trip, seconds, flow_seconds)})


def _is_local(wire: Wire) -> bool:
    """Whether all ranks are on one machine, and see the same network."""
    every = wire.shared(*hashlib.sha256(machine().encode()).digest())
    return bool((every == every[0]).all())


def measure_round_trip(wire: Wire, seconds: float, *, is_brief: bool = False) -> float:
    """The longest round trip between two ranks, in seconds.

    For each pair of ranks it is the shortest of several tries, of which all but the first few begin
    within ``seconds``. Among many ranks, each one is measured with two others. With ``is_brief``
    rank 0 is measured with all others at once instead.
    """
    begun = time.perf_counter()
    trips: list[tuple[int, tuple[int, ...]]] = [(0, tuple(range(1, wire.ranks)))]
    if not is_brief:
        trips = [(first, (second,)) for first, second in pairs_of(wire.ranks)]
    least = dict.fromkeys(trips, math.inf)
    for tries in range(_MOST_TRIES):
        elapsed = 0.0
        for first, others in trips:
            quiet = min(2 * min(least.values()) + _LEAST_QUIET, _MOST_QUIET)
            took = wire.trip(first, others, quiet)
            took, elapsed = wire.largest(took, time.perf_counter() - begun)
            least[first, others] = min(least[first, others], took)
        if tries + 1 >= _LEAST_TRIES and elapsed > seconds:
            break
    return max(least.values())


def pairs_of(ranks: int) -> list[tuple[int, int]]:
    """The pairs of ranks for measurements of the round trip.

    Few ranks: all pairs. Many ranks: each with the next one and with the opposite one, which is on
    another host if consecutive ranks share hosts.
    """
    if ranks <= _FEW_PAIRED:
        return [(first, second) for second in range(ranks) for first in range(second)]
    half = ranks // 2
    neighbours = [(first, (first + 1) % ranks) for first in range(0, ranks, 2)]
    return [*((first, first + half) for first in range(ranks - half)), *neighbours]


def measure_rate(
    wire: Wire, round_trip: float, seconds: float, flow_seconds: float | None = None
) -> float:
    """The rate of the slowest rank's link, in bits per second each way, with headers.

    No flow but the first begins after ``seconds``. A flow takes ``flow_seconds``, by default 0.4
    seconds, or 16 round trips if they are more.
    """
    begun = time.perf_counter()
    rough_seconds = max(flow_seconds or _ROUGH_SECONDS, _ROUGH_ROUND_TRIPS * round_trip)
    if flow_seconds is None:
        flow_seconds = max(_FLOW_SECONDS, _FLOW_ROUND_TRIPS * round_trip)
    bytes_per_second = _rough_rate(wire, round_trip, begun, seconds, rough_seconds)
    of_flows: list[list[float]] = []  # the rates of all ranks, for each flow
    means: list[float] = []
    while True:
        flow = _flow(wire, min(bytes_per_second * flow_seconds, MOST_BYTES))
        found = wire.shared(flow.rate(round_trip), time.perf_counter() - begun)
        of_flows.append(found[:, 0].tolist())
        means.append(statistics.fmean(of_flows[-1]))
        bytes_per_second = max(means)
        if is_steady(means) or float(found[:, 1].max()) > seconds:
            break
    slowest = min(steady_rate(rates) for rates in zip(*of_flows, strict=True))
    return slowest * 8 / PAYLOAD


def _rough_rate(
    wire: Wire, round_trip: float, begun: float, seconds: float, rough_seconds: float
) -> float:
    """Bytes per second of the first flow that takes ``rough_seconds``."""
    nbytes = _FIRST_BYTES
    while True:
        flow = _flow(wire, nbytes, min(_LEAST_MESSAGES, nbytes // _FIRST_BYTES))
        took, elapsed = wire.largest(flow.seconds[-1], time.perf_counter() - begun)
        if took >= rough_seconds or elapsed > seconds or _GROWTH * nbytes > MOST_BYTES:
            return float(nbytes / max(took - round_trip, took / 4))
        nbytes *= _GROWTH


@dataclass(frozen=True)
class Flow:
    """Messages that were under way at once.

    Attributes:
        nbytes: the bytes of each message.
        seconds: the arrival times, in order.
    """

    nbytes: int
    seconds: Sequence[float]

    def rate(self, round_trip: float) -> float:
        """The rate in bytes per second: the slope of a line through the arrivals.

        The mean rate since the first bytes arrived, or should have, is an upper limit: after a
        pause a rank finds several messages at once, which makes the slope too high.
        """
        first, last = self.seconds[0], self.seconds[-1]
        times = [when for when in self.seconds if when >= first + _BEGINNING * (last - first)]
        if len(times) < 3 or times[-1] <= times[0]:  # all arrived at once: there is no slope
            return self.nbytes * len(self.seconds) / max(last, 1e-9)
        begun = min(first, 2 * round_trip + _LATE_SECONDS)
        half = len(self.seconds) // 2
        before = half + (begun < first)  # messages since then
        means = [
            self.nbytes * (before + number) / (when - begun)
            for number, when in enumerate(self.seconds[half:])
            if when > begun
        ]
        came = [float(self.nbytes * number) for number in range(len(times))]
        return min(statistics.linear_regression(times, came).slope, max(means))


def _flow(wire: Wire, nbytes: float, count: int | None = None) -> Flow:
    """Send about ``nbytes`` in ``count`` messages or some more; default: 12 to 40 messages."""
    if count is None:
        large = int(nbytes) // _LARGE_MESSAGE
        count = min(max(large, _LEAST_MESSAGES), _MOST_MESSAGES)
    turns = len(wire.distances)
    count = -(-count // turns) * turns  # equally many to each rank
    of_message = max(_LEAST_MESSAGE, round(nbytes / count))
    return Flow(of_message, wire.arrivals(of_message, count))


def is_steady(rates: Sequence[float]) -> bool:
    """Whether the last flows are not faster than those before."""
    if len(rates) < _LEAST_FLOWS:
        return False
    return max(rates[-_STEADY_FLOWS:]) <= (1 + _STEADY) * max(rates[:-_STEADY_FLOWS])


def steady_rate(rates: Sequence[float]) -> float:
    """The median rate of the flows that were neither disturbed nor slow."""
    return statistics.median(rate for rate in rates if rate >= (1 - _DISTURBED) * max(rates))


# ---- more connections ----------------------------------------------------------------------------


def _can_connect(group: dist.ProcessGroup) -> bool:
    """Whether :func:`_more_connections` can add connections for a group's messages."""
    return is_gloo_or_own(group) and exchanges(group) and group_store(group) is not None


@contextmanager
def _more_connections(wire: Wire) -> Iterator[None]:
    """Send the messages of flows over :data:`MANY` connections in a ``with`` block."""
    group = wire.group
    state = state_of(group)
    state.link_tests += 1
    name = f"{group_name(group)}/commhook-link-{state.link_tests}"
    store = group_store(group)
    assert store is not None  # _can_connect checked it
    many = make_group(
        dist.PrefixStore(name, store),
        group.rank(),
        dist.get_process_group_ranks(group),
        name,
        group_timeout(group),
        description="commhook: measures a link",
        rails=MANY,
    )
    try:
        wire.flows = many
        yield
        many.barrier().wait()  # a rank that still uses it would report this one as lost
    finally:
        wire.flows = group
        destroy_group(many)


# ---- additional connections between two ranks, for large messages of a step's groups -------------


#: The most that help on any link known.
MOST = 16

_log = logging.getLogger(__name__)


def check_connections(count: object) -> None:
    """Check a user's number of connections; None is valid.

    Raises:
        TypeError, ValueError: it is not an int, or not in [1, :data:`MOST`].
    """
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"attach: connections must be an int or None, got {_C.type_name(count)}")
    if not 1 <= count <= MOST:
        raise ValueError(f"attach: connections must be 1 to {MOST}, got {count}")


class MoreConnections:
    """Additional connections of some groups.

    Attributes:
        count: the number of connections for large messages; None to choose the fastest.
    """

    def __init__(self) -> None:
        self.count: int | None = None
        self._links: weakref.WeakKeyDictionary[dist.ProcessGroup, Link] = (
            weakref.WeakKeyDictionary()
        )

    def link(self, group: dist.ProcessGroup) -> Link | None:
        """The measured link of a group, or None."""
        return self._links.get(group)

    def connect(self, own: ConnectedGroup, store: dist.Store) -> None:
        """Give large messages of a group :attr:`count` connections. All of its ranks call this.

        Nobody else uses the group's name in ``store``. Among more than 16 ranks, only a count that
        was given is used.
        """
        group = own.group

        def use(count: int) -> None:
            own.use_rails(
                count, dist.PrefixStore(f"connections/{group_name(group)}/{count}", store)
            )

        if self.count is not None:
            use(self.count)
        elif group not in self._links and 1 < group.size() <= FEW_RANKS:
            wire = Wire(group, "cpu", to_all=True)
            self._links[group] = link = measure_briefly(wire, lambda: use(MANY))
            if link.rates:
                _log.info("%s: %s", group_name(group), link)
            use(link.connections)
