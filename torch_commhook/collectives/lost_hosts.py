"""Notice hosts that vanish without closing their connections.

TCP waits for such a host for minutes, or without end where nothing is sent. Gloo's own timeout is
as long as its group's. So the sockets of a group ask their peers from time to time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

#: An open socket: its number, and what it is, which no other socket ever has.
Socket = tuple[str, str]

#: A host is lost that has not answered for so long, in seconds.
SECONDS = 15
#: Without a message a socket asks its peer after so long, and then again and again, in seconds.
_IDLE, _BETWEEN = 5, 2
_FDS = "/proc/self/fd"


@contextmanager
def noticing_lost_hosts() -> Iterator[list[Socket]]:
    """Let the TCP connections that are made inside notice it when their peers vanish.

    Does nothing where the system does not tell which connections there are.

    Yields:
        Filled with these connections in the end, and those that other threads have made meanwhile.
    """
    made: list[Socket] = []
    before = _sockets()
    yield made
    for each in _sockets() - before:
        with suppress(OSError), _opened(each) as own:  # it may have been closed since
            _ask_from_time_to_time(own)
            made.append(each)


def cut(sockets: Collection[Socket]) -> None:
    """End connections, so that whoever waits for a message on them gets an error.

    Args:
        sockets: such as :func:`noticing_lost_hosts` has given; those that are closed are left out.
    """
    there = _sockets()
    for each in sockets:
        if each in there:
            with suppress(OSError), _opened(each) as own:
                own.shutdown(socket.SHUT_RDWR)


@contextmanager
def _opened(which: Socket) -> Iterator[socket.socket]:
    """A TCP connection.

    Raises:
        OSError: it is none, or another one, or closed.
    """
    number = os.dup(int(which[0]))
    with socket.socket(fileno=number) as own:
        is_tcp = own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM
        if not is_tcp or os.readlink(f"{_FDS}/{number}") != which[1]:
            raise OSError("no such connection")
        own.getpeername()  # raises for one that listens
        yield own


def _sockets() -> set[Socket]:
    """All that are open."""
    found = set()
    with suppress(OSError):
        for name in os.listdir(_FDS):
            with suppress(OSError):
                what = os.readlink(f"{_FDS}/{name}")
                if what.startswith("socket:"):
                    found.add((name, what))
    return found


def _ask_from_time_to_time(own: socket.socket) -> None:
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    count = (SECONDS - _IDLE) // _BETWEEN
    for option, value in (
        ("TCP_KEEPIDLE", _IDLE),
        ("TCP_KEEPINTVL", _BETWEEN),
        ("TCP_KEEPCNT", count),
        ("TCP_USER_TIMEOUT", SECONDS * 1000),
    ):
        if hasattr(socket, option):
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
