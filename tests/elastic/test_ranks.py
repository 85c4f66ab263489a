"""A process's place among ranks that come and go, without other processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist

from torch_commhook.elastic.membership import TooFewRanksError, View
from torch_commhook.elastic.ranks import ElasticRanks
from torch_commhook.elastic.settings import Elastic


@pytest.fixture
def ranks() -> Iterator[ElasticRanks]:
    store = dist.TCPStore("localhost", 0, is_master=True)
    found = ElasticRanks(Elastic(min_ranks=2, grace=0.2, store=store, timeout=5.0))
    yield found
    found.leave()


def test_too_few_members_are_to_change(ranks: ElasticRanks) -> None:
    ranks.membership.view = View(1, (1, 2))
    assert not ranks.wants_change()
    ranks.membership.view = View(2, (1,))
    assert ranks.wants_change()


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
    ranks.group = mock.Mock()
    ranks.group.lose.side_effect = lambda *args: failed.set()
    threading.Thread(target=ranks._look_after, daemon=True).start()
    ranks.membership._propose(None, first)
    assert not failed.wait(0.3)
    ranks.membership._propose(first, second)
    assert failed.wait(10.0)
    ranks.group.lose.assert_called_with(None, "since the other ranks continue without this one")
