"""Signs of life and reasons that ranks write to the store, and the error without a store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_processes

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import destroy_group, make_group
from torch_commhook.elastic.membership import VIEW_NUMBER, Heartbeats, Lost
from torch_commhook.elastic.ranks import ElasticRanks
from torch_commhook.step.connected_group import PeerError, Reason, Rendezvous
from torch_commhook.step.step_group import StepGroup

# ---- signs of life -------------------------------------------------------------------------------


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))


def test_who_shows_no_more_signs_is_silent(store: dist.Store) -> None:
    one, other = Heartbeats(store, 1, 0.2), Heartbeats(store, 2, 0.2)
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
    signs = Heartbeats(client, 1, 0.2)
    _until(lambda: "alive/2" in signs._signs.signs() or not signs.silent([2]))
    del server
    _until(lambda: signs._signs.seconds_without_store() > 0.3)
    assert signs.silent([2]) == set()
    signs.stop()


def test_how_often_somebody_has_asked_to_take_part(store: dist.Store) -> None:
    signs = Heartbeats(store, 1, 0.1)
    store.add(Heartbeats.WANTED, 3)
    _until(lambda: signs.wanted() == 3)
    signs.watch([5])  # others, which changes nothing here
    assert signs.wanted() == 3
    signs.stop()


def test_words_in_the_place_of_numbers(store: dist.Store) -> None:
    """The store closes the connection of whoever adds to them."""
    for key in ("alive/1", "alive/2", Heartbeats.WANTED, VIEW_NUMBER):
        store.set(key, "hello")
    one, other = Heartbeats(store, 1, 0.2), Heartbeats(store, 2, 0.2)
    _until(lambda: one.silent([2]) == set() and "alive/2" in one._signs.signs())
    assert (one.wanted(), one.view_number()) == (0, 0)
    store.set(Heartbeats.WANTED, "3")
    _until(lambda: one.wanted() == 3)
    other.stop()
    _until(lambda: one.silent([2]) == {2})
    one.stop()


def test_an_interval_that_is_none(store: dist.Store) -> None:
    for interval in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(ValueError, match="interval must be above 0 and at most 3600 s"):
            _C.SignsOfLife(store, "own", interval)


# ---- reasons -------------------------------------------------------------------------------------


class _RemovesWhatIsThere:
    """A store in which another rank removes a key as soon as this one has asked for it."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def check(self, keys: list[str]) -> bool:
        found = self._store.check(keys)
        for key in keys:
            self._store.delete_key(key)
        return found

    def get(self, key: str) -> bytes:
        assert self._store.check([key]), "get() waits for a key that is not there"
        return self._store.get(key)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found = self._store.compare_set(key, expected, desired)
        self._store.delete_key(key)
        return found


def test_a_rank_does_not_wait_for_a_reason_that_others_remove(store: dist.Store) -> None:
    rendezvous = Rendezvous(store, "training", 0, 2, timedelta(seconds=20))
    reason = Reason("since rank 1 has shown no sign of life", 1, has_ended=False)
    rendezvous.tell(reason)
    rendezvous.store = _RemovesWhatIsThere(rendezvous.store)  # type: ignore[assignment]
    assert rendezvous.reason() in (reason, None)
    assert rendezvous.reason() is None


# ---- a store that has ended ----------------------------------------------------------------------


class _WithoutStore:
    def change(self, steps: int, lost: Lost, *, lets_in: bool) -> None:
        raise dist.DistNetworkError("Broken pipe")


def test_the_error_names_the_store_and_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = object.__new__(ElasticRanks)
    ranks.steps, ranks._reason = 3, ""
    ranks.membership = _WithoutStore()  # type: ignore[assignment]
    left = []
    monkeypatch.setattr(ranks, "leave", lambda: left.append(True))
    cause = RuntimeError("rank 2 has ended")
    with pytest.raises(RuntimeError, match=r"the store .* does not answer .*Broken pipe") as raised:
        ranks._change(Lost(), cause)
    assert raised.value.__cause__ is cause and left


# ---- connecting within a time --------------------------------------------------------------------

#: The pool gives up sooner.
_COLLECTIVES_MAY_TAKE = timedelta(minutes=10)


@on_processes
def test_a_rank_that_waits_for_another_can_say_why_it_stops(rank: int) -> None:
    """Rank 1 does not make another group."""
    port = torch.zeros(1, dtype=torch.int64, device="cpu")
    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.fill_(store.port)
    dist.broadcast(port, 0)
    own = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    within = timedelta(seconds=0.5)
    own.set_timeout(within)
    name = f"training {os.getppid()}"
    base = make_group(
        dist.PrefixStore("base", own), rank, [0, 1], name, _COLLECTIVES_MAY_TAKE, description=name
    )
    group = StepGroup(base, meets_again=False, connect_within=within)
    if rank == 0:
        with pytest.raises(dist.DistStoreError, match=r"rank 1 did not come .* within 0\.5 s"):
            group._make(f"{name}/another", base, "another")
        group.lose(None, "since ranks could not connect")
        assert group._rendezvous is not None
        reason = Reason("since ranks could not connect", None, has_ended=False)
        assert group._rendezvous.reason() == reason
        with pytest.raises(RuntimeError, match="ranks could not connect") as raised:
            group.group.send([torch.zeros(1)], 1, 0).wait()
        assert isinstance(group.fail_with(raised.value), PeerError)
    dist.barrier()
    group.close()
    destroy_group(base)
