"""Measures the time to plain DDP's loss after 1,000 steps, over a slow and distant link.

``python benchmarks/bench_wan.py --help`` shows the options; see benchmarks/README.md. Each run is
stored when it ends. A stored run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab_bench import (
    check_hooks,
    congestion_control,
    delay_argument,
    finish,
    format_link,
    rate_argument,
    run_ranks,
)
from link_rank import PYTORCH
from machine import FOLDER, as_lines, environment
from netlab import Lab, parse_rate
from pictures import PLAIN_STYLE, legend_below, new_figure, save, styles
from step_alone import step_alone
from wan_rank import TORCHFT, Plan

from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.hooks.expressions import NO_HOOK

RESULTS = FOLDER / "results" / "bench_wan.json"
PICTURE = FOLDER.parent / "docs" / "images" / "wan.png"
HOSTS = 2
BASELINE = "DDP"
_CODEC = "error_feedback(blockwise(bits=4))"
STREAMED = f"local_sgd(10, delay=8, mix=0.5, hook={_CODEC})"
WAYS = (NO_HOOK, "pytorch-powersgd", _CODEC, *TORCHFT, f"local_sgd(10, hook={_CODEC})", STREAMED)
#: The rounds of all ways end after multiples of this many steps.
_ROUND = 30
#: The most time, as a share of DDP's time to its last loss.
AT_MOST = {STREAMED: 0.10}
_TIMEOUT = 4 * 3600.0


def steps_of(way: str, options: argparse.Namespace) -> int:
    """The steps of a way: with exchanges of parameters, a step learns less and is faster."""
    if way == NO_HOOK:
        return int(options.steps)
    is_local = way in TORCHFT or way.startswith("local_sgd(")
    more = options.more_local_steps if is_local else options.more_steps
    return round(options.steps * more / _ROUND) * _ROUND


def plans_of(options: argparse.Namespace) -> list[Plan]:
    """All runs, seed by seed."""
    return [
        Plan(
            way=way,
            every=options.every,
            layers=options.layers,
            dim=options.dim,
            seq=128,
            batch=options.batch,
            steps=steps_of(way, options),
            seed=seed,
        )
        for seed in options.seeds
        for way in options.ways
    ]


def run_plan(plan: Plan, rate: int, delay: float) -> dict[str, Any]:
    """Train over a link; returns a dict with the fields of ``wan_rank.Figures``."""
    with tempfile.TemporaryDirectory() as name, Lab(HOSTS, rate, delay=delay) as lab:
        found: dict[str, Any] = run_ranks(
            lab, Path(name), "wan_rank.py", plan, timeout=_TIMEOUT, grace=30.0
        )
        return found


def seconds_to(run: dict[str, Any], loss: float) -> float | None:
    """The time at which a run first had this held-out loss; None if never."""
    for seconds, own in zip(run["seconds"], run["losses"], strict=True):
        if own <= loss:
            return float(seconds)
    return None


def table(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each way, the time to DDP's last loss, over the seeds that DDP has had too."""
    plain = {run["seed"]: run for run in runs if run["way"] == NO_HOOK}
    rows = []
    for way in dict.fromkeys(run["way"] for run in runs):
        own = [run for run in runs if run["way"] == way and run["seed"] in plain]
        if not own:
            continue
        times, ratios = [], []
        for run in own:
            beside = plain[run["seed"]]
            loss = beside["losses"][-1]
            took, by_ddp = seconds_to(run, loss), seconds_to(beside, loss)
            if took is not None and by_ddp is not None:
                times.append(took)
                ratios.append(took / by_ddp)
        rows.append(
            {
                "way": BASELINE if way == NO_HOOK else way,
                "seeds": len(own),
                "reached": len(times),
                "seconds": statistics.median(times) if times else None,
                "ratio": statistics.median(ratios) if ratios else None,
                "at_most": AT_MOST.get(way),
                "last loss": statistics.fmean(run["losses"][-1] for run in own),
                "step ms": statistics.median(
                    1e3 * run["seconds"][-1] / run["steps"][-1] for run in own
                ),
                "MB a step": statistics.median(
                    run["link_bytes"] / run["steps"][-1] / 1e6 for run in own
                ),
            }
        )
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> bool:
    """Print the table; returns whether all targets are met."""
    columns = ["way", "reached", "seconds", "of DDP's", "target", "last loss", "step ms"]
    print(f"| {' | '.join([*columns, 'MB a step'])} |")
    print("|---" * (len(columns) + 1) + "|")
    held = True
    for row in rows:
        whole = row["reached"] == row["seeds"]
        target = ""
        if row["at_most"] is not None:
            good = whole and row["ratio"] <= row["at_most"]
            held = held and good
            target = f"<= {row['at_most']:.2f} {'ok' if good else 'MISSED'}"
        took = ["never", ""]
        if row["seconds"] is not None:
            took = [f"{row['seconds']:.0f}", f"{row['ratio']:.3f}"]
        cells = [f"`{row['way']}`", f"{row['reached']} of {row['seeds']}", *took, target]
        cells += [f"{row['last loss']:.4f}", f"{row['step ms']:.0f}", f"{row['MB a step']:.2f}"]
        print(f"| {' | '.join(cells)} |")
    return held


