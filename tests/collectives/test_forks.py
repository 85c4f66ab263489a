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

import torch.distributed as dist
from wire_ranks import WireRanks

from torch_commhook.collectives.gloo_groups import destroy_group, make_group
from torch_commhook.collectives.wire import ServedPort, close_in_forks, number_and_inode
from torch_commhook.elastic.membership import Heartbeats


class _Connections:
    def __init__(self, *found: tuple[int, int]) -> None:
        self._found = list(found)

    def sockets(self) -> list[tuple[int, int]]:
        return self._found


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


def test_a_connection_ends_while_a_forked_process_lives() -> None:
    client, accepted = socket.socketpair()
    client.settimeout(20)
    connections = _Connections(number_and_inode(accepted.fileno()))
    close_in_forks(connections)
    with _forked(lambda: 0):
        accepted.close()
        assert client.recv(1) == b""
    client.close()


def test_only_the_same_sockets_are_closed() -> None:
    first, second = socket.socketpair()
    number, inode = number_and_inode(first.fileno())
    found = [(number, inode + 1), (1 << 20, 3)]  # another file has the number now, or none
    connections = _Connections(*found)
    close_in_forks(connections)
    with _forked(lambda: _count(found[:1])) as left:
        assert left == 1
    del connections
    gone = _Connections(number_and_inode(second.fileno()))
    close_in_forks(gone)
    found = gone.sockets()
    del gone
    with _forked(lambda: _count(found)) as left:
        assert left == 1
    first.close()
    second.close()


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
                        found.add(number_and_inode(number))
    return found


def test_the_sockets_of_a_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    served = ServedPort(store.port)
    found = served.sockets()
    assert len(found) >= 2  # one listens, and one is of the client
    with _forked(lambda: _count(found)) as left:
        assert left == 0
    store.set("key", "value")
    assert store.get("key") == b"value"
    with socket.create_server(("127.0.0.1", 0)) as other:
        client = ServedPort(other.getsockname()[1])
        assert len(client.sockets()) == 1
        assert ServedPort(1).sockets() == []


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
