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
        self._timeout = timedelta(seconds=seconds)
        self.backends = self.more_backends()
        self.groups = [self._group(rank) for rank in range(size)]

    def _group(self, rank: int) -> dist.ProcessGroup:
        group = dist.ProcessGroup(dist.HashStore(), rank, self.size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        group._register_backend(torch.device("cpu"), kind, self.backends[rank])
        group._set_default_backend(kind)
        group._set_group_name(f"wire {rank}")
        return group

    def more_backends(self) -> list[Any]:
        """Backends of another group of these ranks, over the same connections."""
        store = dist.HashStore()

        def join(rank: int) -> Any:
            endpoint = self.endpoints[rank]
            return _C.WireBackend(endpoint, store, "test", rank, self.size, self._timeout)

        return self.each(join)

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
