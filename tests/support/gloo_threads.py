"""Gloo among threads of this process: any number of ranks, in a tenth of a second."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 60


def gloo_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Runs ``function(rank, group, *args)`` on each rank at the same time; returns all results.

    ``torch.distributed`` does not know the group until it is registered; it is not the default one.
    """
    store = dist.HashStore()
    results: list[Any] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            backend = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=SECONDS / 2))
            group = dist.ProcessGroup(store, rank, world_size)
            kind = dist.ProcessGroup.BackendType.GLOO
            group._register_backend(torch.device("cpu"), kind, backend)
            group._set_default_backend(kind)
            group._set_group_name(f"threads {rank}")
            results[rank] = function(rank, group, *args)
        except BaseException as error:
            errors.append((rank, error))

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    if errors:
        rank, error = errors[0]
        raise RuntimeError(f"rank {rank} of {world_size}") from error
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
