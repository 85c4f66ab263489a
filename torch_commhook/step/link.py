"""The link between a group's ranks: measured, and used by several connections.

Over a far link, messages can use several connections to each rank (``attach(connections=)``), which
share the chunks of a message. This module measures whether several are faster.
"""

from __future__ import annotations

import hashlib
import logging
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import group_name
from torch_commhook.collectives.hosts import machine
from torch_commhook.collectives.issuing import FEW_RANKS, place_in
from torch_commhook.step.connected_group import ConnectedGroup

# ---- measures the link between a group's ranks, over one connection and over several -------------
#
# In one round trip a TCP connection carries at most the contents of its buffers, and each lost
# packet slows it down. So over a far link several connections carry more than one.


#: The number of connections that a link is tested with, and gets if they are faster.
MANY = 4
#: No rate is measured if the round trip is shorter.
_FAR_SECONDS = 5e-3
#: The required speedup of several connections.
_LEAST_GAIN = 1.3
#: The limits of a message, and of all messages that a rank sends at once.
_FIRST_BYTES, _MOST_BYTES = 1 << 18, 1 << 26
#: A message that takes this many round trips shows the rate.
_ROUND_TRIPS = 6
_REPEATS = 3
#: A round trip is measured until two results differ by at most this share.
_TRIES, _STEADY = 4, 0.1


class Link(NamedTuple):
    """The measured link of a group's ranks; the same on all ranks.

    Attributes:
        round_trip: between the first rank and the farthest one, in seconds; 0 on one machine.
        rate: the rate of one connection, in bits per second; None if not measured.
        rate_of_many: the rate of :data:`MANY` connections; None if not measured.
    """

    round_trip: float
    rate: float | None = None
    rate_of_many: float | None = None

    @property
    def connections(self) -> int:
        """The number of connections that large messages should use."""
        if self.rate is None or self.rate_of_many is None:
            return 1
        return MANY if self.rate_of_many >= _LEAST_GAIN * self.rate else 1


def measure_link(group: dist.ProcessGroup, connect: Callable[[], object]) -> Link:
    """Measure a group's link. All ranks call this at the same point.

    Ranks of one machine have no link. On a far link ranks send messages of 256 KiB, 512 KiB and so
    on, until one takes six round trips or a rank's messages have 64 MiB in total. Then they send
    large ones over several connections.

    Args:
        group: a group whose ranks exchange messages, over one connection each way.
        connect: gives large messages :data:`MANY` connections from then on.
    """
    if _is_local(group):
        return Link(0.0)
    round_trip = _round_trip(group)
    if round_trip < _FAR_SECONDS:
        return Link(round_trip)
    nbytes, others = _FIRST_BYTES, group.size() - 1
    while True:
        seconds = _slowest(group, _seconds_of(group, nbytes))
        if seconds >= _ROUND_TRIPS * round_trip or 2 * nbytes * others > _MOST_BYTES:
            break
        nbytes *= 2
    seconds = min(seconds, _least_seconds(group, nbytes))
    connect()
    many = _least_seconds(group, nbytes)
    carried = 8.0 * nbytes * others
    # The first byte arrives after half a round trip, or a whole one: ranks begin apart.
    one, several = (carried / max(each - round_trip, each * 1e-3) for each in (seconds, many))
    return Link(round_trip, one, several)


def _is_local(group: dist.ProcessGroup) -> bool:
    """Whether all ranks are on one machine, and see the same network."""
    digest = hashlib.sha256(machine().encode()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    every = own.new_empty((group.size(), own.numel()))
    place_in(group).gather(own, list(every), every).wait()
    return bool((every == own).all())


def _round_trip(group: dist.ProcessGroup) -> float:
    """In seconds. Repeats only as needed to detect a short one, which a busy machine prolongs."""
    least = _echo(group)
    for _ in range(_TRIES):
        if least < _FAR_SECONDS:
            break
        another = _echo(group)
        is_steady = abs(another - least) < _STEADY * least
        least = min(least, another)
        if is_steady:
            break
    return least


def _echo(group: dist.ProcessGroup) -> float:
    """The duration of a byte's way from rank 0 to each other rank, and back, on all ranks."""
    byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
    is_first, size = group.rank() == 0, group.size()
    begun = time.perf_counter()
    for answers in (False, True):
        inputs, outputs = [byte[:0]] * size, [byte[:0]] * size
        if is_first:
            (outputs if answers else inputs)[1:] = list(byte.new_empty((size - 1, 1)))
        else:
            (inputs if answers else outputs)[0] = byte
        place_in(group).exchange(0, inputs, outputs, byte).wait()
    return _slowest(group, time.perf_counter() - begun if is_first else 0.0)


def _seconds_of(group: dist.ProcessGroup, nbytes: int) -> float:
    """The duration of messages of this size, to each rank and from each."""
    sent = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    received = list(sent.new_empty((group.size(), nbytes)))
    begun = time.perf_counter()
    place_in(group).gather(sent, received, sent).wait()
    return time.perf_counter() - begun


def _least_seconds(group: dist.ProcessGroup, nbytes: int) -> float:
    return min(_slowest(group, _seconds_of(group, nbytes)) for _ in range(_REPEATS))


def _slowest(group: dist.ProcessGroup, seconds: float) -> float:
    """The largest of the ranks' measurements."""
    own = torch.tensor([seconds], dtype=torch.float64, device="cpu")
    return float(place_in(group).reduce(own, takes_maximum=True).wait())


# ---- additional connections between two ranks, for large messages of a step's groups -------------


#: The most that help on any link known.
MOST = 16

_log = logging.getLogger(__name__)


def check_connections(count: object) -> None:
    """Check a number of connections.

    Args:
        count: the user's argument; None is valid.

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

        Args:
            own: the group. Among more than 16 ranks, only a count that was given is used.
            store: a store in which nobody else uses the group's name.
        """
        group = own.group

        def use(count: int) -> None:
            own.use_rails(
                count, dist.PrefixStore(f"connections/{group_name(group)}/{count}", store)
            )

        if self.count is not None:
            use(self.count)
        elif group not in self._links and 1 < group.size() <= FEW_RANKS:
            self._links[group] = link = measure_link(group, lambda: use(MANY))
            if link.rate is not None:
                _log.info("%s: %s", group_name(group), link)
            use(link.connections)
