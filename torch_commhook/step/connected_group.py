"""Groups of the library's own, which can connect anew after a failed step."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_commhook.collectives.gloo_backend import MOST_UNDER_WAY, gloo_backend
from torch_commhook.collectives.gloo_groups import (
    close_connections,
    destroy_group,
    finish_exchanges,
    group_timeout,
    make_group,
)


class ConnectedGroup:
    """A Gloo group of the library's own, whose connections can be made anew.

    Args:
        store: in which nobody else meets under ``name``.
        name: the same on its ranks, and of no other group.
        like: a group over the same ranks, as which it times out too.
        description: what it is for, as PyTorch's flight recorder shows it.
        threads: so many collectives are under way at once.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        like: dist.ProcessGroup,
        description: str,
        threads: int = MOST_UNDER_WAY,
    ) -> None:
        self.name = name
        self.threads = threads
        self.description = description
        self.rank: int = like.rank()
        self.ranks = dist.get_process_group_ranks(like)
        self.timeout: timedelta = group_timeout(like)
        own_store = dist.PrefixStore(f"{self.place}/1", store)
        self.group = make_group(
            own_store,
            self.rank,
            self.ranks,
            name,
            self.timeout,
            description=description,
            threads=threads,
        )
        _wait_for_all(self.group)

    @property
    def place(self) -> str:
        """Where in a store the ranks meet; groups of a name may have ranks of their own."""
        return f"{self.name}/{'-'.join(map(str, self.ranks))}"

    def backend(self, store: dist.Store) -> dist.ProcessGroupGloo:
        """New connections."""
        own_store = dist.PrefixStore(self.place, store)
        size = len(self.ranks)
        backend = gloo_backend(own_store, self.rank, size, self.timeout, self.threads)
        _wait_for_all(backend)
        return backend

    def take(
        self, kind: dist.ProcessGroup.BackendType, backend: torch._C._distributed_c10d.Backend
    ) -> None:
        """Communicate through a backend from here on."""
        close_connections(self.group)
        self.group._register_backend(torch.device("cpu"), kind, backend)
        self.group._set_group_name(self.name)  # type: ignore[arg-type]
        self.group._set_group_desc(self.description)


def destroy_all(groups: Sequence[ConnectedGroup]) -> None:
    """Give groups up."""
    for each in groups:  # all before the first goes, whose connections the next one's take
        finish_exchanges(each.group)
    for each in groups:
        destroy_group(each.group)


def _wait_for_all(connected: Any) -> None:
    """Return once all ranks are connected.

    One that closes its connections before another has seen all of them makes that one's connecting
    fail, as if its process had ended.
    """
    connected.barrier().wait()