def draw(runs: Sequence[dict[str, Any]], link: str, path: Path) -> None:
    """Draws the held-out loss over time, for the first seed."""
    figure, axes = new_figure(8, 6)
    seed = min(run["seed"] for run in runs)
    first = [run for run in runs if run["seed"] == seed]
    own = iter(styles(len(first)))
    for run in first:
        plain = run["way"] == NO_HOOK
        label = BASELINE if plain else run["way"]
        style = PLAIN_STYLE if plain else next(own)
        axes.plot(run["seconds"], run["losses"], label=label, **style)
        if plain:
            last = f"the last loss of {BASELINE}"
            axes.axhline(run["losses"][-1], color="0.7", linewidth=0.8, label=last)
    axes.set(
        title=f"held-out loss over time, link of {link} each way",
        xlabel="seconds",
        ylabel="loss, nats per byte",
        xscale="log",
    )
    legend_below(figure, 2)
    save(figure, path)


def draw_stored() -> None:
    """Draw the picture of the documents again, from the stored runs over its link."""
    options = options_of([])
    runs = json.loads(RESULTS.read_text())["runs"]
    own = [run for run in runs if (run["rate"], run["delay"]) == (options.rate, options.delay)]
    draw(own, format_link(options.rate, options.delay), PICTURE)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--rate",
        type=rate_argument,
        default=parse_rate("200mbit"),
        help="rate of the link (default: 200mbit)",
    )
    add(
        "--delay",
        type=delay_argument,
        default=0.025,
        metavar="MS",
        help="delay of the link, each way (default: 25)",
    )
    add("--steps", type=int, default=1000, help="steps of DDP (default: 1000)")
    add(
        "--more-steps",
        type=float,
        default=1.2,
        metavar="X",
        help="steps of ways that send all gradients, as a multiple of DDP's (default: 1.2)",
    )
    add(
        "--more-local-steps",
        type=float,
        default=1.5,
        metavar="X",
        help="steps of ways that exchange parameters, as a multiple of DDP's (default: 1.5)",
    )
    add("--every", type=int, default=25, metavar="N", help="steps between losses (default: 25)")
    add("--layers", type=int, default=4, help="layers of the model (default: 4)")
    add("--dim", type=int, default=240, help="width of the model (default: 240)")
    add("--batch", type=int, default=1, help="sequences of each rank in a step (default: 1)")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add(
        "--ways", nargs="+", default=list(WAYS), metavar="WAY", help="the ways, or hook expressions"
    )
    add("--again", action="store_true", help="ignore stored runs")
    add("--out", type=Path, default=RESULTS, help="where to store the results as JSON")
    add("--picture", type=Path, default=PICTURE, help="where to draw the picture")
    parsed = parser.parse_args(arguments)
    for name in ("steps", "every", "layers", "dim", "batch"):
        if getattr(parsed, name) < 1:
            parser.error(f"argument --{name}: must be above 0")
    for name in ("more_steps", "more_local_steps"):
        more = getattr(parsed, name)
        if not 1 <= more <= 100 or parsed.steps * more < _ROUND:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"argument {option}: must be 1 to 100, and give {_ROUND} steps or more")
    if parsed.dim % (2 * TrainConfig().heads) != 0:
        parser.error(f"argument --dim: must be a multiple of {2 * TrainConfig().heads}")
    if NO_HOOK not in parsed.ways:
        parser.error(f"argument --ways: must have {NO_HOOK}, to compare with")
    hooks = [way for way in parsed.ways if way not in PYTORCH and way not in TORCHFT]
    check_hooks(parser, hooks, "--ways")
    return parsed


def store(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Write all runs, or leave the file unchanged."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(as_lines({"runs": runs}))
    part.replace(path)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run those that are not stored yet; returns all runs with these options."""
    runs: list[dict[str, Any]] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.out.exists() and not options.again:
        runs = json.loads(options.out.read_text())["runs"]
    found = []
    for plan in plans_of(options):
        key = {"plan": asdict(plan), "rate": options.rate, "delay": options.delay}
        same = [run for run in runs if all(run[k] == v for k, v in key.items())]
        if same:
            found.append(same[0])
            continue
        where = {**environment("cpu"), "congestion_control": congestion_control()}
        shape = {name: getattr(plan, name) for name in ("layers", "dim", "seq")}
        step, copies = step_alone(shape, plan.batch)
        figures = run_plan(plan, options.rate, options.delay)
        figures |= {"compute_seconds": step, "copy_seconds": copies}
        own = {"way": plan.way, "seed": plan.seed, **key, "environment": where, **figures}
        runs.append(own)
        found.append(own)
        store(options.out, runs)
        last = f"{figures['losses'][-1]:.4f} after {figures['seconds'][-1]:.0f} s"
        print(f"{plan.way}, seed {plan.seed}: {last}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)

    def then(runs: list[dict[str, Any]]) -> int:
        draw(runs, format_link(options.rate, options.delay), options.picture)
        return 0 if print_table(table(runs)) else 1

    return finish("bench_wan", lambda: run(options), then)


if __name__ == "__main__":
    sys.exit(main())
