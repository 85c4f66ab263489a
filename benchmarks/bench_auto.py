"""Compares steps over links with the hook that ``auto`` chooses with those of its candidates.

``python benchmarks/bench_auto.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_link import links_of
from harness import Against, Job, Report, Samples, parse, parser
from lab_bench import (
    Link,
    add_links,
    check_hooks,
    congestion_control,
    finish_run,
    format_link,
    measure_as_rank,
    run_on_each,
    runs_as_rank,
    use_one_thread,
)
from link_rank import Subject, goes_on, set_link

from torch_commhook.cli.text_model import read_text, split_text
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.cli.world import World
from torch_commhook.hooks.auto import STEPS

HOSTS = 2
#: The default candidates of ``auto`` whose error is at most ``MAX_ERROR`` here, as its log shows.
DEFAULT_HOOKS = ("allreduce()", "cast()", "blockwise()", "fp8()", "blockwise(bits=4)")
MAX_ERROR = 0.2
#: The most time of a step, as a share of the time with the fastest hook.
AT_MOST = 1.10
LEAST_ROUNDS = 3
#: After ``LEAST_ROUNDS``, hooks slower than this multiple of the fastest take no more steps.
_CONTENDS = 1.5
_LIMIT = timedelta(minutes=10)


@dataclass(frozen=True)
class Plan:
    """The plan of the measurement.

    Attributes:
        auto: the expression of ``auto``.
        hooks: the expressions of the other hooks.
        links: the number of links.
        batch: the number of sequences of each rank in a step.
        rounds: the number of rounds. In each, every hook takes a step that does not count, after
            which its connections are no longer idle, and one that does.
        seconds: the time for a link; afterwards no round begins, once there were a few.
        warm_up: the number of steps of each hook before the rounds.
    """

    auto: str
    hooks: list[str]
    links: int
    batch: int
    rounds: int
    seconds: float
    warm_up: int


def measure_rank(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """The choice on each link, its forecasts and its time, and the times of steps by hook."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, torch.device("cpu"), "gloo")
    config = TrainConfig(ranks=size, batch=plan.batch)
    data = split_text(read_text(None, config.cap_bytes, config.seq), config.seq)
    shuffle = random.Random(0).shuffle  # the same on all ranks
    found = []
    for link in range(plan.links):
        set_link(link, folder)
        chooser = Subject(plan.auto, config, world, data)
        with _forecasts() as forecasts:
            first = [_seconds(chooser) for _ in range(STEPS + 1)]
        stats = chooser.run.handle.stats()
        subjects = {plan.auto: chooser}
        subjects.update((hook, Subject(hook, config, world, data)) for hook in plan.hooks)
        for subject in subjects.values():
            for _ in range(plan.warm_up):
                subject.step()
        seconds: dict[str, list[float]] = {name: [] for name in subjects}
        order = list(subjects)
        end = time.perf_counter() + plan.seconds
        for number in range(plan.rounds):
            if not goes_on(rank, number < LEAST_ROUNDS or time.perf_counter() < end):
                break
            if number == LEAST_ROUNDS:
                fastest = min(map(statistics.median, seconds.values()))
                order = [
                    name
                    for name in subjects
                    if name == plan.auto
                    or goes_on(rank, statistics.median(seconds[name]) < _CONTENDS * fastest)
                ]
            shuffle(order)
            for name in order:
                subjects[name].step()
                seconds[name].append(_seconds(subjects[name]))
        found.append(
            {
                "choice": stats.choice,
                "reason": stats.reason,
                "forecasts": forecasts,
                "choosing": first[STEPS] - statistics.median(first[1:STEPS]),
                "seconds": seconds,
            }
        )
        for subject in subjects.values():
            subject.close()
        del subjects, subject, chooser
        gc.collect()
    return found


