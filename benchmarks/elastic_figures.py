"""Evaluates the logs of bench_elastic's ranks."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


class Line(NamedTuple):
    """A step in the log of a process.

    Attributes:
        time: the end of the step, in seconds.
        step: its number, from 1.
        digest: of the parameters after it.
        loss: of the rank's own batch.
        changes: the number of changes of the ranks that the process has seen so far.
    """

    time: float
    step: int
    digest: str
    loss: float
    changes: int


@dataclass
class Log:
    """A process's steps.

    Attributes:
        host: the process's host.
        lines: its steps.
    """

    host: int
    lines: list[Line] = field(default_factory=list)


def other_bits(logs: Iterable[Log]) -> list[int]:
    """The steps after which processes hold different parameters."""
    digests: dict[int, set[str]] = {}
    for log in logs:
        for line in log.lines:
            digests.setdefault(line.step, set()).add(line.digest)
    return sorted(step for step, found in digests.items() if len(found) > 1)


def out_of_order(logs: Iterable[Log]) -> int:
    """How often a process has repeated or skipped a step."""
    count = 0
    for log in logs:
        for line, following in pairwise(log.lines):
            count += following.step != line.step + 1
    return count


def step_times(logs: Iterable[Log]) -> dict[int, float]:
    """For each step, the time at which the last process has done it."""
    times: dict[int, float] = {}
    for log in logs:
        for line in log.lines:
            times[line.step] = max(times.get(line.step, line.time), line.time)
    return dict(sorted(times.items()))


def steps_per_second(times: dict[int, float], first: int = 1) -> float:
    """Steps per second, over steps that follow another one; the time begins at that one's end."""
    steps = [step for step in times if step >= first]
    return (steps[-1] - steps[0]) / (times[steps[-1]] - times[steps[0]])


def usual_step(times: dict[int, float]) -> float:
    """The median time from one step to the next, in seconds."""
    ordered = list(times.values())
    return statistics.median(b - a for a, b in pairwise(ordered))


def changes_before(log: Log, time: float) -> int:
    """The number of changes of the ranks that a process has seen in its steps up to a time."""
    return max((line.changes for line in log.lines if line.time <= time), default=0)


def common_step_after(remaining: Collection[Log], fault: float) -> float | None:
    """The time when all remaining processes have done a step with other ranks than at the fault.

    A step that ends after the fault with the earlier ranks does not count: the lost rank may have
    sent its part of it, and the others wait for it in the next one.

    Returns:
        The time; None while some process has not done such a step.
    """
    times = []
    for log in remaining:
        before = changes_before(log, fault)
        after = [line.time for line in log.lines if line.time > fault and line.changes > before]
        if not after:
            return None
        times.append(after[0])
    return max(times, default=None)


def join_seconds(new: Log, logs: Sequence[Log], usual: float) -> float | None:
    """The seconds by which two steps took longer than usual because a rank joined after the first.

    The ranks connect at the end of the first step. In the second one the others wait for the new
    rank, which receives its state.

    Args:
        new: the rank's process.
        logs: of all processes.
        usual: seconds of a step.

    Returns:
        Seconds; None while the process has done no step.
    """
    if not new.lines:
        return None
    times = step_times(logs)
    joined = new.lines[0].step
    if joined - 2 not in times:
        return None
    return max(0.0, times[joined] - times[joined - 2] - 2 * usual)


def seconds_of_other_changes(
    logs: Sequence[Log], episodes: Sequence[tuple[float, float]], usual: float
) -> float:
    """The seconds by which steps took longer than usual because ranks changed without a fault.

    Args:
        logs: of all processes.
        episodes: the beginning and the end of the time in which a fault changed the ranks.
        usual: seconds of a step.
    """
    times = step_times(logs)
    changed = {
        line.step
        for log in logs
        for before, line in pairwise(log.lines)
        if line.changes > before.changes
        and not any(begin <= line.time <= end for begin, end in episodes)
    }
    return sum(
        max(0.0, times[step] - times[step - 1] - usual) for step in changed if step - 1 in times
    )
