"""The library's Gloo backend: its addresses, connections, end; forked processes and programs."""

from __future__ import annotations

import gc
import math
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from gloo_threads import MOST_SECONDS, TIMEOUT, LibraryRanks

from torch_commhook import _C
from torch_commhook.collectives import gloo_backend
from torch_commhook.collectives.forks import ServedPort, close_in_forks, number_and_inode
from torch_commhook.collectives.gloo_backend import (
    MOST_IN_FULL_MESH,
    add_gloo,
    connect,
    neighbours,
    partners,
)
from torch_commhook.collectives.gloo_groups import destroy_group, exchanges_of, make_group
from torch_commhook.collectives.lost_hosts import SECONDS, cut, notice_lost_hosts
from torch_commhook.elastic.signs import StoreSigns

Connect = Callable[..., LibraryRanks]


def counted(name: str) -> Any:
    """A method of a store that counts, and calls the other store's."""

    def call(self: CountingStore, *arguments: Any) -> Any:
        self.requests.append(name)
        return getattr(self.store, name)(*arguments)

    return call


class CountingStore(dist.Store):
    """Counts the requests that a rank makes."""

    def __init__(self, store: dist.Store, extended: bool = True) -> None:
        super().__init__()
        self.store = store
        self.extended = extended
        self.requests: list[str] = []
        self.keys_read = 0

    def wait(self, keys: Any, timeout: Any = None) -> None:
        self.requests.append("wait")
        self.store.wait(keys, timedelta(seconds=20))

    def multi_get(self, keys: Any) -> Any:
        self.requests.append("multi_get")
        self.keys_read += len(keys)
        return [self.store.get(key) for key in keys]

    def has_extended_api(self) -> bool:
        return self.extended

    def set_timeout(self, timeout: Any) -> None:
        pass

    set, get, check = counted("set"), counted("get"), counted("check")
    delete_key = deleteKey = counted("delete_key")  # noqa: N815


@pytest.fixture
def connected() -> Iterator[Connect]:
    """Makes a group of so many ranks, connected."""
    made: list[LibraryRanks] = []

    def make(
        size: int, extended: bool = True, greetings: Sequence[bytes] | None = None
    ) -> LibraryRanks:
        base = dist.HashStore()
        made.append(LibraryRanks([CountingStore(base, extended) for _ in range(size)]))
        made[-1].connect(greetings)
        return made[-1]

    yield make
    for ranks in made:
        assert all(ranks.close(rank) for rank in range(len(ranks.groups)))


def test_a_group_without_a_backend_is_not_asked_for_its_size() -> None:
    """torch 2.14 and newer would raise."""
    group = Mock(spec=["_register_backend"])
    add_gloo(group, dist.HashStore(), 0, 1, TIMEOUT)
    group._register_backend.assert_called_once()


@pytest.mark.parametrize("size", [2, 5, MOST_IN_FULL_MESH])
def test_addresses_are_read_in_one_request(connected: Connect, size: int) -> None:
    ranks = connected(size)
    ranks.each(lambda rank: ranks.groups[rank].barrier().wait())
    for store in ranks.stores:
        assert store.requests == ["set", "wait", "multi_get"]
    assert ranks.stores[0].store.num_keys() == size
    for backend in ranks.backends:
        backend.addresses.remove_own()
    assert ranks.stores[0].store.num_keys() == 0


@pytest.mark.parametrize("size", [MOST_IN_FULL_MESH + 1, 64])
def test_a_rank_of_many_reads_the_addresses_of_its_partners(connected: Connect, size: int) -> None:
    for rank, store in enumerate(connected(size).stores):
        assert store.requests == ["set", "wait", "multi_get"]
        assert store.keys_read == len(partners(rank, size))


@pytest.mark.parametrize("size", [MOST_IN_FULL_MESH + 1, 64, 256, 1000])
def test_partners_grow_as_the_logarithm(size: int) -> None:
    most = 6 * math.ceil(math.log(size, 4))
    assert max(len(partners(rank, size)) for rank in range(size)) <= most


def test_a_store_that_gives_one_key_at_a_time(connected: Connect) -> None:
    assert connected(3, extended=False).stores[0].requests == ["set", "wait", "get", "get"]


