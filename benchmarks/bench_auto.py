"""What a step takes over links with the hook that ``auto`` chooses, beside those it chooses from.

``python benchmarks/bench_auto.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_link import Link, links_of
from harness import Against, Job, Report, Samples, parse, parser
from lab_bench import (
    check_hooks,
    congestion_control,
    delay_argument,
    finish_run,
    format_link,
    rate_argument,
    run_on_links,
    runs_as_rank,
    use_one_thread,
)
from link_rank import Subject, goes_on, set_link
from netlab import Lab, parse_rate

from torch_commhook.cli.text_data import read_text, split_text
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.cli.world import World
from torch_commhook.hooks.first_steps import STEPS

HOSTS = 2
#: Those of auto's that are within the error that it may have here, as its log says.
DEFAULT_HOOKS = ("allreduce()", "cast()", "blockwise()", "fp8()", "blockwise(bits=4)")
MAX_ERROR = 0.2
#: Of the time of the fastest hook.
AT_MOST = 1.10
LEAST_ROUNDS = 3
_LIMIT = timedelta(minutes=10)


@dataclass(frozen=True)
class Plan:
    """What the ranks are to measure.

    Attributes:
        auto: its expression.
        hooks: those beside it.
        links: how many there are.
        batch: sequences of each rank in a step.
        rounds: in each, every hook takes a step.
        seconds: of a link, after which no round begins, once there were a few.
        warm_up: steps of each hook before the rounds.
    """

    auto: str
    hooks: list[str]
    links: int
    batch: int
    rounds: int
    seconds: float
    warm_up: int


def measure_rank(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """For each link the choice, what choosing took, and the seconds of steps by hook."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank, size, torch.device("cpu"), "gloo")
    config = TrainConfig(ranks=size, batch=plan.batch)
    data = split_text(read_text(None, config.cap_bytes, config.seq), config.seq)
    shuffle = random.Random(0).shuffle  # the same on all ranks
    found = []
    for link in range(plan.links):
        set_link(link, folder)
        chooser = Subject(plan.auto, config, world, data)
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
            shuffle(order)
            for name in order:
                seconds[name].append(_seconds(subjects[name]))
        found.append(
            {
                "choice": stats.choice,
                "reason": stats.reason,
                "choosing": first[STEPS] - statistics.median(first[1:STEPS]),
                "seconds": seconds,
            }
        )
        for subject in subjects.values():
            subject.close()
        del subjects, subject, chooser
        gc.collect()
    return found


def _seconds(subject: Subject) -> float:
    dist.barrier()
    started = time.perf_counter()
    subject.step()
    return time.perf_counter() - started


def run_rank(path: Path) -> None:
    """A rank on a host."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_LIMIT)
    found = measure_rank(Plan(**json.loads(path.read_text())), path.parent)
    if dist.get_rank() == 0:
        path.with_name("figures.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(plan: Plan, links: Sequence[Link], timeout: float) -> list[dict[str, Any]]:
    """Run the ranks; what they have found on each link.

    Raises:
        LabError: there can be no hosts here, or a rank has failed, which has said why.
    """
    rate, delay = links[0]
    with tempfile.TemporaryDirectory() as name, Lab(HOSTS, rate, delay=delay) as lab:

        def change(number: int) -> None:
            lab.set_rate(links[number][0])
            lab.set_delay(links[number][1] or 0.0)

        program = Path(__file__).name
        found: list[dict[str, Any]] = run_on_links(lab, Path(name), program, plan, change, timeout)
    return found


def run(options: argparse.Namespace) -> Report:
    torch.set_num_threads(1)  # as each rank has, which rows tell
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
    for link, found in zip(links, measure(plan, links, options.timeout), strict=True):
        add_table(report, link, auto, found)
    return report


def add_table(report: Report, link: Link, auto: str, found: dict[str, Any]) -> None:
    """Add what was found on a link: the steps of auto beside those of the fastest hook."""
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
    report.add(where, jobs, samples, f"step, {HOSTS} ranks with one thread each, {where}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=7, seconds=90.0)
    add = options.add_argument
    add(
        "--rates",
        type=rate_argument,
        nargs="+",
        default=[parse_rate(rate) for rate in ("100mbit", "200mbit", "1gbit")],
        help="of the links, each way (default: 100mbit 200mbit 1gbit)",
    )
    add(
        "--delay",
        type=delay_argument,
        nargs="+",
        metavar="MS",
        default=[0.0, 0.010, 0.050],
        help="of the links, each way, with each rate (default: 0 10 50)",
    )
    add("--hooks", nargs="+", metavar="HOOK", default=list(DEFAULT_HOOKS), help="beside auto")
    add(
        "--max-error",
        type=float,
        default=MAX_ERROR,
        help=f"that auto may have (default: {MAX_ERROR:g})",
    )
    add("--batch", type=int, default=2, help="sequences of each rank in a step (default: 2)")
    add("--warm-up", type=int, default=2, help="steps of each hook on a link (default: 2)")
    add("--timeout", type=float, default=7200.0, help="of the ranks, in seconds (default: 7200)")
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
