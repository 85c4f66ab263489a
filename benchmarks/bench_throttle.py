"""Compares ThrottledProcessGroup with a link: the same operations and steps over both.

``python benchmarks/bench_throttle.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from harness import Against, Job, Report, Samples, parse, parser
from lab_bench import (
    add_links,
    finish_run,
    format_link,
    run_ranks,
    use_one_thread,
)
from layer_buckets import step_of
from link_rank import goes_on
from netlab import Lab

from torch_commhook.hooks.expressions import NO_HOOK
from torch_commhook.process_group import ThrottledProcessGroup, register

MEGABYTES = (1, 8)
HOOKS = (
    NO_HOOK,
    "blockwise()",
    "error_feedback(blockwise(bits=4))",
    "topk(0.01)",
    "powersgd(rank=2)",
)
#: Numbers of layers and their width; each layer is a bucket.
MODELS = ((25, 256), (5, 750))
#: The most difference between a step through the group and one over the link, as a share.
MOST_OFF = 0.15
#: Calls in a turn: TCP is slow after a pause.
UNTIMED, TIMED = 1, 2
LEAST_ROUNDS = 2
_LIMIT = timedelta(minutes=5)

#: By call: the seconds over the link, and through the group.
Times = dict[str, tuple[list[float], list[float]]]
Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Plan:
    """The plan of the measurement.

    Attributes:
        rate: of the link, each way, in bits per second.
        delay: of the link, each way, in seconds.
        burst: of the link after a pause, in bytes.
        near: the interface of a network without a limit or a delay.
        rounds: in each, every call has its turns.
        seconds: after these, no further round begins, once there were a few.
    """

    rate: int
    delay: float
    burst: int
    near: str
    rounds: int
    seconds: float


def operations(group: dist.ProcessGroup, megabytes: int) -> Calls:
    """The operations to compare, on tensors of so many megabytes."""
    ranks = group.size()
    whole = torch.ones(megabytes * 250_000)
    part = torch.ones(whole.numel() // ranks)
    calls: Calls = {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: dist.all_gather(list(whole.chunk(ranks)), part, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
    }
    return {f"{name}, {megabytes} MB": call for name, call in calls.items()}


def steps(group: dist.ProcessGroup, layers: int, width: int) -> Calls:
    """Backwards to compare, of a model with one bucket for each layer."""
    calls: Calls = {}
    for text in HOOKS:
        step, _ = step_of(text, layers, width, group)
        calls[f"{layers} buckets, {'DDP' if text == NO_HOOK else text}"] = step
    return calls


def all_calls(group: dist.ProcessGroup, interface: str) -> Calls:
    """All calls to compare, over a group on one interface."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface  # for groups that hooks make
    calls: Calls = {}
    for megabytes in MEGABYTES:
        calls |= operations(group, megabytes)
    for layers, width in MODELS:
        calls |= steps(group, layers, width)
    return calls


def time_turn(call: Callable[[], object]) -> list[float]:
    """The seconds of some calls on the slowest rank."""
    dist.barrier()
    found = []
    for _ in range(UNTIMED + TIMED):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    took = torch.tensor(found[UNTIMED:])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.tolist()


def run_rank(path: Path) -> None:
    """Runs a rank on a host with a link and a near network."""
    plan = Plan(**json.loads(path.read_text()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_LIMIT)
    link = all_calls(dist.group.WORLD, os.environ["GLOO_SOCKET_IFNAME"])
    os.environ["GLOO_SOCKET_IFNAME"] = plan.near
    parent = dist.new_group(timeout=_LIMIT)
    group = ThrottledProcessGroup(parent, bandwidth=plan.rate, latency=plan.delay, burst=plan.burst)
    register(group, "throttled")
    throttled = all_calls(group, plan.near)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in link}
    end = time.perf_counter() + plan.seconds
    for number in range(plan.rounds):
        if not goes_on(dist.get_rank(), number < LEAST_ROUNDS or time.perf_counter() < end):
            break
        for name in link:  # one after the other, under the same load of the machine
            for calls, found in zip((link, throttled), times[name], strict=True):
                found += time_turn(calls[name])
    if dist.get_rank() == 0:
        path.with_name("figures.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def measure(hosts: int, rate: int, delay: float, options: argparse.Namespace) -> Times:
    """The seconds over the link and through the group, by call."""
    with tempfile.TemporaryDirectory() as name, Lab(hosts, rate, delay=delay or None) as lab:
        near, burst = lab.add_near_network(), lab.burst_at(rate)
        plan = Plan(rate, delay, burst, near, options.rounds, options.seconds)
        found: Times = run_ranks(lab, Path(name), Path(__file__).name, plan, timeout=1800.0)
        return found


def compare(report: Report, options: argparse.Namespace, hosts: int, delay: float) -> None:
    """Add the tables of links with one delay to a report."""
    for rate in options.rates:
        jobs, samples = [], {}
        for call, seconds in measure(hosts, rate, delay, options).items():
            names = f"{call}, link", f"{call}, throttled"
            for job, found in zip(names, seconds, strict=True):
                against = None if job == names[0] else Against(names[0], times=True)
                jobs.append(Job(job, lambda: None, against=against))
                samples[job] = Samples(seconds=found)
        where = f"{format_link(rate, delay or None)}, {hosts} ranks"
        report.add(where, jobs, samples, f"operations and steps at {where}; ratios are of times")


def run(options: argparse.Namespace) -> Report:
    torch.set_num_threads(1)
    report = Report("bench_throttle", options)
    for hosts in options.hosts:
        for delay in options.delay:
            compare(report, options, hosts, delay)
    ratios = [row.ratio for row in report.rows if " buckets, " in row.job and row.ratio]
    near = sum(abs(ratio - 1) <= MOST_OFF for ratio in ratios)
    report.note(f"{near} of {len(ratios)} steps are within {MOST_OFF:.0%} of those over the link.")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=4, seconds=150.0)
    add = options.add_argument
    add(
        "--hosts",
        type=int,
        nargs="+",
        default=[2, 4],
        help="numbers of hosts, one lab each (default: 2 4)",
    )
    add_links(options, ["200mbit"], [0, 25])
    add("plan", type=Path, nargs="?", help=argparse.SUPPRESS)
    parsed = parse(options, arguments)
    if parsed.plan is not None:
        run_rank(parsed.plan)
        return 0
    del parsed.plan
    use_one_thread(options, parsed)
    return finish_run("bench_throttle", lambda: run(parsed))


if __name__ == "__main__":
    sys.exit(main())
