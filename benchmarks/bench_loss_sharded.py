"""Measures the loss with compression on sharded models: ``train --parallel``, several seeds.

``python benchmarks/bench_loss_sharded.py --help`` shows the options; see benchmarks/README.md. A
run takes minutes, so each is stored when it ends. A stored run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench_loss import PLAIN, print_table, train
from machine import FOLDER, as_lines, environment

RESULTS = FOLDER / "results" / "bench_loss_sharded.json"
RANKS = 4
#: Its 3.3 million parameters can train on four ranks that share two processors.
MODEL = {"layers": 4, "dim": 256, "heads": 4, "seq": 128}


class Job(NamedTuple):
    """A way to train.

    Attributes:
        parallel: ``fsdp``, or ``hsdp`` with two replicas.
        hook: the hook's expression.
        shard_hook: the hook of the reduce-scatters, in ``hsdp``.
        weights: the codec of the all-gathers.
    """

    parallel: str
    hook: str = PLAIN
    shard_hook: str | None = None
    weights: str | None = None

    @property
    def name(self) -> str:
        """The name in tables."""
        more = {"shard_hook": self.shard_hook, "weights": self.weights}
        named = [f"{name}={value}" for name, value in more.items() if value is not None]
        return ", ".join([f"{self.parallel}: {self.hook}", *named])

    @property
    def options(self) -> list[str]:
        """The options of ``train``, without the hook."""
        options = ["--parallel", self.parallel, "--ranks", str(RANKS)]
        for name, value in (("--shard-hook", self.shard_hook), ("--weights", self.weights)):
            if value is not None:
                options += [name, value]
        return options


_INT8 = "blockwise()"
#: Jobs, and the most loss relative to the same sharding without compression.
JOBS: dict[Job, float | None] = {
    Job("fsdp"): None,
    Job("fsdp", _INT8, weights=_INT8): 1.01,
    Job("hsdp"): None,
    Job("hsdp", _INT8, shard_hook=_INT8, weights=_INT8): 1.01,
    Job("hsdp", "error_feedback(blockwise(bits=4))"): 1.01,
}


def table(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each job, its mean loss over the seeds that the plain job has too, and the ratio."""
    found = {(run["job"], run["seed"]): run for run in runs}
    rows = []
    for job, at_most in JOBS.items():
        plain = Job(job.parallel).name
        pairs = [
            (run, found[plain, seed])
            for (name, seed), run in found.items()
            if name == job.name and (plain, seed) in found
        ]
        if not pairs:
            continue
        own = statistics.fmean(run["loss"] for run, _ in pairs)
        other = statistics.fmean(beside["loss"] for _, beside in pairs)
        row: dict[str, Any] = {"job": job.name, "seeds": len(pairs), "loss": own}
        row["held_out_loss"] = statistics.fmean(run["held_out_loss"] for run, _ in pairs)
        rows.append({**row, "ratio": own / other, "at_most": at_most})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=1, help="sequences of each rank in a step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--again", action="store_true", help="ignore stored runs")
    options = parser.parse_args()
    stored: dict[str, Any] = {"environment": environment("cpu"), "runs": []}
    if RESULTS.exists() and not options.again:
        stored["runs"] = json.loads(RESULTS.read_text())["runs"]
    size = {"steps": options.steps, "batch": options.batch, "model": MODEL}
    shape = [text for name, number in MODEL.items() for text in (f"--{name}", str(number))]
    for seed in options.seeds:
        for job in JOBS:
            named = {"job": job.name, "seed": seed, **size}
            if any(named.items() <= run.items() for run in stored["runs"]):
                continue
            more = [*job.options, *shape]
            run = {**named, **train(job.hook, seed, options.steps, options.batch, more)}
            print(f"{job.name}, seed {seed}: {run['loss']:.4f}", flush=True)
            stored["runs"].append(run)
            RESULTS.write_text(as_lines(stored))
    runs = [run for run in stored["runs"] if size.items() <= run.items()]
    return 0 if print_table(table(runs), "job") else 1


if __name__ == "__main__":
    sys.exit(main())
