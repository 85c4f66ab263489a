"""Measures a step of sharded models with shards or replicas on distant hosts.

``python benchmarks/bench_sharded.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import MIN_ROUNDS, Against, Job, Report, Samples, parse, parser
from lab_bench import (
    congestion_control,
    delay_argument,
    finish_run,
    format_link,
    rate_argument,
    run_ranks,
    use_one_thread,
)
from machine import FOLDER
from netlab import Lab, parse_rate
from sharded_rank import ALONE, BFLOAT16, FLOAT32, WEIGHTS, Plan

RANKS = 4
INT8 = f"blockwise(){WEIGHTS}blockwise()"
INT4 = "error_feedback(blockwise(bits=4))"
#: Hosts, replicas of the model, jobs, and the most time relative to the first or second job.
SETTINGS: dict[str, tuple[int, int, list[str], dict[tuple[str, str], float]]] = {
    "fsdp": (
        4,
        1,
        [FLOAT32, BFLOAT16, "allreduce()", "cast()", "blockwise()", INT8],
        {(INT8, FLOAT32): 0.30, (INT8, BFLOAT16): 0.55},
    ),
    "hsdp": (
        2,
        2,
        [FLOAT32, BFLOAT16, "allreduce()", "cast()", "blockwise()", INT4],
        {(INT4, FLOAT32): 0.25},
    ),
}
PICTURE = FOLDER.parent / "docs" / "images" / "sharded.png"


def measure(plan: Plan, hosts: int, options: argparse.Namespace) -> dict[str, Samples]:
    """Run the ranks; returns samples by job.

    Raises:
        LabError: this machine cannot make hosts, or a rank has failed and has printed the reason.
    """
    with (
        tempfile.TemporaryDirectory() as name,
        Lab(hosts, options.rate, delay=options.delay) as lab,
    ):
        figures = run_ranks(
            lab,
            Path(name),
            "sharded_rank.py",
            plan,
            ranks_per_host=RANKS // hosts,
            timeout=options.timeout,
        )
    found = {}
    for job, each in figures.items():
        steps = len(each["seconds"])
        megabytes = each["link_bytes"] / steps / 1e6
        details = {"link MB": megabytes, "wire ms": megabytes * 8e9 / options.rate}
        found[job] = Samples(seconds=each["seconds"], details=details)
    return found


def jobs_of(
    names: Sequence[str], targets: dict[tuple[str, str], float], baseline: str
) -> list[Job]:
    """The jobs of a table, with their baselines."""
    jobs = []
    for name in names:
        against = None
        if name != baseline:
            against = Against(baseline, at_most=targets.get((name, baseline)), times=True)
        jobs.append(Job(name, lambda: None, against=against))
    return jobs


def run(options: argparse.Namespace) -> Report:
    torch.set_num_threads(1)  # like each rank; rows record it
    report = Report("bench_sharded", options)
    report.environment["congestion_control"] = congestion_control()
    for name in options.settings:
        hosts, replicas, names, targets = SETTINGS[name]
        plan = Plan(
            jobs=[ALONE, *names],
            replicas=replicas,
            batch=options.batch,
            seq=options.seq,
            steps=options.steps,
            rounds=options.rounds,
            least_rounds=min(options.rounds, MIN_ROUNDS),
            seconds=options.seconds,
            warm_up=options.warm_up,
        )
        samples = measure(plan, hosts, options)
        where = f"{name}: {hosts} hosts, {RANKS} ranks, {format_link(options.rate, options.delay)}"
        work = f"batches of {options.batch} sequences of {options.seq} bytes"
        for baseline in (FLOAT32, BFLOAT16):
            title = f"step, {where}, one thread each, {work}; beside {baseline}"
            jobs = jobs_of([ALONE, *names], targets, baseline)
            report.add(f"{name} beside {baseline}", jobs, samples, title)
    return report


def draw(report: Report, path: Path) -> None:
    """Draws the steps' times, with a group of bars for each setting."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found: dict[str, dict[str, float]] = {}
    for row in report.rows:
        setting, _, baseline = row.group.partition(" beside ")
        if baseline == FLOAT32:
            found.setdefault(setting, {})[row.job] = row.seconds
    figure = Figure(figsize=(9, 2.2 + 1.4 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)  # pyplot would look for a display
    panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    words = {
        "fsdp": "four hosts: gradients and parameters travel",
        "hsdp": "two hosts of two ranks: gradients travel between replicas",
    }
    for axes, (setting, times) in zip(panels, found.items(), strict=True):
        jobs = list(reversed(times))
        colors = ["0.6" if job in (ALONE, FLOAT32, BFLOAT16) else "tab:blue" for job in jobs]
        bars = axes.barh(jobs, [times[job] for job in jobs], color=colors)
        axes.bar_label(bars, fmt="%.2f s", padding=3, fontsize="small")
        axes.set(title=words.get(setting, setting), xlabel="step (s)")
        axes.margins(x=0.12)
        axes.grid(alpha=0.3, axis="x")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with all checks that need no hosts."""
    options = parser(__doc__.splitlines()[0])
    options.set_defaults(rounds=5, seconds=300.0)
    add = options.add_argument
    add(
        "--rate",
        type=rate_argument,
        default=parse_rate("200mbit"),
        help="rate of the links (200mbit)",
    )
    add(
        "--delay",
        type=delay_argument,
        metavar="MS",
        help="delay of the links, each way (default: none)",
    )
    add("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    add("--batch", type=int, default=1, help="sequences of each rank in a step (default: 1)")
    add("--seq", type=int, default=64, help="bytes of a sequence (default: 64)")
    add(
        "--steps",
        type=int,
        default=3,
        help="timed steps in each job's turn of a round (default: 3)",
    )
    add("--warm-up", type=int, default=2, help="steps at the beginning of a turn (default: 2)")
    add(
        "--timeout",
        type=float,
        default=3600.0,
        help="limit for the ranks, in seconds (default: 3600)",
    )
    add("--plot", type=Path, metavar="FILE", help="where to draw the times")
    parsed = parse(options, arguments)
    use_one_thread(options, parsed)
    if min(parsed.batch, parsed.seq, parsed.steps, parsed.warm_up) < 1:
        options.error("--batch, --seq, --steps and --warm-up must be above 0")
    if parsed.quick:
        parsed.steps, parsed.rounds = 1, 2
    elif parsed.plot is None and parsed.out is None and parsed.delay is None:
        parsed.plot = PICTURE
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)

    def draw_bars(report: Report) -> None:
        if options.plot is not None:
            draw(report, options.plot)

    return finish_run("bench_sharded", lambda: run(options), draw_bars)


if __name__ == "__main__":
    sys.exit(main())
