"""Who is slow, as each member finds it from the same times."""

from __future__ import annotations

import logging

import pytest
import torch

from torch_commhook.elastic.stragglers import StepReport, StepTimer


class Clock:
    """Says the time that a test wants."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_of_a_step_is_measured() -> None:
    clock = Clock()
    pace = StepTimer(2.0, 3, now=clock)
    assert pace.seconds() is None
    pace.begin()
    clock.now = 6.0
    assert pace.seconds() == 6.0 and pace.seconds(4) == 1.5 and pace.seconds(0) is None
    pace.end()
    clock.now = 9.0
    assert pace.seconds() == 6.0
    pace.begin()
    clock.now = 10.0
    assert pace.seconds() == 1.0
    pace.skip()
    assert pace.seconds() is None


def test_a_rank_that_stays_slow_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    pace = StepTimer(2.0, 3)
    times = {4: 1.0, 5: 1.1, 7: 2.5, 9: 0.9}
    with caplog.at_level(logging.WARNING, "torch_commhook.elastic"):
        for number in range(5):
            pace.compare(4, times)
            assert pace.stragglers == ({} if number < 2 else {7: 2.5})
    assert [record.getMessage() for record in caplog.records] == [
        "rank 4: rank 7 is slow: it computes for 2.5 s a step, 2.5 times the median, and was slow "
        "in the last 3 steps"
    ]


def test_a_rank_that_is_slow_now_and_then_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    pace = StepTimer(2.0, 3)
    slow, fast = {1: 1.0, 2: 9.0, 3: 1.0}, {1: 1.0, 2: 2.0, 3: 1.0}
    for times in (slow, slow, fast, slow, slow):
        pace.compare(1, times)
        assert not pace.stragglers
    pace.compare(1, slow)
    assert pace.stragglers == {2: 9.0}
    caplog.clear()
    pace.compare(1, fast)
    assert not pace.stragglers
    assert [each.getMessage() for each in caplog.records] == ["rank 1: rank 2 is no longer slow"]


def test_of_two_ranks_one_can_be_slow_but_one_alone_cannot() -> None:
    pace = StepTimer(2.0, 1)
    pace.compare(1, {1: 1.0, 2: 3.0})
    assert pace.stragglers == {2: 3.0}
    pace.keep([1])
    assert not pace.stragglers
    pace.compare(1, {1: 3.0})
    pace.compare(1, {})
    assert not pace.stragglers


def test_members_read_what_each_of_them_has_written() -> None:
    notes = [StepReport(3, compares=True) for _ in range(3)]
    notes[0].write_time(0, 0.3)
    notes[1].write_time(1, None)
    notes[2].write_time(2, 2.0)
    notes[1].wants_change = True
    notes[0].leave_out(2)
    maximum = torch.stack([note.values for note in notes]).amax(0)
    read = StepReport(3, compares=True, values=maximum)
    assert read.wants_change and read.left_out() == [2]
    assert read.times() == pytest.approx({0: 0.3, 2: 2.0}, rel=1e-6)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_member_may_be_the_last_one(size: int, joins: bool) -> None:
    note = StepReport(size, compares=True, joins=joins)
    note.write_time(0, 0.5)
    assert note.times() == {0: 0.5} and note.having_all() == []


def test_members_that_compare_nothing_tell_one_byte_each_and_one() -> None:
    note = StepReport(64, compares=False)
    assert note.values.numel() == 65 and note.left_out() == [] and note.times() == {}
    note.wants_change = True
    note.write_leaves(63)
    assert note.values.nonzero().flatten().tolist() == [0, 64] and note.leaving() == [63]
