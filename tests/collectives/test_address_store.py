"""The store in which Gloo finds the addresses of a group's ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from gloo_threads import TIMEOUT, LibraryRanks

from torch_commhook import _C
from torch_commhook.collectives.gloo_backend import (
    MOST_IN_FULL_MESH,
    add_gloo,
    neighbours,
    partners,
)

Connect = Callable[..., LibraryRanks]


class CountingStore(dist.Store):
    """Counts the requests that a rank makes."""

    def __init__(self, store: dist.Store, extended: bool = True) -> None:
        super().__init__()
        self.store = store
        self.extended = extended
        self.requests: list[str] = []
        self.keys_read = 0

    def set(self, key: str, value: Any) -> None:
        self.requests.append("set")
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.requests.append("get")
        return self.store.get(key)

    def wait(self, keys: Any, timeout: Any = None) -> None:
        self.requests.append("wait")
        self.store.wait(keys, timedelta(seconds=20))

    def check(self, keys: Any) -> bool:
        self.requests.append("check")
        return self.store.check(keys)

    def multi_get(self, keys: Any) -> Any:
        self.requests.append("multi_get")
        self.keys_read += len(keys)
        return [self.store.get(key) for key in keys]

    def has_extended_api(self) -> bool:
        return self.extended

    def delete_key(self, key: str) -> bool:
        self.requests.append("delete")
        return self.store.delete_key(key)

    def set_timeout(self, timeout: Any) -> None:
        pass

    deleteKey = delete_key  # noqa: N815


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
