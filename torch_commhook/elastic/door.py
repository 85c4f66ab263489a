"""Tests whether the members of a training can connect to each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch.distributed as dist

from torch_commhook.addresses import family_of, interfaces, loopback
from torch_commhook.collectives.forks import close_in_forks, number_and_inode
from torch_commhook.step.rendezvous import innermost, read_now

#: The number of members that are tried at once.
_AT_ONCE = 64


class Door:
    """A port of this process that others can connect to, and the ports of others.

    The process never accepts these connections: it suffices that the system does.

    Args:
        store: where members find each other's ports.
        own: this process's number.
        timeout: seconds after which a member counts as unreachable.
    """

    def __init__(self, store: dist.Store, own: int, timeout: float) -> None:
        self._store = store
        self._own = own
        self._timeout = timeout
        address = own_address(store)
        self._socket = socket.create_server((address, 0), family=family_of(address), backlog=1024)
        close_in_forks(self)
        port: int = self._socket.getsockname()[1]
        store.set(_key(own), f"{address} {port}")

    def unreachable(self, ranks: Collection[int]) -> frozenset[int]:
        """The members that this process cannot connect to."""
        if not ranks:
            return frozenset()
        with ThreadPoolExecutor(min(len(ranks), _AT_ONCE)) as pool:
            reached = pool.map(self._reaches, ranks)
            return frozenset(
                rank for rank, is_there in zip(ranks, reached, strict=True) if not is_there
            )

    def _reaches(self, rank: int) -> bool:
        with suppress(OSError, RuntimeError, ValueError, OverflowError):
            host, _, port = (read_now(self._store, _key(rank)) or "").rpartition(" ")
            with socket.create_connection((host, int(port)), timeout=self._timeout):
                return True
        return False

    def sockets(self) -> list[tuple[int, int]]:
        """The descriptor and inode of the port's socket."""
        number = self._socket.fileno()
        return [] if number < 0 else [number_and_inode(number)]

    def close(self) -> None:
        """Close the port, and remove it from the store."""
        self._socket.close()
        with suppress(RuntimeError):  # the store may be gone
            self._store.delete_key(_key(self._own))


def _key(rank: int) -> str:
    return f"door/{rank}"


def own_address(store: dist.Store) -> str:
    """The address of this process's host, as others see it."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        found = interfaces().get(interface)
        if found:
            return found[0]
    host = getattr(innermost(store), "host", None)
    if host:
        for family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError):
                ((*_, towards), *_) = socket.getaddrinfo(host, 1, family, socket.SOCK_DGRAM)
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(towards)  # sends nothing
                    address: str = probe.getsockname()[0]
                    return address
    return loopback()
