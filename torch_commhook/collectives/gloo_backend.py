"""Gloo backends with as many threads as a step has collectives, and their connections."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.addresses import loopback
from torch_commhook.collectives.forks import close_in_forks
from torch_commhook.collectives.lost_hosts import cut

#: With more ranks, a group connects two ranks only when one first sends the other a message.
MOST_IN_FULL_MESH = 16
#: The number of collectives of one group that run at once. Gloo has a thread for each, and two by
#: default. A collective in a ring takes a round trip for each hop; collectives that run at the same
#: time share it. An idle thread costs 16 KiB of memory.
MOST_UNDER_WAY = 32
#: After each round of an agreement a rank of many has heard from this many times as many ranks.
_BASE = 4
_INTERFACES = "GLOO_SOCKET_IFNAME"
# Tags of agreements are above.
_TAG = (1 << 30) - 17
#: The length of every greeting: a longer one than requested would end the process.
_GREETING_BYTES = 32


@dataclass
class GlooBackend:
    """A Gloo backend that the library has made, with what it must remember about it.

    Attributes:
        addresses: the store in which the backend has put this rank's address.
        last: a completed message of the backend. The code that destroys the backend releases it
            last. None before :func:`connect`.
        greeting: this rank's greeting to its partners; None if nobody may ask about it.
        is_greeted_alike: whether its partners have sent the same greeting.
    """

    addresses: _C.AddressStore
    last: dist.Work | None = None
    greeting: bytes | None = None
    is_greeted_alike: bool = False

    def take_greeting(self, own: bytes) -> bool | None:
        """Whether the partners' greetings equal ``own``; None if this rank's own did not.

        The next call returns None.
        """
        greeting, self.greeting = self.greeting, None
        return self.is_greeted_alike if greeting == own else None


def add_gloo(
    group: dist.ProcessGroup,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    threads: int = MOST_UNDER_WAY,
) -> GlooBackend:
    """Add a Gloo backend for the CPU to a process group. It connects to no rank yet.

    :func:`connect` connects ranks that often exchange messages. Two other ranks connect when one
    first sends the other a message.

    Args:
        group: a group without a backend for the CPU.
        store: a store for this backend only.
        rank, size: the group's. A group without a backend does not report its size (torch 2.14).
        timeout: the timeout of its collectives.
        threads: the number of these that run at once.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = threads
    options._devices = _devices()
    addresses = _C.AddressStore(store, partners(rank, size))
    close_in_forks(addresses)
    # Nothing else references the backend, so it is destroyed when its group is closed.
    backend = dist.ProcessGroupGloo(addresses, rank, size, options)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return GlooBackend(addresses)


def _devices() -> list[Any]:
    make: Any = dist.ProcessGroupGloo
    # As PyTorch reads it.
    interfaces = [name for name in os.environ.get(_INTERFACES, "").split(",") if name]
    # Gloo's other method connects one rank after another, with a round trip for each.
    if interfaces:
        return [make.create_device(interface=name, lazy_init=True) for name in interfaces]
    try:
        return [make.create_default_device(lazy_init=True)]
    except RuntimeError:
        if loopback() == "127.0.0.1":
            raise
        # PyTorch takes 127.0.0.1 for a host without a name, which one with IPv6 alone lacks.
        return [make.create_device(hostname=loopback(), lazy_init=True)]


def connect(
    group: dist.ProcessGroup, backend: GlooBackend, timeout: timedelta, greeting: bytes = b""
) -> None:
    """Connect to the ranks of :func:`partners`, all at once. All ranks call this at the same point.

    A rank that returns has heard from all of its partners, and has sent its greeting. It may close
    its connections without failing theirs.

    Args:
        group: the backend's group.
        backend: from :func:`add_gloo`.
        timeout: how long to wait for the other ranks' addresses, and then for their greetings.
        greeting: sent to the partners; see :meth:`GlooBackend.take_greeting`. At most 32 bytes.

    Raises:
        RuntimeError: a rank does not connect within the timeout, or its process has ended.
    """
    peers = partners(group.rank(), group.size())
    if not peers:
        return
    backend.addresses.read(timeout)  # those of all ranks, in one request
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
            # Gloo waits five times as long for a rank that should connect to this one. Gloo's other
            # errors name the rank, so they come first.
            outcome = outcomes.get(timeout=timeout.total_seconds() + 1)
            if isinstance(outcome, BaseException):
                raise outcome
            backend.last, is_equal = outcome
            is_alike = is_alike and is_equal
    except BaseException as error:
        cut(backend.addresses)  # otherwise others would wait for this rank's messages
        if isinstance(error, Empty):
            seconds = timeout.total_seconds()
            raise RuntimeError(f"ranks did not connect within {seconds:g} s") from None
        raise
    for number, _ in backend.addresses.sockets():
        # A program that this process starts would hide this process's end from the other ranks.
        with suppress(OSError):  # closed meanwhile
            os.set_inheritable(number, False)
    backend.greeting, backend.is_greeted_alike = greeting, is_alike


def _greet(
    group: dist.ProcessGroup,
    peer: int,
    told: Tensor,
    outcomes: SimpleQueue[tuple[dist.Work, bool] | BaseException],
) -> None:
    """Exchange greetings with another rank, and report the outcome."""
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
    works.clear()  # a Work in use keeps its connections open
    outcomes.put(outcome)


def partners(rank: int, size: int) -> list[int]:
    """The ranks that a rank connects to at once: all of a few; only its neighbours of many."""
    if size <= MOST_IN_FULL_MESH:
        return [other for other in range(size) if other != rank]
    return neighbours(rank, size)


def neighbours(rank: int, size: int) -> list[int]:
    """The ranks that one exchanges messages with in rings, doubled distances, and agreements.

    These are barriers, broadcasts, all-reduces, and agreements in rounds.
    """
    distances = [distance for each in rounds_among_many(size) for distance in each]
    return sorted(
        {(rank + sign * distance) % size for distance in distances for sign in (1, -1)} - {rank}
    )


def rounds_among_many(size: int) -> list[list[int]]:
    """The distances at which ranks send in each round, until all have heard from all.

    In each round a rank sends to three others, so that it has heard from four times as many ranks
    afterwards. This halves the rounds of doubled distances, which are among these, for half as many
    messages more.
    """
    rounds = []
    distance = 1
    while distance < size:
        multiples = [digit * distance for digit in range(1, _BASE)]
        rounds.append([multiple for multiple in multiples if multiple < size])
        distance *= _BASE
    return rounds
