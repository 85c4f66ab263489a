"""Ranks of the library's own backend, each a thread of this process with its own endpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gloo_threads import in_threads

from torch_commhook import _C

SECONDS = 60


class WireRanks:
    """A group of so many ranks."""

    def __init__(self, size: int, seconds: float = SECONDS, lost_after: float = 15.0) -> None:
        self.size = size
        self.endpoints = [_C.WireEndpoint("127.0.0.1", "test", lost_after) for _ in range(size)]
        self.backends: list[Any] = [None] * size
        self.groups: list[Any] = [None] * size
        store = dist.HashStore()
        timeout = timedelta(seconds=seconds)

        def join(rank: int) -> None:
            own = _C.WireBackend(self.endpoints[rank], store, "test", rank, size, timeout)
            group = dist.ProcessGroup(store, rank, size)
            kind = dist.ProcessGroup.BackendType.CUSTOM
            group._register_backend(torch.device("cpu"), kind, own)
            group._set_default_backend(kind)
            group._set_group_name(f"wire {rank}")
            self.backends[rank], self.groups[rank] = own, group

        self.each(join)

    def each(self, do: Callable[[int], Any]) -> list[Any]:
        """Calls a function on each rank at the same time; returns the results."""
        found: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            found[rank] = do(rank)

        errors = in_threads([functools.partial(run, rank) for rank in range(self.size)], SECONDS)
        if errors:
            raise errors[0]
        return found

    def close(self) -> None:
        self.groups.clear()
        self.backends.clear()
        for each in self.endpoints:
            each.close()
