"""Tests whether the members of a training can connect to each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch.distributed as dist

from torch_commhook.step.rendezvous import innermost

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
        self._timeout = timeout
        address = own_address(store)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=1024)
        port = self._socket.getsockname()[1]
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
        with suppress(OSError, RuntimeError, ValueError):
            host, _, port = self._store.get(_key(rank)).decode().rpartition(" ")
            with socket.create_connection((host, int(port)), timeout=self._timeout):
                return True
        return False

    def close(self) -> None:
        """Close the port."""
        self._socket.close()


def _key(rank: int) -> str:
    return f"door/{rank}"


def own_address(store: dist.Store) -> str:
    """The address of this process's host, as others see it."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with suppress(OSError):
            return _address_of(interface)
    host = getattr(innermost(store), "host", None)
    if host:
        for family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError):
                ((*_, towards), *_) = socket.getaddrinfo(host, 1, family, socket.SOCK_DGRAM)
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(towards)  # sends nothing
                    address: str = probe.getsockname()[0]
                    return address
    return "127.0.0.1"


def _address_of(interface: str) -> str:
    """The address of a network interface.

    Raises:
        OSError: the interface has none.
    """
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = interface.encode()[:15].ljust(256, b"\0")
        found = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
    return socket.inet_ntoa(found[20:24])
