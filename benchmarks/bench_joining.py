"""Measures the cost of a joining rank for the others: it gets the state at once or in pieces.

``python benchmarks/bench_joining.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Job, Report, Samples, parse, parser
from lab_bench import (
    check_hooks,
    finish_run,
    rate_argument,
    run_ranks,
    runs_as_rank,
    use_one_thread,
)
from netlab import Lab, format_rate
from torch import nn

import torch_commhook
from torch_commhook.elastic import joining
from torch_commhook.hooks.expressions import parse_hook

HOOK = "error_feedback(blockwise(bits=4))"
WAYS = ("at once", "in pieces")
#: Steps before a rank joins, and after.
_BEFORE, _AFTER = 8, 4
_BATCH = 16
_LIMIT = timedelta(minutes=10)


@dataclass(frozen=True)
class Plan:
    """The plan of the measurement.

    Attributes:
        hook: an expression.
        parameters: of the model, approximately.
        rounds: in each, a rank joins in each way.
    """

    hook: str
    parameters: int
    rounds: int


def end_together(store: Any, rank: int, ranks: int) -> None:
    """Let rank 0 wait for all others, since the store ends with rank 0's process."""
    if store.add("ended", 1) == ranks:
        store.set("all ended", "")
    if rank == 0:
        store.wait(["all ended"], _LIMIT)


def train(plan: Plan, store: Any, rank: int, ranks: int, name: str) -> dict[str, float]:
    """Trains until the last rank has joined; returns the cost as this rank has seen it."""
    # Keys of this training alone: the store outlives the training's ranks.
    own = dist.PrefixStore(name, store)
    torch.manual_seed(rank)
    side = max(1, round((plan.parameters / 2) ** 0.5))
    model = nn.Sequential(nn.Linear(side, side), nn.ReLU(), nn.Linear(side, side))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(_BATCH, side)).square().mean().backward()
        optimizer.step()

    step()  # a process does some work only once
    optimizer.state.clear()
    is_new = rank == ranks - 1
    if is_new:
        own.wait(["go"], _LIMIT)
    settings = torch_commhook.Elastic(
        min_ranks=2, grace=5.0, state=[optimizer], store=own, ranks=ranks - 1, name=name
    )
    handle = torch_commhook.attach(model, parse_hook(plan.hook), elastic=settings)
    sizes: list[int] = []
    handle.on_membership(lambda rank, size: sizes.append(size))
    before: list[float] = []
    while_joining: list[float] = []
    end = sys.maxsize
    while handle.steps < end:
        began = time.perf_counter()
        step()
        took = time.perf_counter() - began
        if len(sizes) == 1:
            before.append(took)
        elif end == sys.maxsize:
            while_joining.append(took)
        if rank == 0 and handle.steps == _BEFORE:
            own.set("go", "")
        if is_new and not handle.is_joining and not own.check(["complete"]):
            own.set("complete", "")
        if rank == 0 and end == sys.maxsize and own.check(["complete"]):
            own.set("end", str(handle.steps + _AFTER))
        if own.check(["end"]):
            end = int(own.get("end"))
    end_together(own, rank, ranks)
    with suppress(RuntimeError):
        handle.remove()
    if is_new or not while_joining:
        return {}
    usual = statistics.median(before[2:])
    return {
        "seconds": sum(each - usual for each in while_joining),
        "longest": max(while_joining),
        "usual": usual,
        "steps": len(while_joining),
    }


def run_rank(path: Path) -> None:
    """Runs a rank on a host."""
    torch.set_num_threads(1)
    plan = Plan(**json.loads(path.read_text()))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=rank == 0, timeout=_LIMIT)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(plan.rounds):
        for way in WAYS:
            joining.AT_ONCE = 0 if way == "in pieces" else sys.maxsize
            found[way].append(train(plan, store, rank, ranks, f"{way} {number}"))
    if rank == 0:
        path.with_name("figures.json").write_text(json.dumps(found))
    end_together(store, rank, ranks)


def run(options: argparse.Namespace) -> Report:
    torch.set_num_threads(1)  # like each rank; rows record it
    report = Report("bench_joining", options)
    plan = Plan(options.hook, int(options.parameters * 1e6), options.rounds)
    with tempfile.TemporaryDirectory() as name, Lab(options.hosts, options.rate) as lab:
        found = run_ranks(lab, Path(name), Path(__file__).name, plan, timeout=3600.0)
    jobs, samples = [], {}
    for way in WAYS:
        each = found[way]
        jobs.append(Job(way, lambda: None))
        details: dict[str, Any] = {
            f"{what} s": statistics.median(one[what] for one in each)
            for what in ("longest", "usual")
        }
        details["steps"] = statistics.median(one["steps"] for one in each)
        samples[way] = Samples(seconds=[one["seconds"] for one in each], details=details)
    megabytes = plan.parameters * 12 / 1e6
    title = (
        f"time that a new rank costs {options.hosts - 1} others, with {megabytes:.0f} MB of "
        "parameters and AdamW's state; longest step, usual step, steps"
    )
    report.add(format_rate(options.rate), jobs, samples, title)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=5)
    add = options.add_argument
    add(
        "--hosts", type=int, default=4, help="number of hosts, of which the last joins (default: 4)"
    )
    add(
        "--rate", type=rate_argument, default="200mbit", help="rate of the links (default: 200mbit)"
    )
    add("--hook", default=HOOK, help="hook expression, as in train")
    add("--parameters", type=float, default=8.0, help="millions of parameters (default: 8)")
    add("plan", type=Path, nargs="?", help=argparse.SUPPRESS)
    parsed = parse(options, arguments)
    if runs_as_rank(parsed, run_rank):
        return 0
    use_one_thread(options, parsed)
    check_hooks(options, [parsed.hook], "--hook")
    if parsed.hosts < 3:
        options.error("--hosts must be at least 3")
    if parsed.quick:
        parsed.rounds = 1
    return finish_run("bench_joining", lambda: run(parsed))


if __name__ == "__main__":
    sys.exit(main())
