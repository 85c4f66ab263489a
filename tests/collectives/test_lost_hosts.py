"""Connections that notice when their peers vanish, and connections that are cut."""

from __future__ import annotations

import os
import socket

import pytest

from torch_commhook.collectives.lost_hosts import SECONDS, cut, notice_lost_hosts


class Connections:
    """Stands for those of a backend."""

    def __init__(self, *sockets: socket.socket) -> None:
        self._sockets = [(each.fileno(), os.fstat(each.fileno()).st_ino) for each in sockets]

    def sockets(self) -> list[tuple[int, int]]:
        return self._sockets


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("localhost", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    for each in (client, accepted):
        each.settimeout(20)
    return client, accepted


def _timeout(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_connections_that_notice() -> None:
    inside, others = _connected(), _connected()
    notice_lost_hosts(Connections(*inside))
    for each in inside:
        assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert _timeout(each) == SECONDS * 1000
    assert [_timeout(each) for each in others] == [0, 0]
    for each in (*inside, *others):
        each.close()


@pytest.mark.parametrize("seconds", [0.1, 2, 3, 6, 10, 15, 60])
def test_a_host_counts_as_lost_after_the_time_that_is_given(seconds: float) -> None:
    client, accepted = _connected()
    notice_lost_hosts(Connections(client), seconds)
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    idle, between, count = (
        client.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names
    )
    assert count >= 1
    assert max(2, seconds) * 0.6 <= idle + between * count <= max(2, seconds)
    assert _timeout(client) == max(2, seconds) * 1000
    client.close()
    accepted.close()


def test_connections_that_are_cut() -> None:
    first, second = _connected()
    third, fourth = _connected()
    made, others = Connections(first, second), Connections(third, fourth)
    first.close()
    # Another one may have its number by now, and is left alone.
    fifth, sixth = _connected()
    cut(made)
    assert second.recv(1) == b""
    for one, another in ((third, fourth), (fifth, sixth)):
        one.sendall(b"a")
        assert another.recv(1) == b"a"
    cut(others)
    assert third.recv(1) == fourth.recv(1) == b""
    for each in (second, third, fourth, fifth, sixth):
        each.close()
