"""Threads of this process, and Gloo among them: any number of ranks, in a tenth of a second."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_commhook.collectives import wire

SECONDS = 60
TIMEOUT = timedelta(seconds=SECONDS / 2)


def gloo_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Runs ``function(rank, group, *args)`` on each rank at the same time; returns all results.

    ``torch.distributed`` does not know the group until it is registered; it is not the default one.
    """
    store = dist.HashStore()
    results: list[Any] = [None] * world_size
    endpoints = [wire._Endpoints() for _ in range(world_size)]

    def run(rank: int) -> None:
        wire._thread.endpoints = endpoints[rank]
        backend = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)
        group = dist.ProcessGroup(store, rank, world_size)
        kind = dist.ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device("cpu"), kind, backend)
        group._set_default_backend(kind)
        group._set_group_name(f"threads {rank}")
        results[rank] = function(rank, group, *args)

    errors = in_threads([functools.partial(run, rank) for rank in range(world_size)], SECONDS)
    for each in endpoints:
        each.close()
    if errors:
        raise errors[0]
    return results


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
