"""Faults of an elastic training's ranks, and their cost for the others."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from dataclasses import dataclass

import elastic_rank
from elastic_figures import common_step_after, join_seconds, step_times, usual_step
from elastic_processes import HANG, Process, Training

KINDS = ("kill", "stop", "cut")
#: Two hosts that cannot reach each other, though both reach the store.
APART = "apart"
#: Seconds within which a rank must notice that the others have left it out, if it can.
_NOTICES_WITHIN = 30.0


@dataclass
class Fault:
    """A fault of a rank.

    Attributes:
        kind: one of ``KINDS``, or ``APART``.
        host: the rank's.
        at: seconds since the training's first step.
        held: seconds for which the rank was stopped or cut off.
        lost: seconds from the fault to the end of the next common step; None if there was none.
        said: the error that ended its process; empty if it was killed.
        noticed: seconds from the end of the fault to the end of the process.
        away: seconds from the fault to its new process's first step.
        joining: seconds by which that step and the one before took longer than usual.
    """

    kind: str
    host: int
    at: float
    held: float = 0.0
    lost: float | None = None
    said: str = ""
    noticed: float | None = None
    away: float | None = None
    joining: float | None = None


class Faults:
    """Causes random faults of the ranks of a training.

    Args:
        training: all ranks take part in it.
        options: the command line.
    """

    def __init__(self, training: Training, options: argparse.Namespace) -> None:
        self._training = training
        self._options = options
        self._chance = random.Random(options.seed)
        self._begun = time.monotonic()
        self.found: list[Fault] = []

    def run(self) -> None:
        """All faults, spread over the time, and the rest of the time."""
        options, training = self._options, self._training
        interval = options.minutes * 60 / options.faults
        for number in range(options.faults):
            at = (number + self._chance.uniform(0.05, 0.4)) * interval
            while not training.wait(lambda at=at: self._now() >= at, 1.0):
                training.restart_ended()
            kind = self._chance.choice(options.kinds)
            host = self._chance.randrange(training.plan.ranks)
            self._one(kind, host)
        while not training.wait(lambda: self._now() >= options.minutes * 60, 1.0):
            training.restart_ended()

    def _now(self) -> float:
        return time.monotonic() - self._begun

    def _one(self, kind: str, host: int) -> None:
        training, victim = self._training, self._training.of_host(host)
        members = training.training()
        fault = Fault(kind, host, round(self._now(), 3))
        self.found.append(fault)
        stays = self._chance.uniform(*self._options.held) * self._options.grace
        begun = time.monotonic()
        victim = self._do(kind, victim, stays)
        ended = time.monotonic()
        fault.host, fault.held = victim.host, round(ended - begun, 3)
        if kind != "kill":
            if not training.wait(lambda: victim.has_ended, _NOTICES_WITHIN):
                fault.said = "did not notice it"
                os.kill(victim.pid, elastic_rank.DUMP_SIGNAL)
                time.sleep(1.0)
                print(training.stacks(victim), file=sys.stderr, flush=True)
                os.kill(victim.pid, signal.SIGKILL)
                training.wait(lambda: victim.has_ended, 5.0)
            fault.noticed = round(time.monotonic() - ended, 3)
            fault.said = fault.said or training.said(victim)
        training.wait(lambda: False, self._options.restart_after)
        others = [each for each in members if each is not victim]
        self._follow(fault, begun, others, training.start(victim.host))

    def _do(self, kind: str, victim: Process, stays: float) -> Process:
        """Causes and ends a fault; returns the rank that the others lose."""
        training = self._training
        if kind == "kill":
            os.kill(victim.pid, signal.SIGKILL)
            training.wait(lambda: victim.has_ended, 5.0)
        elif kind == "stop":
            os.kill(victim.pid, signal.SIGSTOP)
            training.wait(lambda: False, stays)
            os.kill(victim.pid, signal.SIGCONT)
        elif kind == "cut":
            training.lab.set_link(victim.host, up=False)
            training.wait(lambda: False, stays)
            training.lab.set_link(victim.host, up=True)
        else:
            other = training.of_host((victim.host + 1) % training.plan.ranks)
            with training.lab.apart(victim.host, other.host):
                training.wait(lambda: victim.has_ended or other.has_ended, _NOTICES_WITHIN)
            victim = other if other.has_ended else victim
        return victim

    def _follow(self, fault: Fault, begun: float, others: list[Process], new: Process) -> None:
        """Wait until all ranks have come back; measures the cost."""
        training = self._training

        def lost() -> float | None:
            logs = [each.log for each in others if not each.has_ended]
            return common_step_after(logs, begun)

        def is_back() -> bool:
            training.restart_ended(spared=fault.host)
            return lost() is not None and (bool(new.log.lines) or new.has_ended)

        training.wait(is_back, HANG)
        common = lost()
        fault.lost = None if common is None else round(common - begun, 3)
        if new.log.lines:
            fault.away = round(new.log.lines[0].time - begun, 3)
            joined = new.log.lines[0].step
            training.wait(lambda: joined in step_times(training.logs), 5.0)
            times = step_times(training.logs)
            joining = join_seconds(new.log, training.logs, usual_step(times))
            fault.joining = None if joining is None else round(joining, 3)
        print(
            f"{len(self.found):3d}. at {fault.at:6.1f} s, {fault.kind}, host {fault.host}, "
            f"{fault.held:.1f} s: {_seconds(fault.lost)} lost, back after {_seconds(fault.away)} "
            f"({_seconds(fault.joining)} for joining) {fault.said[:100]}",
            flush=True,
        )


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"
