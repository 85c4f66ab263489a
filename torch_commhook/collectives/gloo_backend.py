"""Backends of Gloo with as many threads as a step has collectives."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

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
) -> dist.ProcessGroupGloo:
    """Connect to the other ranks; all make theirs at the same point.

    Args:
        store: for this backend alone.
        rank: this process's.
        size: the number of ranks.
        timeout: of its collectives.
        threads: so many of these are under way at once.

    Raises:
        RuntimeError: a rank does not come within ``timeout``.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = threads
    # As PyTorch reads it.
    interfaces = [name for name in os.environ.get(_INTERFACES, "").split(",") if name]
    options._devices = [
        dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces
    ] or [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)
