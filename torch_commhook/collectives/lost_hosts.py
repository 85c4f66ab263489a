"""Notice hosts that vanish without closing their connections.

TCP waits for such a host for minutes, or without end where nothing is sent. Gloo's own timeout is
as long as its group's. So the sockets of a group ask their peers from time to time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

#: A host is lost that has not answered for so long, in seconds.
SECONDS = 15
#: Less than two questions take: TCP counts them in whole seconds.
_LEAST_SECONDS = 2


class Connections(Protocol):
    """Of one backend of Gloo, such as the store of its addresses knows."""

    def sockets(self) -> list[tuple[int, int]]:
        """The descriptor of each connection, and its inode. None where the system tells none."""


def notice_lost_hosts(connections: Connections, seconds: float = SECONDS) -> None:
    """Let the TCP connections that there are now notice it when their peers vanish.

    Args:
        connections: of a backend.
        seconds: after which a host counts as lost that does not answer; 2 at least.
    """
    for own in _opened(connections):
        with suppress(OSError):
            _ask_from_time_to_time(own, max(_LEAST_SECONDS, round(seconds)))


def cut(connections: Connections) -> None:
    """End connections, so that whoever waits for a message on them gets an error.

    Args:
        connections: of a backend.
    """
    for own in _opened(connections):
        with suppress(OSError):
            own.shutdown(socket.SHUT_RDWR)


def _opened(connections: Connections) -> Iterator[socket.socket]:
    """The connections that are open still, each under a descriptor of its own."""
    for number, inode in connections.sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as own:
            # Another file may have got the number meanwhile.
            if os.fstat(own.fileno()).st_ino == inode:
                yield own


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
