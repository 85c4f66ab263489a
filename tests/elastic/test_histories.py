"""Random histories of elastic training in virtual time, and the bugs that they find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from elastic_history import History, run_histories

from torch_commhook.elastic import membership as membership_module
from torch_commhook.elastic.joining import NewRank
from torch_commhook.elastic.membership import LeftOutError, Lost, Membership, View
from torch_commhook.elastic.ranks import ElasticRanks
from torch_commhook.step.step_group import StepGroup

#: ``make elastic-histories`` runs 10,000.
COUNT = 200


@pytest.fixture(scope="module")
def histories() -> list[History]:
    return list(run_histories(range(COUNT)))


def test_all_members_hold_the_same_bits(histories: list[History]) -> None:
    assert {each.seed: each.problems for each in histories if each.problems} == {}


def test_much_happens_in_them(histories: list[History]) -> None:
    faults: Counter[str] = Counter()
    for each in histories:
        faults += each.faults
    assert len(faults) > 20, faults
    assert sum(each.views for each in histories) > 1.5 * COUNT
    assert sum(each.repeated for each in histories) > COUNT
    assert sum(each.reached_end for each in histories) > 0.8 * COUNT


def test_a_seed_is_one_history(histories: list[History]) -> None:
    assert list(run_histories(range(20))) == histories[:20]


# ---- bugs that the histories are to find ---------------------------------------------------------

_take = Membership._take
_go_on = ElasticRanks.go_on


def _let_stale_members_in(self: Membership, before: View, current: View) -> View:
    """A member that was left out comes back with what it has."""
    try:
        return _take(self, before, current)
    except LeftOutError:
        view = self.enter(8.0)
        self.is_new = False
        return view


def _call_new_members_trained(self: Membership, steps: int, lost: Lost) -> str:
    """New members need nothing."""
    fields = self.own, steps, 0, *map(membership_module._numbers, lost)
    return f"{':'.join(map(str, fields))} "


def _repeat_counted_steps(self: ElasticRanks, error: BaseException, *, has_results: bool) -> bool:
    """A step that some ranks have counted is repeated by the others."""
    _go_on(self, error, has_results=has_results)
    return False


def _write_any_view(self: Membership, before: View | None, after: View) -> None:
    """Two sides may both write a view."""
    self._store.set("view", after.as_text())


def _end_alone(self: StepGroup) -> None:
    """A rank counts a step without the others."""
    self._open = False


def _go_on_with_any_number(
    self: Membership, view: View, here: Any, *, is_late: bool
) -> View | str | None:
    """A rank goes on without those that are not here, whoever they are."""
    left = tuple(rank for rank in view.members if rank in here)
    steps = max(each.steps for each in here.values())
    return View(view.number + 1, left, (), steps, view.entries, view.wanted)


def _write_nothing(self: NewRank) -> None:
    """Pieces come, and are not written."""
    if self._piece is not None:
        (self.at, _), self._piece = self._piece, None


def _need_no_more_pieces(self: NewRank) -> bool:
    """A new rank says too early that it has all."""
    return True


@pytest.mark.parametrize(
    ("place", "name", "bug"),
    [
        (NewRank, "write", _write_nothing),
        (NewRank, "has_all", property(_need_no_more_pieces)),
        (Membership, "_take", _let_stale_members_in),
        (Membership, "_entry", _call_new_members_trained),
        (Membership, "_propose", _write_any_view),
        (Membership, "_next", _go_on_with_any_number),
        (ElasticRanks, "go_on", _repeat_counted_steps),
        (StepGroup, "end", _end_alone),
    ],
    ids=lambda value: getattr(getattr(value, "fget", value), "__name__", str(value)).strip("_"),
)
def test_a_planted_bug_is_found(place: type, name: str, bug: Callable[..., object]) -> None:
    with mock.patch.object(place, name, bug):
        assert any(each.problems for each in run_histories(range(COUNT)))
