"""Measures the cost of attaching a hook for more and more ranks: round trips, store, connections.

``python benchmarks/bench_attach.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_round_trips import RATE, slope
from counting_store import CountingStore
from harness import Job, Report, Samples, parse, parser
from lab_bench import (
    check_hooks,
    delay_argument,
    finish_run,
    run_on_delays,
    runs_as_rank,
    use_one_thread,
    write_figures,
)
from link_rank import WARM_UP, goes_on, set_link
from torch import nn

import torch_commhook
from torch_commhook.hooks.expressions import parse_hook

HOOKS = ("allreduce()", "blockwise()")
#: Round trips that attaching may take, for any number of ranks.
MOST_ROUND_TRIPS = 12
LEAST_ROUNDS = 2
_LIMIT = timedelta(minutes=5)
_ESTABLISHED = "01"


@dataclass(frozen=True)
class Plan:
    """The plan of the measurement.

    Attributes:
        hooks: hook expressions.
        links: the number of links, which have different delays.
        rounds: in each, every hook is attached once on each link.
        seconds: after these, no further round begins, once there were a few.
    """

    hooks: list[str]
    links: int
    rounds: int
    seconds: float


def connections() -> int:
    """The TCP connections of this host. The rank is its only program."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[3] == _ESTABLISHED for line in lines)


def counted(store: CountingStore, text: str, model: nn.Module) -> dict[str, float]:
    """Attach a hook; returns what that took on this rank."""
    before, connected = store.counts(), connections()
    started = time.perf_counter()
    handle = torch_commhook.attach(model, parse_hook(text), connections=1)
    took = time.perf_counter() - started
    requests, nbytes = (now - was for now, was in zip(store.counts(), before, strict=True))
    attached = connections() - connected
    # The first step connects ranks that have not exchanged messages yet.
    model(torch.ones(1, 8)).sum().backward()
    stepped = connections() - connected
    handle.remove()
    return {
        "seconds": took,
        "requests": requests,
        "bytes": nbytes,
        "connections": attached,
        "after a step": stepped,
    }


def measure_rank(plan: Plan, store: CountingStore, folder: Path) -> list[dict[str, list[Any]]]:
    """The cost of attaching, by link and hook: the maximum over the ranks."""
    rank = dist.get_rank()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(25)))
    order = list(plan.hooks)
    shuffle = random.Random(0).shuffle  # the same on all ranks
    found: list[dict[str, list[Any]]] = [{text: [] for text in order} for _ in range(plan.links)]
    for text in order:  # a process does some work only once
        counted(store, text, model)
    end = time.perf_counter() + plan.seconds
    for number in range(plan.rounds):
        if not goes_on(rank, number < LEAST_ROUNDS or time.perf_counter() < end):
            break
        shuffle(order)
        for link in range(plan.links):
            set_link(link, folder)
            for text in order:
                dist.barrier()
                own = counted(store, text, model)
                most = torch.tensor(list(own.values()), dtype=torch.float64)
                dist.all_reduce(most, op=dist.ReduceOp.MAX)
                found[link][text].append(dict(zip(own, most.tolist(), strict=True)))
        set_link(WARM_UP, folder)
    return found


def run_rank(path: Path) -> None:
    """Runs a rank on a host."""
    torch.set_num_threads(1)
    store = CountingStore.of_environment(_LIMIT)
    dist.init_process_group(
        "gloo", store=store, rank=store.rank, world_size=store.ranks, timeout=_LIMIT
    )
    found = measure_rank(Plan(**json.loads(path.read_text())), store, path.parent)
    write_figures(path, found)
    dist.destroy_process_group()


def add_table(report: Report, hosts: int, options: argparse.Namespace) -> list[bool]:
    """Measure attaching with a number of ranks; returns whether each hook is within its limit."""
    plan = Plan(list(options.hooks), len(options.delay), options.rounds, options.seconds)
    found: list[dict[str, list[Any]]] = run_on_delays(
        hosts, RATE, Path(__file__).name, plan, options.delay
    )
    jobs, samples, within = [], {}, []
    for text in plan.hooks:

        def median(link: int, what: str, text: str = text) -> float:
            return statistics.median(each[what] for each in found[link][text])

        links = range(len(options.delay))
        trips = slope(options.delay, [median(link, "seconds") for link in links])
        within.append(trips <= MOST_ROUND_TRIPS)
        details = {"round trips": trips, "at most": MOST_ROUND_TRIPS}
        for what in ("requests", "bytes", "connections", "after a step"):
            details[what] = median(0, what)
        jobs.append(Job(text, lambda: None))
        seconds = [each["seconds"] for each in found[0][text]]
        samples[text] = Samples(seconds=seconds, details=details)
    title = f"attach among {hosts} ranks: time without a delay, and what the busiest rank does"
    report.add(f"{hosts} ranks", jobs, samples, title)
    return within


def run(options: argparse.Namespace) -> Report:
    torch.set_num_threads(1)  # like each rank; rows record it
    report = Report("bench_attach", options)
    within = [held for hosts in options.hosts for held in add_table(report, hosts, options)]
    report.note(f"{sum(within)} of {len(within)} take at most {MOST_ROUND_TRIPS} round trips.")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=5, seconds=120.0)
    add = options.add_argument
    add(
        "--hosts",
        type=int,
        nargs="+",
        default=[2, 4, 8, 16, 32],
        help="numbers of hosts, one lab each (default: 2 4 8 16 32)",
    )
    add(
        "--delay",
        type=delay_argument,
        nargs="+",
        default=[0.0, 0.025, 0.05],
        metavar="MS",
        help="delays of the links, each way, two or more (default: 0 25 50)",
    )
    add(
        "--hooks",
        nargs="+",
        metavar="HOOK",
        default=list(HOOKS),
        help="hook expressions, as in train",
    )
    add("plan", type=Path, nargs="?", help=argparse.SUPPRESS)
    parsed = parse(options, arguments)
    if runs_as_rank(parsed, run_rank):
        return 0
    use_one_thread(options, parsed)
    if len(set(parsed.delay)) < 2:
        options.error("--delay needs two or more")
    check_hooks(options, parsed.hooks)
    if parsed.quick:
        parsed.rounds = 1
    return finish_run("bench_attach", lambda: run(parsed))


if __name__ == "__main__":
    sys.exit(main())
