"""The order of later stages: that in which they were announced, whatever ends first."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from gloo_threads import in_threads

from torch_commhook.collectives.turns import Turns, renew_turns, turns_of


class Stages:
    """Announces turns, and keeps what becomes of them."""

    def __init__(self, turns: Turns | None = None) -> None:
        self.turns = Turns() if turns is None else turns
        self.issued: list[int] = []
        self.failed: dict[int, BaseException] = {}
        self.announced: list[Any] = []

    def announce(self, count: int) -> None:
        for _ in range(count):
            number = len(self.announced)
            failed = lambda error, number=number: self.failed.setdefault(number, error)  # noqa: E731
            self.announced.append(self.turns.announce(failed))

    def take(self, number: int) -> None:
        self.announced[number].take(lambda: self.issued.append(number))


def test_in_the_order_in_which_they_were_announced() -> None:
    stages = Stages()
    stages.announce(5)
    for number in (3, 1, 4):
        stages.take(number)
    assert stages.issued == []
    stages.take(0)
    assert stages.issued == [0, 1]
    stages.take(2)
    assert stages.issued == [0, 1, 2, 3, 4]
    assert stages.failed == {}


def test_by_many_threads() -> None:
    for _ in range(50):
        stages, count = Stages(), 40
        stages.announce(count)
        numbers = random.sample(range(count), count)
        takes = [functools.partial(list, map(stages.take, numbers[first::4])) for first in range(4)]
        assert in_threads(takes) == []
        assert stages.issued == list(range(count))


def test_one_that_gives_up_ends_those_after_it() -> None:
    """Those before it are in step with the other ranks."""
    stages, error = Stages(), ValueError("boo")
    stages.announce(5)
    stages.take(1)
    stages.take(4)
    stages.announced[2].give_up(error)
    assert stages.failed == {2: error, 3: error, 4: error}
    stages.take(3)
    stages.take(0)
    assert stages.issued == [0, 1]
    stages.announce(2)
    assert stages.failed == {number: error for number in range(2, 7)}
    stages.take(5)
    stages.announced[6].give_up(KeyError("another"))
    stages.announced[3].give_up(KeyError("another"))
    assert stages.issued == [0, 1] and len(stages.failed) == 5
    assert set(stages.failed.values()) == {error}


def test_an_earlier_one_may_still_give_up() -> None:
    stages, first, second = Stages(), ValueError("first"), ValueError("second")
    stages.announce(3)
    stages.announced[1].give_up(first)
    stages.announced[0].give_up(second)
    assert stages.failed == {0: second, 1: first, 2: first}


def test_one_that_cannot_be_issued_ends_those_after_it() -> None:
    stages, error = Stages(), ValueError("boo")
    stages.announce(4)

    def issue() -> None:
        raise error

    stages.take(2)
    stages.announced[1].take(issue)
    stages.take(0)
    assert stages.issued == [0]
    assert stages.failed == {1: error, 2: error, 3: error}


def test_a_turn_may_be_taken_while_another_is_issued() -> None:
    stages = Stages()
    stages.announce(3)

    def issue() -> None:
        stages.take(1)
        assert stages.issued == []  # one after another, by whoever has begun
        stages.issued.append(0)

    stages.announced[0].take(issue)
    assert stages.issued == [0, 1]
    stages.take(2)
    assert stages.issued == [0, 1, 2]


def test_new_connections_begin_anew() -> None:
    class Group:
        pass

    group = Group()
    before, error = Stages(turns_of(group)), ValueError("boo")
    assert turns_of(group) is before.turns
    before.announce(3)
    before.announced[1].give_up(error)
    renew_turns(group)
    assert before.failed.keys() == {0, 1, 2}
    with pytest.raises(RuntimeError, match="the step of this collective has failed"):
        raise before.failed[0]
    after = Stages(turns_of(group))
    after.announce(2)
    before.take(0)  # late
    before.announced[1].give_up(error)
    after.take(1)
    after.take(0)
    assert (before.issued, after.issued, after.failed) == ([], [0, 1], {})
    renew_turns(Group())  # which has none
