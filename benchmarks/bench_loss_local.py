"""Measures the loss with compression in ``local_sgd``: ranks exchange once in H steps.

``python benchmarks/bench_loss_local.py --help`` shows the options; see benchmarks/README.md. A run
takes a minute, so each is stored when it ends. A stored run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench_loss import train
from machine import FOLDER, as_lines, environment

RESULTS = FOLDER / "results" / "bench_loss_local.json"
#: With 0.46 million parameters, a minute has many rounds.
MODEL = {"layers": 2, "dim": 128, "heads": 4, "seq": 64}
#: Steps from one exchange to the next.
ROUNDS = (15, 30)

_MEAN = "outer=outer_sgd(1.0, 0.0)"


class Job(NamedTuple):
    """A way to exchange.

    Attributes:
        arguments: the arguments of ``local_sgd`` after ``H``.
        at_most: the greatest ratio of its held-out loss to the plain job's; None: no target.
        only_at_the_end: whether its only exchange is after the last step.
    """

    arguments: str
    at_most: float | None = None
    only_at_the_end: bool = False

    def hook(self, H: int, steps: int) -> str:  # noqa: N803
        """The expression for a run of so many steps."""
        every = steps if self.only_at_the_end else H
        return f"local_sgd({every}, {self.arguments})"


def _with(hook: str, more: str = "") -> str:
    return f"{_MEAN}, hook={hook}{more}"


PLAIN = Job(_MEAN)
JOBS = (
    PLAIN,
    Job(_with("error_feedback(blockwise(bits=2))")),
    Job(_with("error_feedback(chunk_topk(256))")),
    Job(_with("error_feedback(chunk_topk(64))")),
    Job(_with("error_feedback(chunk_topk(64), decay=0.95)")),
    Job(_with("error_feedback(blockwise(bits=2))", ", error_reset=True"), 1.01),
    Job(_with("error_feedback(chunk_topk(256))", ", error_reset=True"), 1.01),
    Job(_with("error_feedback(chunk_topk(64))", ", error_reset=True")),
    Job(_MEAN, only_at_the_end=True),
)


def table(runs: Sequence[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """For each H and job, the mean loss over the seeds that the plain job has, and the ratio.

    Args:
        runs: runs of ``steps`` steps.
        steps: the length of the runs.
    """
    found = {(run["hook"], run["seed"]): run for run in runs}
    rows = []
    for H in ROUNDS:  # noqa: N806
        plain = PLAIN.hook(H, steps)
        for job in JOBS:
            hook = job.hook(H, steps)
            pairs = [
                (run, found[plain, seed])
                for (name, seed), run in found.items()
                if name == hook and (plain, seed) in found
            ]
            if not pairs:
                continue
            losses = [run["held_out_loss"] for run, _ in pairs]
            others = [beside["held_out_loss"] for _, beside in pairs]
            ratios = [own / other for own, other in zip(losses, others, strict=True)]
            rows.append(
                {
                    "H": H,
                    "hook": hook,
                    "seeds": len(pairs),
                    "bytes per round": round(
                        pairs[0][0]["bytes_per_step"] * (steps if job.only_at_the_end else H)
                    ),
                    "held_out_loss": statistics.fmean(losses),
                    "ratio": statistics.fmean(losses) / statistics.fmean(others),
                    "range": (min(ratios), max(ratios)),
                    "at_most": job.at_most,
                }
            )
    return rows


def holds(row: dict[str, Any]) -> bool:
    """Whether a row of :func:`table` meets its target."""
    return row["at_most"] is None or row["ratio"] <= row["at_most"]


def cells(row: dict[str, Any]) -> list[str]:
    """A row of :func:`table` as text, below ``HEADER``."""
    least, most = (f"{100 * (ratio - 1):+.1f}" for ratio in row["range"])
    target = "" if row["at_most"] is None else f"at most {100 * (row['at_most'] - 1):+.1f} %"
    return [
        str(row["H"]),
        f"`{row['hook']}`",
        str(row["seeds"]),
        f"{row['bytes per round']:,}",
        f"{row['held_out_loss']:.4f}",
        f"{100 * (row['ratio'] - 1):+.1f} %",
        f"{least} to {most} %",
        target + ("" if holds(row) else ", **missed**"),
    ]


HEADER = ("H", "hook", "seeds", "bytes a round", "held-out loss", "to plain", "of seeds", "target")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1800, help="a multiple of 30")
    parser.add_argument("--batch", type=int, default=4, help="sequences of each rank in a step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--only", metavar="TEXT", help="only hooks with this text, and the plain ones"
    )
    parser.add_argument("--again", action="store_true", help="ignore stored runs")
    options = parser.parse_args()
    if options.steps < 1 or options.steps % max(ROUNDS):
        parser.error(f"argument --steps: must be a multiple of {max(ROUNDS)}, got {options.steps}")
    stored: dict[str, Any] = {"environment": environment("cpu"), "runs": []}
    if RESULTS.exists() and not options.again:
        stored["runs"] = json.loads(RESULTS.read_text())["runs"]
    size = {"steps": options.steps, "batch": options.batch, "model": MODEL}
    shape = [text for name, number in MODEL.items() for text in (f"--{name}", str(number))]
    jobs = [job for job in JOBS if job is PLAIN or (options.only or "") in job.arguments]
    hooks = dict.fromkeys(job.hook(H, options.steps) for H in ROUNDS for job in jobs)
    for seed in options.seeds:
        for hook in hooks:
            named = {"hook": hook, "seed": seed, **size}
            if any(named.items() <= run.items() for run in stored["runs"]):
                continue
            run = {**train(hook, seed, options.steps, options.batch, shape), **named}
            print(f"{hook}, seed {seed}: {run['held_out_loss']:.4f}", flush=True)
            stored["runs"].append(run)
            RESULTS.write_text(as_lines(stored))
    rows = table([run for run in stored["runs"] if size.items() <= run.items()], options.steps)
    for line in (HEADER, ["---"] * len(HEADER), *map(cells, rows)):
        print(f"| {' | '.join(line)} |")
    return 0 if all(map(holds, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
