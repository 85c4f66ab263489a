"""Random histories of a training with ranks that come and go, in virtual time.

:func:`run_histories` draws faults from seeds, lets the ranks train, and checks their results.
``virtual_elastic.py`` lists the parts that are the library's own code.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from elastic_checks import LONGEST, Outcome, problems
from virtual_elastic import virtual_time
from virtual_training import ProcessPlan, Trainer, TrainingPlan
from virtual_world import Process, World, worlds

from torch_commhook.elastic.membership import View

#: Points at which a process may end, with descriptions.
POINTS = {
    "connect": "while it connects",
    "bucket": "while it sends a bucket",
    "results": "while it sends results",
    "used": "while it sends what it has used",
    "buffers": "while it sends buffers",
    "end": "while it ends a step",
    "append": "while it says that it is here",
    "compare_set": "while it writes a view",
    "give": "while it sends its state",
    "apply": "while it writes gradients",
    "between": "between two steps",
}


@dataclass
class History:
    seed: int
    problems: list[str]  # the violations; empty for a good history
    faults: Counter[str]  # the number of faults of each kind
    views: int  # the number of agreed views
    steps: int  # counted steps, over all ranks
    repeated: int  # repeated steps, over all ranks
    ended: Counter[str]  # the ends of processes, by kind
    reached_end: bool  # whether a rank has trained to the end
    seconds: float  # of virtual time


class Run:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(f"plan {seed}")
        self.world = World(seed)
        self._started: dict[int, Trainer] = {}
        self.views: list[View] = []
        self.faults: Counter[str] = Counter()
        self.splits = False
        self._armed: list[dict[str, Any]] = []
        self._restarts = 2
        self.world.written = self._written
        self.world.reach = self._reached
        self.plan = self._drawn()

    # ---- faults ------------------------------------------------------------------------------

    def _drawn(self) -> TrainingPlan:
        chance = self.chance
        ranks = chance.randint(2, 6)
        plan = TrainingPlan(
            ranks,
            knows_ranks=chance.random() < 0.7,
            min_ranks=chance.randint(1, max(1, ranks - 1)),
            steps=chance.randint(4, 8),
            buckets=chance.choice([1, 1, 2]),
        )
        plans = [ProcessPlan() for _ in range(ranks)]
        for number, each in enumerate(plans):
            if chance.random() < 0.1:
                each.slowness = chance.choice([3.0, 10.0])
                self.faults["a slow rank"] += 1
            self.world.after(0.05 * chance.random(), partial(self._start, number, number, each))
        self.world.live = self._numbers = ranks
        self._plans = plans
        self._length = 0.05 * plan.steps + 0.3
        for _ in range(chance.choice([0, 1, 1, 2, 2, 3, 4])):
            kind = chance.choice([*_KINDS, *["ends at a point"] * 4, "ends", "stops", "joins"])
            _KINDS[kind](self)
        return plan

    def _victim(self) -> int:
        number = self.chance.randrange(len(self._plans))
        self._plans[number].is_touched = True
        return number

    def _sometime(self) -> float:
        return self.chance.random() * self._length

    def _do(self, number: int, fault: str, act: Callable[[Process], object]) -> None:
        """Applies a fault to a process at some time, if the process still exists."""

        def happen() -> None:
            trainer = self._started.get(number)
            if trainer is not None and not trainer.process.is_dead:
                self.faults[fault] += 1
                act(trainer.process)

        self.world.after(self._sometime(), happen)

    def _ends(self, *, silently: bool = False) -> None:
        fault = "a host vanishes" if silently else "a process ends"
        self._do(self._victim(), fault, partial(self._end, silently=silently))

    def _stops(self) -> None:
        seconds = self.chance.choice([0.1, 0.4, 0.7, 1.0, 2.0, 5.0])
        self._do(self._victim(), "a process is stopped", lambda process: process.stop(seconds))

    def _ends_at_a_point(self) -> None:
        point = self.chance.choice(list(POINTS))
        number = self._victim()
        most = 4 if point in ("compare_set", "give", "connect") else 30
        self._armed.append(
            {
                "point": point,
                "number": None if point in ("compare_set", "give") else number,
                "left": self.chance.randrange(most),
                "stops": self.chance.random() < 0.25,
            }
        )
        if self._armed[-1]["number"] is None:
            for plan in self._plans:
                plan.is_touched = True

    def _reached(self, process: Process, point: str) -> None:
        for armed in self._armed:
            if armed["point"] == point and armed["number"] in (None, process.number):
                if armed["left"]:
                    armed["left"] -= 1
                    continue
                self._armed.remove(armed)
                if armed["stops"]:
                    self.faults[f"a process is stopped {POINTS[point]}"] += 1
                    process.stop(self.chance.choice([0.3, 0.7, 2.0]))
                else:
                    self.faults[f"a process ends {POINTS[point]}"] += 1
                    self._end(process)
                return

    def _end(self, process: Process, *, silently: bool = False) -> None:
        process.end(silently=silently)
        if self._restarts and self.chance.random() < 0.5:
            self._restarts -= 1
            self.faults["a rank starts anew"] += 1
            self._comes(0.02 + self.chance.random(), process.host)

    def _splits(self, *, with_store: bool = False) -> None:
        chance = self.chance
        hosts = list(range(len(self._plans)))
        side = chance.sample(hosts, chance.randint(1, len(hosts) - 1))
        others = [host for host in hosts if host not in side]
        seconds = chance.choice([0.1, 0.5, 1.0, 2.0, 4.0])
        self.splits = True

        def happen() -> None:
            self.world.split(side, others, seconds)
            if with_store:
                self.world.cut_off_from_store(side, seconds)
            cut_off = "hosts are cut off, and from the store"
            self.faults[cut_off if with_store else "the network splits"] += 1

        self.world.after(self._sometime(), happen)

    def _joins(self) -> None:
        self.faults["a rank joins"] += 1
        self._comes(self._sometime(), len(self._plans))

    def _leaves(self) -> None:
        self._plans[self._victim()].leaves_at = self.chance.randint(1, 5)
        self.faults["a rank leaves"] += 1

    def _raises(self) -> None:
        self._plans[self._victim()].raises_at = self.chance.randint(1, 5)
        self.faults["a hook raises"] += 1

    def _comes(self, seconds: float, host: int) -> None:
        self.world.live += 1
        number, self._numbers = self._numbers, self._numbers + 1
        plan = ProcessPlan(is_touched=True)
        self.world.after(seconds, lambda: self._start(number, host, plan))

    def _start(self, number: int, host: int, plan: ProcessPlan) -> None:
        process = Process(self.world, number, host)
        self.world.processes.append(process)
        trainer = self._started[number] = Trainer(process, self.plan, plan, f"{self.seed} {number}")
        process.start(trainer.main)

    @property
    def trainers(self) -> list[Trainer]:
        """The trainers of all processes that have started."""
        return list(self._started.values())

    # ---- running -----------------------------------------------------------------------------

    def _written(self, key: str, value: bytes) -> None:
        if key.endswith("/view"):
            self.views.append(View.from_text(value.decode()))

    def history(self) -> History:
        self.world.run(LONGEST)
        if self.world.failure is not None:
            raise self.world.failure
        for trainer in self.trainers:
            trainer.said = trainer.said or "killed"
        outcome = Outcome(
            self.plan,
            self.trainers,
            self.views,
            self.world.now,
            self.splits,
            self.faults["hosts are cut off, and from the store"] > 0,
        )
        ended = Counter(
            each.said if isinstance(each.said, str) else type(each.said).__name__
            for each in self.trainers
        )
        return History(
            self.seed,
            list(problems(outcome)),
            self.faults,
            len(self.views),
            sum(len(each.counted) for each in self.trainers),
            sum(each.repeated for each in self.trainers),
            ended,
            any(
                each.counted and each.counted[-1].step == self.plan.steps for each in self.trainers
            ),
            self.world.now,
        )


_KINDS: dict[str, Callable[[Run], None]] = {
    "ends": Run._ends,
    "vanishes": partial(Run._ends, silently=True),
    "stops": Run._stops,
    "ends at a point": Run._ends_at_a_point,
    "splits": Run._splits,
    "is cut off": partial(Run._splits, with_store=True),
    "joins": Run._joins,
    "leaves": Run._leaves,
    "raises": Run._raises,
}


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Keeps all threads on one core, where they hand over several times faster."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if cores:
        os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if cores:
            os.sched_setaffinity(0, cores)


def run_histories(seeds: Iterable[int]) -> Iterator[History]:
    """Runs the histories of some seeds. The same seed gives the same history."""
    with _on_one_core(), virtual_time():
        for seed in seeds:
            run = Run(seed)
            worlds.append(run.world)
            try:
                yield run.history()
            finally:
                worlds.pop()
