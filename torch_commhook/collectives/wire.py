"""The library's own transport: the process's endpoints, and a backend of ``torch.distributed``.

All groups of a process use the same endpoint: one port, one thread, and a connection to each
process that it exchanges messages with.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import stat
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

import torch_commhook
from torch_commhook import _C

# ---- forked processes ----------------------------------------------------------------------------
#
# A connection ends when the last process that has it ends or closes it. Other ranks must not wait
# for the end of a rank's workers, so a forked process closes the connections. It cannot use them:
# it has none of the threads that serve them. At its end it would wait for these threads, so it
# never destroys the objects that have them.


class Sockets(Protocol):
    """Sockets that only this process uses."""

    def sockets(self) -> list[tuple[int, int]]:
        """The file descriptor and inode of each."""


#: The TCP sockets of this host's network, on Linux. Python's sockets would change those of others,
#: if there is a default timeout.
_TABLES = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
_LISTENS = "0A"

_closed: weakref.WeakValueDictionary[int, Sockets] = weakref.WeakValueDictionary()
_at_fork: list[tuple[int, int]] = []


def close_in_forks(sockets: Sockets) -> None:
    """From now on, while this object exists, close its sockets in forked processes."""
    _closed[id(sockets)] = sockets


def keep_for_good(found: object) -> None:
    """Never destroy an object."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))


def number_and_inode(number: int) -> tuple[int, int]:
    """A file descriptor and its inode, which distinguishes it from a later one of this number."""
    return number, os.fstat(number).st_ino


class ServedPort:
    """The sockets of a port of which this process may be the server.

    Args:
        port: the port; None for a store without one.
    """

    def __init__(self, port: int | None) -> None:
        self._port = port
        if port is not None:
            close_in_forks(self)

    def sockets(self) -> list[tuple[int, int]]:
        """The socket that listens on the port, and those of its clients; else nothing."""
        listens = dict(_tcp_sockets(self._port))
        own = [(number, inode) for number, inode in _own_sockets() if inode in listens]
        return own if any(listens[inode] for _, inode in own) else []


def _tcp_sockets(port: int | None) -> Iterator[tuple[int, bool]]:
    """The TCP sockets of this host with a port: the inode of each, and whether it listens."""
    for table in _TABLES:
        with suppress(OSError):  # another system
            for line in table.read_text().splitlines()[1:]:
                words = line.split()
                if int(words[1].rpartition(":")[2], 16) == port:
                    yield int(words[9]), words[3] == _LISTENS


def _own_sockets() -> Iterator[tuple[int, int]]:
    names = os.listdir("/proc/self/fd") if _TABLES[0].exists() else []
    for name in names:
        with suppress(OSError):  # closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                yield int(name), status.st_ino


def _note_sockets() -> None:
    # In the parent: in the child a thread that does not exist may hold a lock of the backend.
    _at_fork.clear()
    for reference in _closed.valuerefs():
        sockets = reference()
        if sockets is not None:
            _at_fork.extend(sockets.sockets())


def _close_sockets() -> None:
    if not _at_fork:
        return
    # The numbers stay taken: destructors may close them again.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, inode in _at_fork:
        with suppress(OSError):
            if os.fstat(number).st_ino == inode:
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)
    _at_fork.clear()


os.register_at_fork(before=_note_sockets, after_in_child=_close_sockets)


# ---- the library's own transport -----------------------------------------------------------------


#: A host that has not answered for this time is lost, in seconds.
LOST_AFTER = 15.0
_NAME = "commhook"
_INTERFACES = "GLOO_SOCKET_IFNAME"
#: The variable with the name of a file: all connections then prove that both sides know its text.
TOKEN_FILE = "COMMHOOK_TOKEN_FILE"
_LEAST_TOKEN_BYTES = 16


class _Endpoints:
    """Endpoints by their options."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._present: dict[tuple[float, int, bytes], _C.WireEndpoint] = {}
        self._replaced: list[_C.WireEndpoint] = []

    def get(self, lost_after: float, rails: int) -> _C.WireEndpoint:
        key = token_key()
        with self._lock:
            found = self._present.get((lost_after, rails, key))
            if found is not None and found.has_lost():  # the hosts may have come back
                self._replaced.append(found)
                found = None
            for each in [each for each in self._replaced if not each.has_groups()]:
                self._replaced.remove(each)
                each.close()
            if found is None:
                host = os.environ.get(_INTERFACES, "").split(",")[0]
                found = _C.WireEndpoint(host, torch_commhook.__version__, lost_after, rails, key)
                self._present[lost_after, rails, key] = found
            return found

    def close(self) -> None:
        every = [*self._replaced, *self._present.values()]
        for each in every:  # at the same time
            each.stop()
        for each in every:
            each.close()


_process = _Endpoints()
#: Those of threads that are ranks themselves.
_thread = threading.local()


def register_backend() -> None:
    """Make ``"commhook"`` a backend that groups can be made with. More calls do nothing.

    ``import torch_commhook`` does not call this: once any backend is registered, PyTorch gives
    groups for named devices, such as ``"cpu:gloo"``, no default backend.

    Example:
        >>> process_group.register_backend()  # doctest: +SKIP
        >>> dist.init_process_group("cpu:commhook,cuda:nccl")  # doctest: +SKIP
    """
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, _make_backend, extended_api=True, devices=["cpu"])


def endpoint(lost_after: float = LOST_AFTER, rails: int = 1) -> _C.WireEndpoint:
    """The process's endpoint. It listens from the first call on, until Python ends.

    A child of ``os.fork()`` has its own one, and cannot use its parent's groups.

    Args:
        lost_after: a host that has not answered for this time is lost, in seconds.
        rails: the number of connections to each other process.

    Raises:
        RuntimeError: as :func:`token_key`.
        torch.distributed.DistNetworkError: the process cannot listen at the first interface of
            ``GLOO_SOCKET_IFNAME``, or without one at the host's own address; or there is a token,
            and no OpenSSL 3.
    """
    found: _Endpoints = getattr(_thread, "endpoints", _process)
    return found.get(lost_after, rails)


def token_key() -> bytes:
    """The key of the token that ``COMMHOOK_TOKEN_FILE`` names, 32 bytes; empty without one.

    Raises:
        RuntimeError: the file cannot be read, or has fewer than 16 bytes beside spaces.
    """
    path = os.environ.get(TOKEN_FILE)
    if not path:
        return b""
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise RuntimeError(f"torch_commhook: {TOKEN_FILE}: {error}") from error
    if len(token) < _LEAST_TOKEN_BYTES:
        raise RuntimeError(
            f"torch_commhook: the token in {TOKEN_FILE} must have {_LEAST_TOKEN_BYTES} or more "
            f"bytes, got {len(token)}: make one with `openssl rand -hex 32`"
        )
    return hashlib.sha256(b"torch_commhook transport 1\0" + token).digest()


def _make_backend(options: Any, _: object) -> _C.WireBackend:
    return _C.WireBackend(
        endpoint(),
        options.store,
        options.group_id,
        options.group_rank,
        options.group_size,
        options.timeout,
    )


def _forget() -> None:
    global _process
    keep_for_good(_process)  # its endpoints have threads that are not here
    _process = _Endpoints()


atexit.register(lambda: _process.close())  # those that are present then
os.register_at_fork(after_in_child=_forget)
