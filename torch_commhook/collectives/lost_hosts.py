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
#: Less than two questions take: TCP counts them in whole seconds.
_LEAST_SECONDS = 2
_FDS = "/proc/self/fd"


@contextmanager
def noticing_lost_hosts(seconds: float = SECONDS) -> Iterator[list[Socket]]:
    """Let the TCP connections that are made inside notice it when their peers vanish.

    Does nothing where the system does not tell which connections there are.

    Args:
        seconds: after which a host counts as lost that does not answer; 2 at least.

    Yields:
        Filled with these connections in the end, and those that other threads have made meanwhile.
    """
    made: list[Socket] = []
    before = _sockets()
    yield made
    for each in _sockets() - before:
        with suppress(OSError), _opened(each) as own:  # it may have been closed since
            _ask_from_time_to_time(own, max(_LEAST_SECONDS, round(seconds)))
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


def _ask_from_time_to_time(own: socket.socket, seconds: int) -> None:
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Without a message it asks after a third of the time, and then again and again.
    idle, between = max(1, seconds // 3), max(1, seconds // 7)
    for option, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPINTVL", between),
        ("TCP_KEEPCNT", (seconds - idle) // between),
        ("TCP_USER_TIMEOUT", seconds * 1000),
    ):
        if hasattr(socket, option):
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
