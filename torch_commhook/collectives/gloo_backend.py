"""Backends of Gloo with as many threads as a step has collectives."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from torch_commhook import _C

#: Among more ranks a group connects those two that send each other something, when they first do.
MOST_IN_FULL_MESH = 16
#: Collectives of one group that are under way at once. Gloo has a thread for each, and two by
#: default. A collective in a ring takes a round trip for each of its hops, which the others share
#: where they are under way at the same time. A thread that waits for work costs 16 KiB of memory.
MOST_UNDER_WAY = 32
_INTERFACES = "GLOO_SOCKET_IFNAME"


def gloo_backend(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    threads: int = MOST_UNDER_WAY,
    *,
    lazily: bool = False,
) -> tuple[dist.ProcessGroupGloo, _C.AddressStore]:
    """Connect to the other ranks; all make theirs at the same point.

    Among many ranks this connects nobody: a collective connects a rank to those that it exchanges
    messages with. Addresses are read from the store in one request.

    Args:
        store: for this backend alone.
        rank: this process's.
        size: the number of ranks.
        timeout: of its collectives.
        threads: so many of these are under way at once.
        lazily: connect among few ranks, too, when messages are sent.

    Returns:
        The backend, and the store in which it has left this rank's address.

    Raises:
        RuntimeError: a rank does not come within ``timeout``.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = threads
    # As PyTorch reads it.
    interfaces = [name for name in os.environ.get(_INTERFACES, "").split(",") if name]
    is_lazy = lazily or size > MOST_IN_FULL_MESH
    options._devices = [
        dist.ProcessGroupGloo.create_device(interface=name, lazy_init=is_lazy)
        for name in interfaces
    ] or [dist.ProcessGroupGloo.create_default_device(lazy_init=is_lazy)]
    known = neighbours(rank, size) if is_lazy else list(range(size))
    addresses = _C.AddressStore(store, known)
    return dist.ProcessGroupGloo(addresses, rank, size, options), addresses


def neighbours(rank: int, size: int) -> list[int]:
    """The ranks that one exchanges messages with in collectives of rings, and of doubled distances.

    These are barriers, agreements at a step's end, and all-reduces.
    """
    distances = [1 << bit for bit in range((size - 1).bit_length())]
    return sorted(
        {(rank + sign * distance) % size for distance in distances for sign in (1, -1)} - {rank}
    )
