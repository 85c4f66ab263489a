"""Ranks of the library's own backend, each a thread of this process with its own endpoint."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gloo_threads import in_threads

from torch_commhook import _C

SECONDS = 60


class StoreOfRank(dist.Store):
    """Another store; what is set passes ``change``, and wait() returns after ``then``."""

    def __init__(
        self,
        store: dist.Store,
        change: Callable[[str], str] = str,
        then: Callable[[], object] = int,
    ) -> None:
        super().__init__()
        self._store, self._change, self._then = store, change, then

    def set(self, key: str, value: Any) -> None:
        text = value if isinstance(value, str) else bytes(value).decode()
        self._store.set(key, self._change(text))

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: Any, timeout: Any = None) -> None:
        self._store.wait(list(keys), timedelta(seconds=20))
        self._then()

    def has_extended_api(self) -> bool:
        return False


class Way:
    """A way to a port, with a delay. When it is shut, connections break, and none is made."""

    def __init__(self, port: int, delay: float = 0.0) -> None:
        self._delay = delay
        self._to, self._is_open, self._is_held = port, True, False
        self._ends: list[socket.socket] = []
        #: All that has come, each with the port from which.
        self.seen: list[tuple[int, bytes]] = []
        self._change = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                end, _ = self._listener.accept()
                with self._change:
                    self._is_held = True
                    self._change.notify()
                    self._change.wait_for(lambda: self._is_open)
                    self._is_held = False
                    other = socket.create_connection(("127.0.0.1", self._to))
                    self._ends += [end, other]
                for pair in ((end, other), (other, end)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen.append((source.getpeername()[1], data))
                time.sleep(self._delay)
                to.sendall(data)
            to.shutdown(socket.SHUT_RDWR)

    def set(self, is_open: bool) -> None:
        with self._change:
            self._is_open, old, self._ends = is_open, self._ends, []
            for _ in range(0 if is_open else 3):  # the kernel takes no others while these wait
                self._ends.append(each := socket.socket())
                each.setblocking(False)
                each.connect_ex(("127.0.0.1", self.port))
                self._change.wait_for(lambda: self._is_held)
            for each in old:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
            self._change.notify()

    def close(self) -> None:
        self.set(True)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def through(ways: list[Way], delay: float = 0.0) -> Callable[[str], str]:
    """Changes the address of an endpoint to that of a new way to it, with this delay."""

    def change(address: str) -> str:
        number, host, port, *others = address.split()
        ways.append(Way(int(port), delay))
        return " ".join([number, host, str(ways[-1].port), *others])

    return change


class WireRanks:
    """A group of so many ranks."""

    def __init__(
        self,
        size: int,
        seconds: float = SECONDS,
        lost_after: float = 15.0,
        rails: int = 1,
        is_held: bool = False,
        delay: float = 0.0,
        keys: Sequence[bytes] = (),
    ) -> None:
        self.size, self._delay, self._ways = size, delay, list[Way]()
        self.endpoints = [
            _C.WireEndpoint("127.0.0.1", "test", lost_after, rails, keys[rank] if keys else b"")
            for rank in range(size)
        ]
        self._timeout = timedelta(seconds=seconds)
        self._is_held = is_held
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
            own = StoreOfRank(store, through(self._ways, self._delay)) if self._delay else store
            return _C.WireBackend(
                endpoint, own, "test", rank, self.size, self._timeout, is_held=self._is_held
            )

        return self.each(join)

    def renew(self) -> None:
        """Begin anew after a failure, over the same connections."""
        store = dist.HashStore()

        def join(rank: int) -> None:
            self.backends[rank].join(self.endpoints[rank], store, "test", self._timeout)

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
        for each in (*self.endpoints, *self._ways):
            each.close()
