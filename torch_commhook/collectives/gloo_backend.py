"""Backends of Gloo with as many threads as a step has collectives, and their connections."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.collectives.lost_hosts import cut

#: Among more ranks a group connects those two that send each other something, when they first do.
MOST_IN_FULL_MESH = 16
#: Collectives of one group that are under way at once. Gloo has a thread for each, and two by
#: default. A collective in a ring takes a round trip for each of its hops, which the others share
#: where they are under way at the same time. A thread that waits for work costs 16 KiB of memory.
MOST_UNDER_WAY = 32
#: After each round of an agreement among many a rank knows of so many times as many.
_BASE = 4
_INTERFACES = "GLOO_SOCKET_IFNAME"
# Those of agreements are above.
_TAG = (1 << 30) - 17
#: Of a greeting, whatever it says: a longer one than was asked for would end the process.
_GREETING_BYTES = 32


@dataclass
class GlooBackend:
    """What the library knows of a backend of Gloo that it has made.

    Attributes:
        addresses: the store in which the backend has left this rank's address.
        last: one of its messages, which has come. Whoever ends the backend lets go of it last. None
            before :func:`connect`.
        greeting: what this rank has told its partners; None where nobody may ask about it.
        is_greeted_alike: whether its partners have told it the same.
    """

    addresses: _C.AddressStore
    last: dist.Work | None = None
    greeting: bytes | None = None
    is_greeted_alike: bool = False

    def take_greeting(self, own: bytes) -> bool | None:
        """Whether the partners' greetings were ``own`` as well; None if this rank's was not.

        The next call gives None.
        """
        greeting, self.greeting = self.greeting, None
        return self.is_greeted_alike if greeting == own else None


def add_gloo(
    group: dist.ProcessGroup,
    store: dist.Store,
    timeout: timedelta,
    threads: int = MOST_UNDER_WAY,
) -> GlooBackend:
    """Give a process group a backend of Gloo for the CPU. It connects to nobody yet.

    :func:`connect` connects ranks that often send each other something. Two other ranks are
    connected when one first sends the other something.

    Args:
        group: without a backend for the CPU.
        store: for this backend alone.
        timeout: of its collectives.
        threads: so many of these are under way at once.
    """
    rank, size = group.rank(), group.size()
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = threads
    # As PyTorch reads it.
    interfaces = [name for name in os.environ.get(_INTERFACES, "").split(",") if name]
    # Gloo's other way connects one rank after another, which takes a round trip for each.
    options._devices = [
        dist.ProcessGroupGloo.create_device(interface=name, lazy_init=True) for name in interfaces
    ] or [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
    addresses = _C.AddressStore(store, partners(rank, size))
    # Nobody else holds the backend, so that it ends where its group is closed.
    backend = dist.ProcessGroupGloo(addresses, rank, size, options)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return GlooBackend(addresses)


def connect(
    group: dist.ProcessGroup, backend: GlooBackend, timeout: timedelta, greeting: bytes = b""
) -> None:
    """Connect to the ranks of :func:`partners`, to all at once. All ranks do at the same point.

    A rank that returns has heard from all of its partners, and told them. It may close its
    connections without failing theirs.

    Args:
        group: whose backend it is.
        backend: by :func:`add_gloo`.
        timeout: how long to wait for the other ranks' addresses.
        greeting: told to the partners, as :meth:`GlooBackend.take_greeting` says; 32 bytes at most.

    Raises:
        RuntimeError: a rank does not come within the timeout, or its process has ended.
    """
    peers = partners(group.rank(), group.size())
    if not peers:
        return
    backend.addresses.read(timeout)  # those of all, in one request
    outcomes: SimpleQueue[tuple[dist.Work, bool] | BaseException] = SimpleQueue()
    told = torch.frombuffer(bytearray(greeting.ljust(_GREETING_BYTES, b"\0")), dtype=torch.uint8)
    for peer in peers:  # each waits until its rank is connected
        arguments = group, peer, told, outcomes
        threading.Thread(
            target=_greet, args=arguments, name="commhook-connect", daemon=True
        ).start()
    is_alike = True
    try:
        for _ in peers:
            outcome = outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            backend.last, is_equal = outcome
            is_alike = is_alike and is_equal
    except BaseException:
        cut(backend.addresses)  # else others would wait for this rank's messages
        raise
    backend.greeting, backend.is_greeted_alike = greeting, is_alike


def _greet(
    group: dist.ProcessGroup,
    peer: int,
    told: Tensor,
    outcomes: SimpleQueue[tuple[dist.Work, bool] | BaseException],
) -> None:
    """Exchange greetings with another rank, and say how that went."""
    works: list[dist.Work] = []
    try:
        received = torch.empty_like(told)
        works.append(group.recv([received], peer, _TAG))
        works.append(group.send([told], peer, _TAG))
        for work in works:
            work.wait()
        outcome: tuple[dist.Work, bool] | BaseException = works[0], torch.equal(received, told)
    except BaseException as error:
        outcome = error
    works.clear()  # a Work that somebody has keeps its connections open
    outcomes.put(outcome)


def partners(rank: int, size: int) -> list[int]:
    """The ranks that one is connected to from the start: all of a few, of many its neighbours."""
    if size <= MOST_IN_FULL_MESH:
        return [other for other in range(size) if other != rank]
    return neighbours(rank, size)


def neighbours(rank: int, size: int) -> list[int]:
    """The ranks that one exchanges messages with in rings, doubled distances, and agreements.

    These are barriers, broadcasts, all-reduces, and what ranks tell each other in rounds.
    """
    distances = [distance for each in rounds_among_many(size) for distance in each]
    return sorted(
        {(rank + sign * distance) % size for distance in distances for sign in (1, -1)} - {rank}
    )


def rounds_among_many(size: int) -> list[list[int]]:
    """The distances at which ranks tell each other in each round, until all know of all.

    In each round a rank tells three others, so that it knows of four times as many ranks after it.
    That halves the rounds of doubled distances, which are among these, for half as many messages
    more.
    """
    rounds = []
    distance = 1
    while distance < size:
        multiples = [digit * distance for digit in range(1, _BASE)]
        rounds.append([multiple for multiple in multiples if multiple < size])
        distance *= _BASE
    return rounds