@pytest.mark.parametrize("size", [2, 5, MOST_IN_FULL_MESH + 4])
@pytest.mark.parametrize("other", [None, 1], ids=["alike", "rank-1-differs"])
def test_greetings(connected: Connect, size: int, other: int | None) -> None:
    ranks = connected(size, greetings=[b"b" if rank == other else b"a" for rank in range(size)])
    for rank, backend in enumerate(ranks.backends):
        hears_other = other is not None and (rank == other or other in partners(rank, size))
        own = b"b" if rank == other else b"a"
        assert backend.take_greeting(own) is not hears_other
        assert backend.take_greeting(own) is None  # asked once


def test_another_greeting_than_is_asked_about(connected: Connect) -> None:
    for backend in connected(2).backends:
        assert backend.take_greeting(b"a") is None


def test_few_ranks_are_connected_to_all(connected: Connect) -> None:
    ranks = connected(5)
    for backend in ranks.backends:
        assert len(backend.addresses.sockets()) == 4


def test_many_ranks_connect_to_their_neighbours_alone(connected: Connect) -> None:
    size = MOST_IN_FULL_MESH + 4
    ranks = connected(size)
    # An all-reduce in a ring needs nobody else.
    tensors = [torch.full((1000,), float(rank)) for rank in range(size)]
    ranks.each(lambda rank: ranks.groups[rank].allreduce([tensors[rank]]).wait())
    for rank, (store, backend) in enumerate(zip(ranks.stores, ranks.backends, strict=True)):
        assert store.requests == ["set", "wait", "multi_get"]
        assert len(backend.addresses.sockets()) == len(neighbours(rank, size))
        assert tensors[rank].tolist() == [size * (size - 1) / 2] * 1000


