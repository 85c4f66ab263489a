"""Measures the link between the ranks of a group, and keeps what was measured in a file.

``commhook bench`` and ``measure_link`` compute the rate of a steady flow from the arrival times of
its messages. The receivers have memory for all messages before the first is sent
(``planning/wire.py``).
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import (
    destroy_group,
    exchanges,
    group_name,
    group_store,
    group_timeout,
    is_gloo_or_own,
    make_group,
    state_of,
)
from torch_commhook.planning.wire import PAYLOAD, Wire
from torch_commhook.step.link import MANY, Link

# ---- measures the link between the ranks of a group: its rate, and the delay of a message --------
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
_FEW_RANKS = 4
#: The least and the most seconds that the other ranks wait meanwhile.
_LEAST_QUIET, _MOST_QUIET = 0.005, 0.1
#: Rough flows: the bytes of the first one. Each next one has twice as many, until a flow takes this
#: many seconds and this many round trips.
_FIRST_BYTES, _ROUGH_SECONDS, _ROUGH_ROUND_TRIPS = 1 << 16, 0.1, 4
#: Measured flows: their seconds, or their round trips if these take longer.
_FLOW_SECONDS, _FLOW_ROUND_TRIPS = 0.4, 16
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
#: The least round trip for which more connections are measured.
_FAR_SECONDS = 5e-3


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
class LinkFigures:
    """The measurements of a link; the same on all ranks.

    Attributes:
        round_trip: the round trip in seconds.
        rates: bits per second each way, with headers, by the number of connections.
    """

    round_trip: float
    rates: dict[int, float]

    @property
    def connections(self) -> int:
        """The number that :func:`torch_commhook.attach` would use for large messages."""
        return Link(self.round_trip, self.rates[1], self.rates.get(MANY)).connections

    @property
    def link(self) -> MeasuredLink:
        """The link over :attr:`connections` connections."""
        return MeasuredLink(self.rates[self.connections], self.round_trip / 2)


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
    return measure_figures(Wire(group, device), seconds).link


def measure_figures(wire: Wire, seconds: float = SECONDS) -> LinkFigures:
    """The measurements of :func:`measure_link`.

    Args:
        wire: the ranks.
        seconds: as for :func:`measure_link`.

    Raises:
        ValueError: ``seconds`` is not positive and finite.
    """
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
    return LinkFigures(min(round_trip, again), rates)


def measure_round_trip(wire: Wire, seconds: float) -> float:
    """The longest round trip between two ranks, in seconds.

    For each pair of ranks it is the shortest of several tries. Among many ranks, each one is
    measured with two others.

    Args:
        wire: the ranks.
        seconds: the time after which no try begins, except the first few.
    """
    begun = time.perf_counter()
    least = dict.fromkeys(pairs_of(wire.ranks), math.inf)
    for tries in range(_MOST_TRIES):
        elapsed = 0.0
        for pair in least:
            quiet = min(2 * min(least.values()) + _LEAST_QUIET, _MOST_QUIET)
            found = wire.shared(wire.trip(*pair, quiet), time.perf_counter() - begun)
            trip, elapsed = found.amax(0).tolist()
            least[pair] = min(least[pair], trip)
        if tries + 1 >= _LEAST_TRIES and elapsed > seconds:
            break
    return max(least.values())


def pairs_of(ranks: int) -> list[tuple[int, int]]:
    """The pairs of ranks for measurements of the round trip.

    Few ranks: all pairs. Many ranks: each with the next one and with the opposite one, which is on
    another host if consecutive ranks share hosts.
    """
    if ranks <= _FEW_RANKS:
        return [(first, second) for second in range(ranks) for first in range(second)]
    half = ranks // 2
    neighbours = [(first, (first + 1) % ranks) for first in range(0, ranks, 2)]
    return [*((first, first + half) for first in range(ranks - half)), *neighbours]


def measure_rate(wire: Wire, round_trip: float, seconds: float) -> float:
    """The rate of the slowest rank's link, in bits per second each way, with headers.

    Args:
        wire: the ranks.
        round_trip: the round trip in seconds.
        seconds: the time after which no flow begins, except the first one.
    """
    begun = time.perf_counter()
    bytes_per_second = _rough_rate(wire, round_trip, begun, seconds)
    of_flows: list[list[float]] = []  # the rates of all ranks, for each flow
    means: list[float] = []
    while True:
        wanted = bytes_per_second * max(_FLOW_SECONDS, _FLOW_ROUND_TRIPS * round_trip)
        flow = _flow(wire, min(wanted, MOST_BYTES))
        found = wire.shared(flow.rate(round_trip), time.perf_counter() - begun)
        of_flows.append(found[:, 0].tolist())
        means.append(statistics.fmean(of_flows[-1]))
        bytes_per_second = max(means)
        if is_steady(means) or float(found[:, 1].max()) > seconds:
            break
    slowest = min(steady_rate(rates) for rates in zip(*of_flows, strict=True))
    return slowest * 8 / PAYLOAD


def _rough_rate(wire: Wire, round_trip: float, begun: float, seconds: float) -> float:
    """Bytes per second of the first flow that is long enough; each is twice as long as the last."""
    nbytes = _FIRST_BYTES
    while True:
        flow = _flow(wire, nbytes, min(_LEAST_MESSAGES, nbytes // _FIRST_BYTES))
        found = wire.shared(flow.seconds[-1], time.perf_counter() - begun)
        took, elapsed = found.amax(0).tolist()
        is_long = took >= max(_ROUGH_SECONDS, _ROUGH_ROUND_TRIPS * round_trip)
        if is_long or elapsed > seconds or 2 * nbytes > MOST_BYTES:
            return float(nbytes / max(took - round_trip, took / 4))
        nbytes *= 2


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

        Args:
            round_trip: the round trip in seconds.
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
    """Send about ``nbytes`` in ``count`` messages to another rank; default: 12 to 40 messages."""
    if count is None:
        large = int(nbytes) // _LARGE_MESSAGE
        count = min(max(large, _LEAST_MESSAGES), _MOST_MESSAGES)
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
    """Whether this module can add connections for a group's messages."""
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


