"""Signs of life in a store."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.elastic.signs import StoreSigns


def _until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))


def test_who_shows_no_more_signs_is_silent(store: dist.Store) -> None:
    one, other = StoreSigns(store, 1, 0.2), StoreSigns(store, 2, 0.2)
    # Nothing is known of it yet.
    assert one.silent([2]) == set()
    _until(lambda: store.add("alive/2", 0) > 2)
    assert one.silent([2]) == set()
    other.stop()
    _until(lambda: one.silent([2]) == {2})
    # One that has never shown a sign is silent after a while, too.
    _until(lambda: one.silent([2, 3]) == {2, 3})
    one.stop()


def test_time_without_the_store_does_not_count() -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))
    port = server.port
    client = dist.TCPStore(
        "localhost", port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False
    )
    signs = StoreSigns(client, 1, 0.2)
    _until(lambda: "alive/2" in signs._signs.signs() or not signs.silent([2]))
    del server
    _until(lambda: signs.seconds_without_store() > 0.3)
    assert signs.silent([2]) == set()
    signs.stop()


def test_how_often_somebody_has_asked_to_take_part(store: dist.Store) -> None:
    signs = StoreSigns(store, 1, 0.1)
    store.add(StoreSigns.WANTED, 3)
    _until(lambda: signs.wanted() == 3)
    signs.watch([5])  # others, which changes nothing here
    assert signs.wanted() == 3
    signs.stop()


def test_an_interval_that_is_none(store: dist.Store) -> None:
    for interval in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(ValueError, match="interval must be above 0 and at most 3600 s"):
            _C.SignsOfLife(store, "own", interval)