def test_neighbours() -> None:
    assert neighbours(0, 2) == [1]
    assert neighbours(0, 20) == [1, 2, 3, 4, 8, 12, 16, 17, 18, 19]
    for size in (17, 100, 1000):
        for rank in (0, size // 2, size - 1):
            near = neighbours(rank, size)
            # Of the ranks' number to the base of 4.
            assert len(near) <= 6 * ((size - 1).bit_length() + 1) // 2
            assert rank not in near
            assert all(rank in neighbours(other, size) for other in near)


def test_keys_of_others_go_to_the_store() -> None:
    base = dist.HashStore()
    store = _C.AddressStore(base, [0, 1])
    store.set("0/0", "a")
    base.set("0/7", "b")
    base.set("name", "c")
    assert [store.get(key) for key in ("0/0", "0/7", "name")] == [b"a", b"b", b"c"]
    assert store.add("count", 2) == 2 and base.add("count", 0) == 2
    assert store.check(["name"]) and not store.check(["another"])
    with pytest.raises(Exception, match=r"(?i)time"):
        store.wait(["0/1"], timedelta(milliseconds=10))
    base.set("0/1", "d")
    assert store.get("0/1") == b"d"
    assert store.delete_key("name") and not base.check(["name"])


# ---- backends that end, whatever their connections hold ------------------------------------------


def two_ranks(timeout: timedelta = TIMEOUT) -> LibraryRanks:
    return LibraryRanks([dist.HashStore()] * 2, timeout=timeout, threads=2)


@pytest.fixture
def ranks() -> Iterator[LibraryRanks]:
    made = two_ranks()
    yield made
    assert made.close(0) and made.close(1)


def _leave_message(ranks: LibraryRanks, nbytes: int) -> None:
    """Rank 0 sends rank 1 a message, for which rank 1 has asked, and has given it up."""
    asked = ranks.groups[1].recv([torch.zeros(nbytes, dtype=torch.uint8)], 0, 5)
    del asked
    gc.collect()
    sent = ranks.groups[0].send([torch.ones(nbytes, dtype=torch.uint8)], 1, 5)
    time.sleep(0.1)  # it arrives
    del sent


@pytest.mark.real_time
@pytest.mark.parametrize("nbytes", [1, 1 << 26], ids=["small", "large"])
@pytest.mark.parametrize("is_connected", [True, False], ids=["connected", "when-sent"])
def test_messages_that_were_given_up(ranks: LibraryRanks, nbytes: int, is_connected: bool) -> None:
    if is_connected:
        ranks.connect()
        _leave_message(ranks, nbytes)
    else:  # whoever asks is connected once the other one sends
        received = torch.zeros(1)
        other = threading.Thread(target=lambda: ranks.groups[1].recv([received], 0, 4).wait())
        other.start()
        ranks.groups[0].send([torch.ones(1)], 1, 4).wait()
        other.join()
        _leave_message(ranks, nbytes)
    begun = time.monotonic()
    assert ranks.close(1)
    assert ranks.close(0)
    assert time.monotonic() - begun < MOST_SECONDS / 2


def test_the_end_of_a_backend_leaves_the_others_alone() -> None:
    """Their loops stay level-triggered, and their connections open."""
    first, second = two_ranks(), two_ranks()
    for each in (first, second):
        each.connect()
    _leave_message(first, 1)
    assert first.close(1) and first.close(0)
    assert _edge_triggered() == 0
    tensors = [torch.full((1000,), float(rank)) for rank in range(2)]
    works = [
        group.allreduce([tensor]) for group, tensor in zip(second.groups, tensors, strict=True)
    ]
    for work in works:
        work.wait()
    assert all(tensor.eq(1).all() for tensor in tensors)
    del works
    assert second.close(0) and second.close(1)


def _edge_triggered() -> int:
    """Descriptors that an epoll of this process waits for in that way."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            text = Path(f"/proc/self/fdinfo/{name}").read_text()
        except OSError:
            continue
        for line in text.splitlines():
            words = line.split()
            if words[0] == "tfd:":
                found += int(words[3], 16) >> 31 & 1
    return found


def test_no_file_stays_open(ranks: LibraryRanks) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        more = two_ranks()
        more.connect()
        _leave_message(more, 1)
        assert more.close(0) and more.close(1)
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > len(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_connections_of_a_backend(ranks: LibraryRanks) -> None:
    assert [backend.addresses.sockets() for backend in ranks.backends] == [[], []]
    ranks.connect()
    assert [len(backend.addresses.sockets()) for backend in ranks.backends] == [1, 1]
    waiting = ranks.groups[1].recv([torch.zeros(1)], 0, 5)
    cut(ranks.backends[0].addresses)
    with pytest.raises(RuntimeError, match="closed by peer"):
        waiting.wait()


def test_a_rank_that_ends_while_ranks_connect() -> None:
    """Its backend is gone when the other one has read its address."""
    two = two_ranks(timedelta(milliseconds=400))
    assert two.close(1)
    with pytest.raises(RuntimeError):
        connect(two.groups[0], two.backends[0], timedelta(milliseconds=400))
    assert two.close(0)


def test_a_rank_that_never_connects() -> None:
    """Gloo alone would wait for five times the timeout."""
    two = two_ranks(timedelta(seconds=60))
    with (
        mock.patch.object(gloo_backend, "_greet"),
        pytest.raises(RuntimeError, match=r"ranks did not connect within 0\.1 s"),
    ):
        connect(two.groups[0], two.backends[0], timedelta(seconds=0.1))
    assert two.close(0) and two.close(1)


# ---- connections that notice when their peers vanish, and that are cut ---------------------------


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


# ---- forked processes ----------------------------------------------------------------------------


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
    return sum(stat.S_ISSOCK(os.fstat(number).st_mode) for number, _ in found)


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


def test_the_connections_of_a_backend() -> None:
    ranks = LibraryRanks([dist.HashStore()] * 2, threads=2)
    ranks.connect()
    found = [each for backend in ranks.backends for each in backend.addresses.sockets()]
    assert len(found) == 2
    with _forked(lambda: _count(found)) as left:
        assert left == 0
    assert _count(found) == 2
    files = subprocess.check_output(["ls", "-l", "/proc/self/fd"], close_fds=False, text=True)
    assert "/proc/" in files and not [each for each in found if f"socket:[{each[1]}]" in files]
    assert ranks.close(0) and ranks.close(1)


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
    exchanges_of(group)
    signs: StoreSigns | None = StoreSigns(store, 1, 1.0)
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
