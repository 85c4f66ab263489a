"""Threads of this process, and Gloo among them: any number of ranks, in a tenth of a second."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.collectives.gloo_backend import add_gloo, connect

SECONDS = 60
TIMEOUT = timedelta(seconds=SECONDS / 2)
#: Far more than the end of a backend takes, and than a loop without an end is waited for.
MOST_SECONDS = 15.0


def gloo_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Runs ``function(rank, group, *args)`` on each rank at the same time; returns all results.

    ``torch.distributed`` does not know the group until it is registered; it is not the default one.
    """
    store = dist.HashStore()
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        backend = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)
        group = dist.ProcessGroup(store, rank, world_size)
        kind = dist.ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device("cpu"), kind, backend)
        group._set_default_backend(kind)
        group._set_group_name(f"threads {rank}")
        results[rank] = function(rank, group, *args)

    errors = in_threads([functools.partial(run, rank) for rank in range(world_size)], SECONDS)
    if errors:
        raise errors[0]
    return results


class LibraryRanks:
    """The ranks of a group with the library's Gloo backend, in this process."""

    def __init__(
        self, stores: Sequence[dist.Store], *, timeout: timedelta = TIMEOUT, threads: int = 1
    ) -> None:
        size = len(stores)
        self.stores = stores
        self.groups = [dist.ProcessGroup(store, rank, size) for rank, store in enumerate(stores)]
        self.backends = [
            add_gloo(group, store, rank, size, timeout, threads)
            for rank, (group, store) in enumerate(zip(self.groups, stores, strict=True))
        ]

    def each(self, do: Callable[[int], Any]) -> None:
        targets = [functools.partial(do, rank) for rank in range(len(self.groups))]
        assert in_threads(targets, SECONDS) == []

    def connect(self, greetings: Sequence[bytes] | None = None) -> None:
        told = greetings or [b""] * len(self.groups)
        self.each(lambda rank: connect(self.groups[rank], self.backends[rank], TIMEOUT, told[rank]))

    def close(self, rank: int) -> bool:
        """End the connections of a rank. Whether that has come to an end."""
        backend = self.backends[rank]
        last, backend.last = backend.last, None
        taken = _C.TakenBackends(self.groups[rank], backend.addresses, last)
        del last
        thread = threading.Thread(target=taken.close, daemon=True)
        thread.start()
        thread.join(MOST_SECONDS)
        return not thread.is_alive()


def in_threads(targets: Sequence[Callable[[], None]], seconds: float = 60) -> list[BaseException]:
    """The errors of functions that run at the same time, each for ``seconds`` at most."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(targets))

    def run(target: Callable[[], None]) -> None:
        try:
            start.wait(seconds)
            target()
        except BaseException as error:  # also that of a pytest.raises without an error
            raised.append(error)

    threads = [threading.Thread(target=run, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), raised
    return raised