# ---- the file that commhook bench --out writes and commhook plan --link reads --------------------


#: The file's ``format``.
FORMAT = "commhook bench 1"
_KINDS = {str: "a string", int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Message:
    """An exchange of messages: each rank sends one to each other rank.

    Attributes:
        bytes: the bytes of each message.
        seconds: the time until all have arrived; on the CPU it contains a round trip.
    """

    bytes: int
    seconds: float


@dataclass(frozen=True)
class CollectiveTime:
    """A collective of the backend.

    Attributes:
        name: the name, such as ``all_reduce``.
        bytes: the bytes of its tensor; if each rank has a part of the tensor, of all parts.
        seconds: the time of the slowest rank.
    """

    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class CodecSpeed:
    """The speed of a codec on rank 0.

    Attributes:
        codec: the codec with its arguments.
        ratio: the bytes of float32 values, divided by the bytes of their message.
        encode_bytes_per_second: the bytes of float32 values that it encodes in a second.
        decode_bytes_per_second: the bytes of float32 values that it decodes in a second.
        encode_to_copy: the time of encoding, divided by that of copying the values.
        decode_to_copy: the time of decoding, divided by that of copying the values.
    """

    codec: str
    ratio: float
    encode_bytes_per_second: float
    decode_bytes_per_second: float
    encode_to_copy: float
    decode_to_copy: float


@dataclass(frozen=True)
class HookTime:
    """The time of a step with a hook. The step itself computes almost nothing.

    Attributes:
        hook: the hook's text.
        seconds: the time of a step on the slowest rank.
        bytes: the bytes that each rank sends in a step; None if they are unknown.
        to_allreduce: the time of a step, divided by that with ``allreduce()``.
    """

    hook: str
    seconds: float
    bytes: float | None
    to_allreduce: float


@dataclass(frozen=True)
class LinkFile:
    """The measurements of ``commhook bench``.

    Attributes:
        ranks: the number of ranks.
        backend: the backend of their group.
        device: the device of their tensors: ``cpu`` or ``cuda``.
        link: the link between them; None if it was not measured, as with one rank.
        messages: exchanges of messages, by size.
        collectives: times of collectives, by name and size.
        codecs: speeds of codecs, by name.
        hooks: times of steps, in the order of the given hooks.
        machine: facts about rank 0's machine and the run, such as versions and threads.
    """

    ranks: int
    backend: str
    device: str
    link: MeasuredLink | None = None
    messages: list[Message] = field(default_factory=list)
    collectives: list[CollectiveTime] = field(default_factory=list)
    codecs: list[CodecSpeed] = field(default_factory=list)
    hooks: list[HookTime] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The contents of the file, as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(self.text(), encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LinkFile:
        """Read a file.

        Raises:
            ValueError: the file cannot be read, or is not one of ``commhook bench``. The error has
                the reason.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{os.fspath(path)}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(_no_file(path, "it is not text")) from error
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ValueError(_no_file(path, f"it is not valid JSON ({error})")) from error
        except RecursionError as error:
            raise ValueError(_no_file(path, "it is nested too deeply")) from error
        try:
            if not isinstance(found, dict):
                raise _WrongError(f"it must be an object, got {_shown(found)}")
            if found.get("format") != FORMAT:
                said = _shown(found.get("format"))
                raise _WrongError(f"its format must be {json.dumps(FORMAT)}, got {said}")
            file: LinkFile = _object(found, cls, "its ")
            return file
        except _WrongError as error:
            raise ValueError(_no_file(path, str(error))) from None


class _WrongError(ValueError):
    """An error in a file's content. The text is one sentence."""


def _no_file(path: str | os.PathLike[str], reason: str) -> str:
    return f"{os.fspath(path)} is not a file of commhook bench --out: {reason}"


def _shown(found: object) -> str:
    return "nothing" if found is MISSING else json.dumps(found)[:80]


def _object(found: dict[str, Any], kind: Any, prefix: str) -> Any:
    """An object of a file, as one of the classes above.

    Args:
        found: the object.
        kind: the class.
        prefix: the beginning of the names of its values, in errors.

    Raises:
        _WrongError: a value is missing, or of another kind than the class's annotation.
    """
    kinds = get_type_hints(kind)
    values = {}
    for part in fields(kind):
        value = found.get(part.name, MISSING)
        is_needed = part.default is MISSING and part.default_factory is MISSING
        if is_needed or value is not MISSING:
            values[part.name] = _value(value, kinds[part.name], f"{prefix}{part.name}")
    try:
        return kind(**values)
    except ValueError as error:
        raise _WrongError(f"{prefix.removesuffix('.')} is not valid ({error})") from error


def _value(found: Any, kind: Any, name: str) -> Any:
    """A value of an annotated type. Whole numbers are above 0, numbers finite and at least 0."""
    if get_origin(kind) is types.UnionType:  # with None
        return None if found is None else _value(found, get_args(kind)[0], name)
    if get_origin(kind) is list:
        if not isinstance(found, list):
            raise _WrongError(f"{name} must be a list, got {_shown(found)}")
        (kind,) = get_args(kind)
        return [_value(each, kind, f"{name}[{number}]") for number, each in enumerate(found)]
    if kind not in _KINDS:
        if not isinstance(found, dict):
            raise _WrongError(f"{name} must be an object, got {_shown(found)}")
        return _object(found, kind, f"{name}.") if is_dataclass(kind) else found
    if kind is str:
        is_right = isinstance(found, str)
    elif isinstance(found, bool) or not isinstance(found, (int, float)):
        is_right = False
    elif kind is int:
        is_right = isinstance(found, int) and found > 0
    else:
        is_right = 0 <= found <= sys.float_info.max
    if not is_right:
        raise _WrongError(f"{name} must be {_KINDS[kind]}, got {_shown(found)}")
    return float(found) if kind is float else found
