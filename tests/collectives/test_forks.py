"""Forked processes, and programs: what becomes of their parent's connections."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from unittest import mock

import torch.distributed as dist
from wire_ranks import WireRanks

from torch_commhook.collectives import gloo_groups
from torch_commhook.collectives.gloo_groups import destroy_group, make_group, sockets_of, state_of
from torch_commhook.elastic.membership import Heartbeats


@contextmanager
def _forked(look: Callable[[], int]) -> Iterator[int]:
    """A forked process that lives as long as the block; gives what ``look`` returns there."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(writer, bytes([look()]))
            signal.pause()
        finally:
            os._exit(1)
    try:
        yield os.read(reader, 1)[0]
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(reader)
        os.close(writer)


def _count(found: list[tuple[int, int]]) -> int:
    """How many of these descriptors are sockets."""
    count = 0
    for number, _ in found:
        with suppress(OSError):  # closed
            count += stat.S_ISSOCK(os.fstat(number).st_mode)
    return count


def _inode(number: int) -> int:
    return os.fstat(number).st_ino


def test_a_connection_ends_while_a_forked_process_lives() -> None:
    group = dist.ProcessGroup(0, 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        state_of(group).ports.add(address[1])
        client = socket.create_connection(address, timeout=20)
        accepted, _ = server.accept()
        with _forked(lambda: 0):
            accepted.close()
            assert client.recv(1) == b""
        client.close()


def test_only_sockets_of_present_groups_are_closed() -> None:
    group = dist.ProcessGroup(0, 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = [(server.fileno(), _inode(server.fileno()))]
        state_of(group).ports.add(server.getsockname()[1])
        with _forked(lambda: _count(found)) as left:
            assert left == 0
        with mock.patch.object(gloo_groups, "sockets_of", lambda ports: [(found[0][0], 3)]):
            with _forked(lambda: _count(found)) as left:  # another file has the number now
                assert left == 1
        del group
        with _forked(lambda: _count(found)) as left:
            assert left == 1


def test_the_connections_of_an_endpoint() -> None:
    before = _tcp_sockets()
    ranks = WireRanks(2)
    ranks.each(lambda rank: ranks.groups[rank].barrier().wait())
    found = sorted(_tcp_sockets() - before)
    assert len(found) >= 4  # two listen
    with _forked(lambda: _count(found)) as left:
        assert left == 0
    assert _count(found) == len(found)
    files = subprocess.check_output(["ls", "-l", "/proc/self/fd"], close_fds=False, text=True)
    assert "/proc/" in files and not [each for each in found if f"socket:[{each[1]}]" in files]
    ranks.close()


def _tcp_sockets() -> set[tuple[int, int]]:
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the folder's own
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as own:
                    if own.family == socket.AF_INET and own.type == socket.SOCK_STREAM:
                        found.add((number, _inode(number)))
    return found


def test_the_sockets_of_a_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = dist.ProcessGroup(0, 1)
    state_of(group).ports.add(store.port)
    found = sockets_of({store.port})
    assert len(found) >= 2  # one listens, and one is of the client
    with _forked(lambda: _count(found)) as left:
        assert left == 0
    store.set("key", "value")
    assert store.get("key") == b"value"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert len(sockets_of({port})) == 1
        assert len(sockets_of({port, store.port})) == 1 + len(found)
        assert sockets_of({1}) == []


def test_a_forked_process_does_not_wait_for_threads_of_its_parent() -> None:
    store, seconds = dist.HashStore(), timedelta(seconds=20)
    group = make_group(store, 0, [0], "forked", seconds, description="forked")
    signs: Heartbeats | None = Heartbeats(store, 1, 1.0)
    process = os.fork()
    if process == 0:
        signal.alarm(30)
        signs = None
        destroy_group(group)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    assert signs is not None
    signs.stop()
    destroy_group(group)
