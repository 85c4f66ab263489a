"""Connections that notice when their peers vanish, and connections that are cut."""

from __future__ import annotations

import socket

import pytest

from torch_commhook.collectives.lost_hosts import SECONDS, cut, noticing_lost_hosts


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("localhost", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    for each in (client, accepted):
        each.settimeout(20)
    return client, accepted


def _timeout(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_connections_that_are_made_inside_notice() -> None:
    before = _connected()
    with noticing_lost_hosts() as made:
        inside = _connected()
        pair = socket.socketpair()  # which is no TCP connection
    assert len(made) == 2
    for each in inside:
        assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert _timeout(each) == SECONDS * 1000
    assert [_timeout(each) for each in before] == [0, 0]
    for each in (*before, *inside, *pair):
        each.close()


@pytest.mark.parametrize("seconds", [0.1, 2, 3, 6, 10, 15, 60])
def test_a_host_counts_as_lost_after_the_time_that_is_given(seconds: float) -> None:
    with noticing_lost_hosts(seconds):
        client, accepted = _connected()
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
    with noticing_lost_hosts() as made:
        first, second = _connected()
    with noticing_lost_hosts() as others:
        third, fourth = _connected()
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
