"""Measures the round trips of a step with each hook: the slope of its time over links' delays.

``python benchmarks/bench_round_trips.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from harness import Against, Job, Report, Samples, parse, parser
from lab_bench import (
    check_hooks,
    delay_argument,
    finish_run,
    measure_as_rank,
    run_on_delays,
    runs_as_rank,
    use_one_thread,
)
from layer_buckets import step_of
from link_rank import WARM_UP, goes_on, set_link

from torch_commhook.hooks.expressions import NO_HOOK

#: Fast enough that a step's bytes take no time.
RATE = "10gbit"
BUCKETS = 25
BASELINE = "DDP"
#: The most round trips of a step, by the number of ranks.
MOST = {
    "allreduce()": {2: 3, 8: 3},
    "cast()": {2: 3, 8: 3},
    "randomk(0.1)": {2: 3, 8: 3},
    "blockwise()": {2: 4, 8: 3},
    "error_feedback(blockwise(bits=4))": {2: 4, 8: 3},
    "topk(0.01)": {2: 3, 8: 2},
    "powersgd(rank=2)": {2: 4, 8: 5},
}
#: Untimed steps at the beginning of a turn on a link: TCP enlarges its window in them.
UNTIMED = 2
LEAST_ROUNDS = 2
_LIMIT = timedelta(minutes=5)


@dataclass(frozen=True)
class Plan:
    """The plan of the measurement.

    Attributes:
        hooks: hook expressions, and ``NO_HOOK`` for DDP alone.
        links: the number of links, which have different delays.
        width: of a layer; each layer is a bucket.
        steps: timed steps in a turn.
        rounds: in each, every hook has a turn on all links.
        seconds: after these, no further round begins, once there were a few.
    """

    hooks: list[str]
    links: int
    width: int
    steps: int
    rounds: int
    seconds: float


def measure_rank(plan: Plan, folder: Path) -> list[dict[str, list[float]]]:
    """The seconds of steps on the slowest rank, by link and hook."""
    rank = dist.get_rank()
    order = list(plan.hooks)
    shuffle = random.Random(0).shuffle  # the same on all ranks
    found: list[dict[str, list[float]]] = [{text: [] for text in order} for _ in range(plan.links)]
    end = time.perf_counter() + plan.seconds
    for number in range(plan.rounds):
        if not goes_on(rank, number < LEAST_ROUNDS or time.perf_counter() < end):
            break
        shuffle(order)
        for text in order:
            set_link(WARM_UP, folder)
            step, close = step_of(text, BUCKETS, plan.width)
            for link in range(plan.links):
                set_link(link, folder)
                took = []
                for _ in range(UNTIMED + plan.steps):
                    started = time.perf_counter()
                    step()
                    took.append(time.perf_counter() - started)
                slowest = torch.tensor(took[UNTIMED:])
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                found[link][text] += slowest.tolist()
            set_link(WARM_UP, folder)
            close()
    return found


def run_rank(path: Path) -> None:
    """Runs a rank on a host."""
    measure_as_rank(path, Plan, measure_rank, _LIMIT)


def slope(delays: Sequence[float], seconds: Sequence[float]) -> float:
    """The round trips in a step: the slope of its seconds over the seconds of a round trip."""
    return statistics.linear_regression([2 * delay for delay in delays], seconds).slope


def add_table(report: Report, hosts: int, options: argparse.Namespace) -> tuple[int, int]:
    """Measure steps with a number of ranks; returns how many hooks meet their limit, and all."""
    names = [NO_HOOK, *options.hooks]
    plan = Plan(
        names, len(options.delay), options.width, options.steps, options.rounds, options.seconds
    )
    found: list[dict[str, list[float]]] = run_on_delays(
        hosts, RATE, Path(__file__).name, plan, options.delay
    )
    jobs, samples, within, limited = [], {}, 0, 0
    for text in names:
        job = BASELINE if text == NO_HOOK else text
        medians = [statistics.median(of_link[text]) for of_link in found]
        trips = slope(options.delay, medians)
        details = {"round trips": trips}
        most = MOST.get(text, {}).get(hosts)
        if most is not None:
            details["at most"] = most
            within += trips <= most
            limited += 1
        for delay, seconds in zip(options.delay, medians, strict=True):
            details[f"{2e3 * delay:g} ms"] = seconds * 1e3
        against = None if text == NO_HOOK else Against(BASELINE, times=True)
        jobs.append(Job(job, lambda: None, against=against))
        samples[job] = Samples(seconds=found[-1][text], details=details)
    title = (
        f"step of {BUCKETS} buckets, {hosts} ranks, in ms at each round trip; times and ratios at "
        f"{2e3 * options.delay[-1]:g} ms"
    )
    report.add(f"{hosts} ranks", jobs, samples, title)
    return within, limited


def run(options: argparse.Namespace) -> Report:
    torch.set_num_threads(1)  # like each rank; rows record it
    report = Report("bench_round_trips", options)
    counts = [add_table(report, hosts, options) for hosts in options.hosts]
    within, limited = (sum(column) for column in zip(*counts, strict=True))
    if limited:
        report.note(f"{within} of {limited} hooks take no more round trips than they may.")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=3, seconds=300.0)
    add = options.add_argument
    add(
        "--hosts",
        type=int,
        nargs="+",
        default=[2, 8],
        help="numbers of hosts, one lab each (default: 2 8)",
    )
    add(
        "--delay",
        type=delay_argument,
        nargs="+",
        default=[0.0005, 0.005, 0.025, 0.05],
        metavar="MS",
        help="delays of the links, each way, two or more (default: 0.5 5 25 50)",
    )
    add(
        "--hooks",
        nargs="+",
        metavar="HOOK",
        default=list(MOST),
        help="hook expressions, as in train",
    )
    add(
        "--width",
        type=int,
        default=64,
        help="width of a layer; each layer is a bucket (default: 64)",
    )
    add("--steps", type=int, default=2, help="timed steps in each turn (default: 2)")
    add("plan", type=Path, nargs="?", help=argparse.SUPPRESS)
    parsed = parse(options, arguments)
    if runs_as_rank(parsed, run_rank):
        return 0
    use_one_thread(options, parsed)
    if len(set(parsed.delay)) < 2:
        options.error("--delay needs two or more")
    check_hooks(options, parsed.hooks)
    if parsed.quick:
        parsed.steps, parsed.rounds = 1, 1
    return finish_run("bench_round_trips", lambda: run(parsed))


if __name__ == "__main__":
    sys.exit(main())