@contextmanager
def _forecasts() -> Iterator[dict[str, str]]:
    """The step times that ``auto`` forecasts and logs, by hook."""
    found: dict[str, str] = {}

    def note(record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and len(record.args) == 3:
            hook, _, step = record.args
            found[str(hook)] = str(step)
        return True

    log = logging.getLogger("torch_commhook.planning.choice")
    before = log.level
    log.setLevel(logging.INFO)
    log.addFilter(note)
    try:
        yield found
    finally:
        log.removeFilter(note)
        log.setLevel(before)


def _seconds(subject: Subject) -> float:
    dist.barrier()
    started = time.perf_counter()
    subject.step()
    return time.perf_counter() - started


def run_rank(path: Path) -> None:
    """Runs a rank on a host."""
    measure_as_rank(path, Plan, measure_rank, _LIMIT)


def run(options: argparse.Namespace) -> Report:
    torch.set_num_threads(1)  # like each rank; rows record it
    report = Report("bench_auto", options)
    report.environment["congestion_control"] = congestion_control()
    auto = f"auto(max_error={options.max_error:g})"
    links = links_of(options)
    plan = Plan(
        auto=auto,
        hooks=options.hooks,
        links=len(links),
        batch=options.batch,
        rounds=options.rounds,
        seconds=options.seconds,
        warm_up=options.warm_up,
    )
    figures = run_on_each(
        HOSTS, links, Path(__file__).name, plan, warm_up=links[0], timeout=options.timeout
    )
    for link, found in zip(links, figures, strict=True):
        add_table(report, link, auto, found)
    return report


def add_table(report: Report, link: Link, auto: str, found: dict[str, Any]) -> None:
    """Add the results of a link: the steps with auto against those with the fastest hook."""
    where = format_link(*link)
    seconds: dict[str, list[float]] = found["seconds"]
    hooks = [hook for hook in seconds if hook != auto]
    fastest = min(hooks, key=lambda hook: statistics.median(seconds[hook]))
    beside = Against(fastest, times=True)
    jobs = [Job(hook, lambda: None, against=beside if hook != fastest else None) for hook in hooks]
    jobs.append(Job(auto, lambda: None, against=Against(fastest, at_most=AT_MOST, times=True)))
    samples = {name: Samples(seconds=each) for name, each in seconds.items()}
    for name in samples:
        samples[name].details["choosing s"] = found["choosing"] if name == auto else 0.0
    report.note(f"{where}: {auto} chose {found['choice']}: {found['reason']}")
    forecasts = ", ".join(f"{hook} {step}" for hook, step in found["forecasts"].items())
    report.note(f"{where}: forecasts of a step: {forecasts}")
    report.add(where, jobs, samples, f"step, {HOSTS} ranks with one thread each, {where}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=21, seconds=75.0)
    add = options.add_argument
    add_links(options, ["100mbit", "200mbit", "1gbit"], [0, 10, 50])
    add(
        "--hooks",
        nargs="+",
        metavar="HOOK",
        default=list(DEFAULT_HOOKS),
        help="to compare auto with",
    )
    add(
        "--max-error",
        type=float,
        default=MAX_ERROR,
        help=f"of auto (default: {MAX_ERROR:g})",
    )
    add("--batch", type=int, default=2, help="sequences of each rank in a step (default: 2)")
    add("--warm-up", type=int, default=2, help="steps of each hook on a link (default: 2)")
    add(
        "--timeout",
        type=float,
        default=7200.0,
        help="the limit of the ranks, in seconds (default: 7200)",
    )
    add("plan", type=Path, nargs="?", help=argparse.SUPPRESS)
    parsed = parse(options, arguments)
    if runs_as_rank(parsed, run_rank):
        return 0
    use_one_thread(options, parsed)
    check_hooks(options, [*parsed.hooks, f"auto(max_error={parsed.max_error:g})"])
    if parsed.quick:
        parsed.rounds = LEAST_ROUNDS
    return finish_run("bench_auto", lambda: run(parsed))


if __name__ == "__main__":
    sys.exit(main())
