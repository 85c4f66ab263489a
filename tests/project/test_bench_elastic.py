"""What bench_elastic makes of the logs of its ranks; the runs themselves need hosts and an hour."""

from __future__ import annotations

from typing import Any

import elastic_figures as figures
import pytest


def _log(host: int, lines: list[tuple[float, int, str, int]]) -> Any:
    return figures.Log(host, [figures.Line(t, step, bits, 1.0, n) for t, step, bits, n in lines])


def test_a_step_with_the_ranks_of_before_is_no_step_after_the_fault() -> None:
    # The fault is at 2.5: rank 0 has done step 2; rank 1 ends it later, with the same ranks.
    one = _log(0, [(1.0, 1, "a", 0), (2.0, 2, "b", 0), (4.0, 3, "c", 1)])
    other = _log(1, [(1.0, 1, "a", 0), (2.6, 2, "b", 0)])
    assert figures.common_step_after([one, other], 2.5) is None
    other.lines.append(figures.Line(4.5, 3, "c", 1.0, 1))
    assert figures.common_step_after([one, other], 2.5) == 4.5
    assert figures.common_step_after([one, other], 4.2) is None
    assert figures.common_step_after([], 1.0) is None


def test_a_process_that_joined_before_counts_its_own_changes() -> None:
    old = _log(0, [(1.0, 1, "a", 3), (2.0, 2, "b", 4)])
    new = _log(1, [(1.0, 1, "a", 0), (2.2, 2, "b", 1)])
    assert figures.common_step_after([old, new], 1.5) == 2.2


def test_time_that_others_wait_for_a_rank_that_joins() -> None:
    old = _log(0, [(1.0, 1, "a", 0), (2.0, 2, "b", 0), (3.5, 3, "c", 1), (5.0, 4, "d", 1)])
    new = _log(1, [])
    assert figures.join_seconds(new, [old, new], 1.0) is None
    new.lines.append(figures.Line(5.1, 4, "d", 1.0, 0))
    # They connect in step 3, and wait for the new rank in step 4.
    assert figures.join_seconds(new, [old, new], 1.0) == pytest.approx(1.1)


def test_bits_and_order() -> None:
    one = _log(0, [(1.0, 1, "a", 0), (2.0, 2, "b", 0), (3.0, 3, "c", 0)])
    late = _log(1, [(2.0, 2, "b", 0), (3.0, 3, "c", 0)])
    assert figures.other_bits([one, late]) == [] and figures.out_of_order([one, late]) == 0
    twice = _log(2, [(2.0, 2, "b", 0), (2.5, 2, "x", 0), (3.0, 4, "d", 0)])
    assert figures.other_bits([one, late, twice]) == [2]
    assert figures.out_of_order([one, twice]) == 2


def test_rates_are_those_of_the_slowest_rank() -> None:
    one = _log(0, [(float(t), t, "a", 0) for t in range(1, 7)])
    slow = _log(1, [(t + 0.5, t, "a", 0) for t in range(1, 7)])
    times = figures.step_times([one, slow])
    assert times == {t: t + 0.5 for t in range(1, 7)}
    assert figures.steps_per_second(times, 3) == pytest.approx(1.0)
    assert figures.usual_step(times) == pytest.approx(1.0)


def test_changes_of_the_ranks_that_no_fault_explains_count() -> None:
    lines = [(1.0, 1, "a", 0), (2.0, 2, "b", 0), (4.0, 3, "c", 1), (7.0, 4, "d", 2)]
    logs = [_log(0, lines), _log(1, lines)]
    assert figures.seconds_of_other_changes(logs, [], 1.0) == pytest.approx(1.0 + 2.0)
    assert figures.seconds_of_other_changes(logs, [(3.5, 4.5)], 1.0) == pytest.approx(2.0)
    assert figures.seconds_of_other_changes(logs, [(3.5, 8.0)], 1.0) == 0.0
