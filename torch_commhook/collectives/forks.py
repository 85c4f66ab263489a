"""What a forked process, such as a DataLoader's worker, does with its parent's connections.

A connection ends when the last process that has it ends or closes it. Other ranks must not wait for
the end of a rank's workers, so a forked process closes the connections. It cannot use them: it has
none of the threads that serve them. At its end it would wait for these threads, so it never
destroys the objects that have them.
"""

from __future__ import annotations

import ctypes
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol


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
