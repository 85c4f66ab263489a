"""Measures a training step over links of given rates and delays, with each hook.

``python benchmarks/bench_link.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from bench_loss import PHASES
from harness import MIN_ROUNDS, Against, Job, Report, Samples, parse, parser
from lab_bench import (
    Link,
    add_links,
    check_hooks,
    congestion_control,
    finish_run,
    format_link,
    run_on_each,
    use_one_thread,
)
from link_rank import ALONE, PYTORCH, Plan
from machine import FOLDER
from netlab import parse_rate
from pictures import draw_rates, times_of

from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.hooks.expressions import NO_HOOK

HOSTS = 2
DEFAULT_HOOKS = (
    *PYTORCH,
    "allreduce()",
    "cast()",
    "blockwise()",
    "error_feedback(blockwise(bits=4))",
    "error_feedback(topk(0.01))",
    "powersgd(rank=2)",
    "error_feedback(powersgd(rank=2))",
    *dict.fromkeys(phase for phases in PHASES.values() for phase in phases),
)
#: Exchanges in the background of the steps between two exchanges.
STREAMED = "local_sgd(30, delay=20, mix=0.5, hook=error_feedback(blockwise(bits=4)))"
#: The most time for a rate and a delay each way, as a share of DDP's without a hook.
AT_MOST = {
    (200_000_000, None, "cast()"): 0.53,
    (200_000_000, None, "blockwise()"): 0.33,
    (200_000_000, None, "error_feedback(blockwise(bits=4))"): 0.22,
    (200_000_000, None, "powersgd(rank=2)"): 0.15,
    (1_000_000_000, None, "blockwise()"): 0.60,
    (200_000_000, 0.025, "blockwise()"): 0.31,
    (200_000_000, 0.025, "error_feedback(blockwise(bits=4))"): 0.22,
    (200_000_000, 0.025, "powersgd(rank=2)"): 0.17,
    (200_000_000, 0.025, "error_feedback(topk(0.01))"): 0.16,
}
#: The most time, as a multiple of that without communication.
AT_MOST_ALONE = {STREAMED: 1.05}
BASELINE = "DDP"
#: The rate while nothing is timed.
WARM_UP_RATE = parse_rate("10gbit")
PICTURE = FOLDER.parent / "docs" / "images" / "link.png"


def links_of(options: argparse.Namespace) -> list[Link]:
    """The links of the tables, in order."""
    return [(rate, delay) for rate in options.rates for delay in options.delay or [None]]


def measure(plan: Plan, options: argparse.Namespace) -> dict[Link, dict[str, Samples]]:
    """Run the ranks; returns samples by link and job.

    Raises:
        LabError: this machine cannot make hosts, or a rank has failed and has printed the reason.
    """
    links = links_of(options)
    least = None if links[0][1] is None else 0.0
    figures = run_on_each(
        HOSTS,
        links,
        "link_rank.py",
        plan,
        warm_up=(WARM_UP_RATE, least),
        timeout=options.timeout,
    )
    return {
        link: {job: _samples(link[0], found) for job, found in jobs.items()}
        for link, jobs in zip(links, figures, strict=True)
    }


def _samples(rate: int, found: dict[str, object]) -> Samples:
    seconds, carried, told = found["seconds"], found["link_bytes"], found["hook_bytes"]
    assert isinstance(seconds, list) and isinstance(carried, int)
    steps = len(seconds)
    details = {"link MB": carried / steps / 1e6}
    if isinstance(told, int):
        details["stats MB"] = told / steps / 1e6
    details["wire ms"] = carried / steps * 8 / rate * 1e3
    return Samples(seconds=seconds, details=details)


def means(seconds: Sequence[float], steps: int) -> list[float]:
    """The means of groups of ``steps`` steps, since few steps begin or end an exchange."""
    return [statistics.fmean(seconds[i : i + steps]) for i in range(0, len(seconds), steps)]


def jobs_on(link: Link, names: Sequence[str]) -> list[Job]:
    """The jobs of a table, with the targets for this link."""
    jobs = []
    for name in names:
        against = None
        if name in AT_MOST_ALONE:
            against = Against(ALONE, at_most=AT_MOST_ALONE[name], times=True)
        elif name != NO_HOOK and NO_HOOK in names:
            against = Against(BASELINE, at_most=AT_MOST.get((*link, name)), times=True)
        jobs.append(Job(BASELINE if name == NO_HOOK else name, lambda: None, against=against))
    return jobs


def run(options: argparse.Namespace) -> Report:
    torch.set_num_threads(1)  # like each rank; rows record it
    name = "bench_link" + "_far" * (options.delay is not None) + "_streamed" * options.streamed
    report = Report(name, options)
    report.environment["congestion_control"] = congestion_control()
    names = [ALONE, *([] if options.streamed else [NO_HOOK]), *options.hooks]
    for caps in options.bucket_cap_mb:
        plan = Plan(
            jobs=names,
            links=len(links_of(options)),
            bucket_cap_mb=caps,
            batch=options.batch,
            steps=options.steps,
            rounds=options.rounds,
            least_rounds=min(options.rounds, MIN_ROUNDS),
            seconds=options.seconds,
            warm_up=options.warm_up,
        )
        for link, samples in measure(plan, options).items():
            if options.streamed:
                for of_job in samples.values():
                    of_job.seconds = means(of_job.seconds, options.steps)
            else:
                samples[BASELINE] = samples.pop(NO_HOOK)
            buckets = f"buckets of {format_caps(caps)} MiB"
            where = f"{format_link(*link)}, {buckets}, batches of {options.batch}"
            title = f"step, {HOSTS} ranks with one thread each, {where}"
            report.add(where, jobs_on(link, names), samples, title)
    return report


def draw(report: Report, rates: Sequence[int], path: Path) -> None:
    """Draws the step's time over the links' rate, with a line for each job."""
    rows = [{"job": row.job, "seconds": row.seconds} for row in report.rows]
    draw_rates(times_of(rows, len(rates)), rates, path)


def _caps(text: str) -> tuple[float, ...]:
    try:
        caps = tuple(map(float, text.split(",")))
    except ValueError:
        caps = (0.0,)
    if not 0 < min(caps) <= max(caps) < 1e6:
        raise argparse.ArgumentTypeError(f"must be MiB such as 5 or 2,12,14, got {text}")
    return caps


def format_caps(caps: Sequence[float]) -> str:
    return ", ".join(f"{cap:g}" for cap in caps)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with all checks that need no hosts."""
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=6, seconds=900.0)
    add = options.add_argument
    add_links(options, ["200mbit", "1gbit"], None)
    add(
        "--hooks",
        nargs="+",
        metavar="HOOK",
        default=list(DEFAULT_HOOKS),
        help=f"as train takes them, or {' or '.join(PYTORCH)} (default: {' '.join(DEFAULT_HOOKS)})",
    )
    add(
        "--bucket-cap-mb",
        type=_caps,
        nargs="+",
        default=[TrainConfig().bucket_cap_mb],
        metavar="MIB",
        help="sizes of DDP's buckets, such as 5 or 2,12,14: a table for each (default: train's)",
    )
    add("--batch", type=int, default=2, help="sequences of each rank in a step (default: 2)")
    add(
        "--steps",
        type=int,
        default=4,
        help="timed steps in each hook's turn of a round (default: 4)",
    )
    add(
        "--streamed",
        action="store_true",
        help=f"{STREAMED} alone, in turns of a round of its steps, beside no communication",
    )
    add("--warm-up", type=int, default=4, help="steps at the beginning of a turn (default: 4)")
    add(
        "--timeout",
        type=float,
        default=3600.0,
        help="limit for the ranks, in seconds (default: 3600)",
    )
    add("--plot", type=Path, metavar="FILE", help="where to draw the times, for two rates or more")
    parsed = parse(options, arguments)
    use_one_thread(options, parsed)
    if parsed.streamed:
        parsed.hooks, parsed.steps = [STREAMED], 30
    least = min(parsed.batch, parsed.steps, parsed.warm_up)
    if least < 1:
        options.error("--batch, --steps and --warm-up must be above 0")
    check_hooks(options, [hook for hook in parsed.hooks if hook not in PYTORCH])
    if parsed.quick:
        parsed.steps, parsed.rounds = 1, 2
    elif parsed.plot is None and parsed.out is None and parsed.delay is None:
        parsed.plot = PICTURE if len(parsed.rates) > 1 else None
    if parsed.plot is not None and parsed.delay is not None and len(parsed.delay) > 1:
        options.error("--plot draws over rates, for one --delay")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)

    def draw_rates(report: Report) -> None:
        if options.plot is not None and len(options.rates) > 1:
            draw(report, options.rates, options.plot)

    return finish_run("bench_link", lambda: run(options), draw_rates)


if __name__ == "__main__":
    sys.exit(main())
