"""A process's place among ranks that come and go, and what ``Elastic`` refuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import torch_commhook as commhook
from torch_commhook.addresses import host_and_port
from torch_commhook.cli.store import DEFAULT_HOST, main
from torch_commhook.elastic.membership import Lost, Membership, TooFewRanksError, View
from torch_commhook.elastic.ranks import Elastic, ElasticRanks, PortProbe
from torch_commhook.elastic.stores import own_address, serve


@pytest.fixture
def ranks() -> Iterator[ElasticRanks]:
    store = dist.TCPStore("localhost", 0, is_master=True)
    found = ElasticRanks(Elastic(min_ranks=2, name="run", grace=0.2, store=store, timeout=5.0))
    yield found
    found.leave()


def test_too_few_members_are_to_change(ranks: ElasticRanks) -> None:
    ranks.membership.view = View(1, (1, 2))
    assert not ranks.wants_change()
    ranks.membership.view = View(2, (1,))
    assert ranks.wants_change()


def _seen(ranks: ElasticRanks, count: int) -> None:
    until = time.monotonic() + 20
    while ranks._signs.wanted() != count:
        assert time.monotonic() < until
        time.sleep(0.005)


def test_each_request_is_seen_after_a_rank_has_ended_within_its_own(ranks: ElasticRanks) -> None:
    store, membership = ranks._store, ranks.membership
    membership._min_ranks = 1
    with mock.patch.object(ranks, "settings", Elastic(min_ranks=1, name="run")):
        membership._propose(None, View(1, (membership.own,)))
        membership.view, membership.is_new = membership.current(), False
        store.append("wanting", f"{store.add('ranks', 1)} ")  # its process ends before the count
        for count in (1, 2):
            new = Membership(store, ranks._signs.silent, min_ranks=1, grace=0.1)
            assert not ranks.wants_change()
            assert new._ask() == count
            _seen(ranks, count)
            assert ranks.wants_change()
            others = frozenset(ranks.view.members) - {membership.own}
            assert new.own in membership.change(0, Lost(ended=others)).members


def test_a_stray_count_makes_one_view(ranks: ElasticRanks) -> None:
    with mock.patch.object(ranks, "settings", Elastic(min_ranks=1, name="run")):
        ranks.membership._min_ranks = 1
        ranks.membership._propose(None, View(1, (ranks.membership.own,)))
        ranks.membership.view, ranks.membership.is_new = ranks.membership.current(), False
        ranks._store.add("wanted", 7)
        _seen(ranks, 7)
        assert ranks.wants_change()
        assert ranks.membership.change(0).number == 2
        assert not ranks.wants_change()


def test_a_rank_that_has_never_connected_says_why(ranks: ElasticRanks) -> None:
    view = View(1, (1, 2), (2,))
    ranks._store.set("view", view.as_text())
    ranks.membership.view = view
    with (
        mock.patch.object(ranks, "_make_group", side_effect=RuntimeError("not connected")),
        mock.patch.object(ranks, "_base", object()),
        mock.patch.object(ranks._door, "unreachable", return_value=frozenset([2])),
        mock.patch("torch_commhook.elastic.ranks.tell_unreachable"),
        mock.patch("torch_commhook.elastic.ranks.destroy_group"),
        pytest.raises(TooFewRanksError, match="1 of the last 2 ranks can reach"),
    ):
        ranks._connect()


def test_a_step_of_an_old_view_fails_without_an_error_of_a_connection(ranks: ElasticRanks) -> None:
    first, second = View(1, (1,)), View(2, (2,))
    failed = threading.Event()
    ranks.membership.view = first
    ranks.group = mock.Mock(addresses=list)
    ranks.group.lose.side_effect = lambda *args: failed.set()
    threading.Thread(target=ranks._look_after, daemon=True).start()
    ranks.membership._propose(None, first)
    assert not failed.wait(0.3)
    ranks.membership._propose(first, second)
    assert failed.wait(10.0)
    ranks.group.lose.assert_called_with(None, "since the other ranks continue without this one")


@pytest.mark.parametrize("leaves", [True, False])
def test_signals(leaves: bool) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    store = dist.TCPStore("localhost", 0, is_master=True)
    settings = Elastic(
        min_ranks=1,
        name="run",
        ranks=1,
        grace=0.2,
        store=store,
        leave_on=signal.SIGUSR1,
        on_leave=lambda: got.append(0),
    )
    ranks = ElasticRanks(settings)
    ranks.enter()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert ranks.asked_by == signal.SIGUSR1 and not got
    ranks.end_if_left()  # not yet
    if leaves:
        assert not ranks.step_ended(wants_change=False, leaving=[ranks.membership.own])
        with pytest.raises(SystemExit) as ended:
            ranks.end_if_left()
        assert ended.value.code == 128 + signal.SIGUSR1 and got == [0]
        ranks.end_if_left()  # on_leave may call the model
    else:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [signal.SIGUSR1], "the second one"
        ranks.leave()
    assert signal.signal(signal.SIGUSR1, before) != ranks._on_signal


def test_signals_need_the_main_thread() -> None:
    settings = Elastic(min_ranks=1, name="run", leave_on=signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match="needs the main thread"):
            pool.submit(ElasticRanks, settings).result(10.0)


def test_the_store_keeps_nothing_of_views_that_have_ended() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True)
    ranks = ElasticRanks(Elastic(min_ranks=1, name="run", ranks=1, grace=0.2, store=store))
    ranks.enter()
    sizes: list[int] = []
    ranks.on_membership(lambda rank, size: sizes.append(size))
    counts = []
    for _ in range(3):
        assert ranks.step_ended(wants_change=True)
        counts.append(store.num_keys())
    ranks.leave()
    assert sizes == [1], "the members are the same in all views"
    assert len(set(counts)) == 1
    # The list of those that have left is new; the port, the last address and sign are gone.
    assert store.num_keys() < counts[0] - 1


def test_a_forked_process_does_not_leave_for_its_parent(ranks: ElasticRanks) -> None:
    with mock.patch("os.getpid", return_value=-1):
        ranks.leave()
    assert not ranks._stopped.is_set() and not ranks._store.check(["left"])


def _accepts(host: str, port: int, family: int = socket.AF_INET) -> bool:
    with socket.socket(family) as connection:
        connection.settimeout(10)
        return connection.connect_ex((host, port)) == 0


def test_the_store_and_the_port_of_a_rank_are_on_one_address_alone() -> None:
    store = serve(DEFAULT_HOST, 0)[0]
    assert _accepts("127.0.0.1", store.port) and not _accepts("127.0.0.2", store.port)
    door = PortProbe(store, 1, 10.0, "127.0.0.1")
    assert door.unreachable([1]) == frozenset()
    port = int(store.get("door/1").decode().rpartition(" ")[2])
    assert _accepts("127.0.0.1", port) and not _accepts("127.0.0.2", port)
    door.close()
    assert door.unreachable([1]) == {1}


@pytest.mark.parametrize("text", ["hello", "127.0.0.1 " + "9" * 20, ". 80"])
def test_a_port_that_others_have_written_wrongly_is_unreachable(text: str) -> None:
    store = dist.HashStore()
    store.set("door/1", text)
    door = PortProbe(store, 2, 10.0, "127.0.0.1")
    assert door.unreachable([1]) == {1}
    door.close()


def test_a_port_that_its_rank_has_removed_is_unreachable_at_once() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=100))
    door = PortProbe(store, 2, 10.0, "127.0.0.1")
    begun = time.monotonic()
    assert door.unreachable([1]) == {1}
    assert time.monotonic() - begun < 50
    door.close()
    assert not store.check(["door/2"])


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_store_on_all_networks() -> None:
    store = serve("::", 0)[0]
    assert _accepts("::1", store.port, socket.AF_INET6) and _accepts("127.0.0.1", store.port)


@pytest.mark.parametrize(
    "host", ["*", ".", "a" * 70, "localhost:29400", "fe80::1", "224.0.0.1", "255.255.255.255"]
)
def test_an_address_where_no_store_can_listen(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["--host", host, "--port", "0"]) == 1
    message = r"name or an address of this machine, without a port|[Uu]nreachable|[Cc]annot assign"
    assert re.search(
        f"error: --host '{re.escape(host)}' --port 0: .*({message})", capsys.readouterr().err
    )
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_the_address_of_a_rank_without_a_network(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("torch_commhook.addresses.can_listen", lambda address: address == host)
    assert own_address(None) == host


def test_the_address_of_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"lo": ["127.0.0.1", "::1"], "v6": ["fd00::1"]}
    monkeypatch.setattr("torch_commhook.elastic.stores.interfaces", lambda: found)
    for name, addresses in found.items():
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        assert own_address(None) == addresses[0]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_store_on_ipv6(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = serve(host, 0)[0]
    assert _accepts("::1", store.port, socket.AF_INET6)
    assert own_address("::1") == "::1"
    door = PortProbe(store, 1, 10.0, "::1")
    assert door.unreachable([1]) == frozenset()
    door.close()


# ---- what Elastic refuses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"straggler": "2"}, TypeError, "straggler must be a number or None, got str"),
        ({"straggler": True}, TypeError, "straggler must be a number or None, got bool"),
        ({"straggler": 1.0}, ValueError, "straggler must be a number above 1, got 1.0"),
        ({"straggler": float("nan")}, ValueError, "straggler must be a number above 1, got nan"),
        ({"straggler_steps": 0}, ValueError, "straggler_steps must be at least 1, got 0"),
        ({"straggler_steps": 2.0}, TypeError, "straggler_steps must be an int, got float"),
        (
            {"straggler": 2.0, "leave_out_stragglers": 1},
            TypeError,
            "leave_out_stragglers must be a bool, got int",
        ),
        (
            {"leave_out_stragglers": True},
            ValueError,
            "leave_out_stragglers needs straggler, got None",
        ),
        ({"leave_on": "TERM"}, TypeError, "leave_on must be a signal or None, got str"),
        *(
            ({"leave_on": number}, ValueError, f"leave_on must be a signal that {more}")
            for number, more in ((999, "a process can handle, got 999"), (signal.SIGKILL, ""))
        ),
        ({"on_leave": print}, TypeError, "on_leave must be a function, and needs leave_on"),
        ({"name": ""}, ValueError, "name must be a text that only this training has, got ''"),
        ({"store": "nohost"}, ValueError, "store must be 'host:port', got 'nohost'"),
        ({"store": "host:99999"}, ValueError, "store must be 'host:port', got 'host:99999'"),
        ({"store": "[host]:29400"}, ValueError, "store must be 'host:port', or '[address]:port'"),
        ({"store": "a:b:29400"}, ValueError, "store must be 'host:port', or '[address]:port'"),
        ({"store": "[::1]"}, ValueError, "store must be 'host:port', got '[::1]'"),
        ({"store": ""}, ValueError, "store must be 'host:port', got ''"),
    ],
)
def test_settings_that_are_refused(
    settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"^Elastic: {re.escape(text)}"):
        commhook.Elastic(**{"min_ranks": 1, "name": "run", **settings})


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("localhost:29400", "localhost"),
        ("10.0.0.1:29400", "10.0.0.1"),
        ("[::1]:29400", "::1"),
        ("fd00::1:29400", "fd00::1"),
        ("[fe80::1%eth0]:29400", "fe80::1%eth0"),
    ],
)
def test_hosts_of_stores(text: str, host: str) -> None:
    assert host_and_port(text) == (host, 29400)
