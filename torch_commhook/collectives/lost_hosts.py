"""Detects hosts that vanish without closing their connections.

TCP waits for such a host for minutes, or forever if nothing is sent. Gloo's own timeout is its
group's. So the sockets of a group probe their peers regularly.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

#: A host that has not answered for this time is lost, in seconds.
SECONDS = 15
#: Two probes take at least this long: TCP counts them in whole seconds.
_LEAST_SECONDS = 2


class Connections(Protocol):
    """The connections of one Gloo backend, as the store of its addresses knows them."""

    def sockets(self) -> list[tuple[int, int]]:
        """The file descriptor and inode of each connection; empty if the system has none."""


def notice_lost_hosts(connections: Connections, seconds: float = SECONDS) -> None:
    """Let the existing TCP connections detect that their peers vanish.

    Args:
        connections: the connections of a backend.
        seconds: the time without an answer after which a host counts as lost; at least 2.
    """
    for own in _opened(connections):
        with suppress(OSError):
            _ask_from_time_to_time(own, max(_LEAST_SECONDS, round(seconds)))


def cut(connections: Connections) -> None:
    """Close connections, so that waits for their messages fail.

    Args:
        connections: the connections of a backend.
    """
    for own in _opened(connections):
        with suppress(OSError):
            own.shutdown(socket.SHUT_RDWR)


def _opened(connections: Connections) -> Iterator[socket.socket]:
    """The connections that are still open, each under a new file descriptor."""
    for number, inode in connections.sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as own:
            # Another file may have got the number meanwhile.
            if os.fstat(own.fileno()).st_ino == inode:
                yield own


def _ask_from_time_to_time(own: socket.socket, seconds: int) -> None:
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Without a message it probes after a third of the time, and then repeatedly.
    idle, between = max(1, seconds // 3), max(1, seconds // 7)
    for option, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPINTVL", between),
        ("TCP_KEEPCNT", (seconds - idle) // between),
        ("TCP_USER_TIMEOUT", seconds * 1000),
    ):
        if hasattr(socket, option):
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
