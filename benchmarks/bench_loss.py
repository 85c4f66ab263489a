"""Measures the loss with compression: ``train`` with each hook and without, over several seeds.

``python benchmarks/bench_loss.py --help`` shows the options; see benchmarks/README.md. A run takes
minutes, so each is stored when it ends. A stored run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import FOLDER, as_lines, environment
from pictures import PLAIN_STYLE, legend_below, new_figure, save, styles_over_each_other

from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.hooks.expressions import parse_hook

RESULTS = FOLDER / "results" / "bench_loss.json"
PICTURES = FOLDER.parent / "docs" / "images"
LINK_RESULTS = FOLDER / "results" / "bench_link.json"

PLAIN = "allreduce()"
#: The steps at four bits before a codec that sends less.
_FIRST = 400


def _of_updates(hook: str) -> str:
    return f"local_sgd(1, outer=outer_sgd(1.0, 0.0), hook={hook}, error_reset=True)"


def _in_phases(codec: str) -> tuple[str, tuple[str, str]]:
    """A hook of AdamW's updates (docs/local_sgd.md), and its codec in each phase."""
    before, hook = "error_feedback(blockwise(bits=4))", f"error_feedback({codec})"
    whole = f"after({_FIRST}, {hook}, before={before})"
    return _of_updates(whole), (_of_updates(before), _of_updates(hook))


#: Hooks that change after ``_FIRST`` steps, with the codecs before and after that.
PHASES = dict(_in_phases(codec) for codec in ("topk(0.01)", "powersgd(rank=2)"))
#: Hooks, and the most loss relative to that without compression; None: only shown.
AT_MOST: dict[str, float | None] = {
    "cast()": 1.01,
    "blockwise()": 1.01,
    "error_feedback(blockwise(bits=4))": 1.03,
    **dict.fromkeys(PHASES, 1.03),
    "local_sgd(1, outer=outer_sgd(1.0, 0.0))": None,
    "error_feedback(topk(0.01))": None,
    "error_feedback(powersgd(rank=2))": None,
}
#: Steps between two points of a curve; each is the mean since the one before.
_STRIDE = 20


def train(
    hook: str, seed: int, steps: int, batch: int, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Runs ``train`` once, with more options; returns losses and bytes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch_commhook", "train", "--hook", hook]
        command += ["--seed", str(seed), "--steps", str(steps), "--batch", str(batch)]
        command += [*options, "--out", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=FOLDER.parent)
        summary = json.loads((Path(folder) / "summary.json").read_text())
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
    losses = [line["loss"] for line in lines]
    last = losses[-max(1, steps // 20) :]
    return {
        "hook": hook,
        "seed": seed,
        "steps": steps,
        "batch": batch,
        "bucket_cap_mb": list(TrainConfig().bucket_cap_mb),
        "loss": statistics.fmean(last),
        "held_out_loss": summary["runs"][0]["held_out_loss"],
        "bytes_per_step": lines[-1]["bytes_sent"] / steps,
        "bytes_sent": [line["bytes_sent"] for line in lines[_STRIDE - 1 :: _STRIDE]],
        "curve": [
            round(statistics.fmean(losses[i : i + _STRIDE]), 5)
            for i in range(0, len(losses), _STRIDE)
        ],
    }


def has_buckets_of_train(run: dict[str, Any]) -> bool:
    """Whether a run's buckets are those that ``train`` has today."""
    hook = parse_hook(run["hook"])
    depends = hook is not None and hook.is_lossy
    return not depends or run["bucket_cap_mb"] == list(TrainConfig().bucket_cap_mb)


def table(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each hook, its mean loss over the seeds that the plain runs have too, and the ratio."""
    plain = {run["seed"]: run for run in runs if run["hook"] == PLAIN}
    rows = []
    for hook in [PLAIN, *AT_MOST]:
        pairs = [
            (run, plain[run["seed"]])
            for run in runs
            if run["hook"] == hook and run["seed"] in plain
        ]
        if not pairs:
            continue
        own = statistics.fmean(run["loss"] for run, _ in pairs)
        other = statistics.fmean(beside["loss"] for _, beside in pairs)
        rows.append(
            {
                "hook": hook,
                "seeds": len(pairs),
                "loss": own,
                "held_out_loss": statistics.fmean(run["held_out_loss"] for run, _ in pairs),
                "ratio": own / other,
                "at_most": AT_MOST.get(hook),
                "MB per step": pairs[0][0]["bytes_per_step"] / 1e6,
            }
        )
    return rows


def print_table(rows: Sequence[dict[str, Any]], what: str = "hook") -> bool:
    """Print the table with ``what`` as the first column; returns whether all targets are met."""
    columns = [what, "seeds", "loss", "held-out", "ratio", "target"]
    more = "MB per step"
    columns += ["MB sent per step"] * any(more in row for row in rows)
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    held = True
    for row in rows:
        target = ""
        if row["at_most"] is not None:
            good = row["ratio"] <= row["at_most"]
            held = held and good
            target = f"<= {row['at_most']:.2f} {'ok' if good else 'MISSED'}"
        cells = [f"`{row[what]}`", str(row["seeds"]), f"{row['loss']:.4f}"]
        cells += [f"{row['held_out_loss']:.4f}", f"{row['ratio']:.4f}", target]
        if more in row:
            cells.append(f"{row[more]:.2f}")
        print(f"| {' | '.join(cells)} |")
    return held


def draw(runs: Sequence[dict[str, Any]]) -> None:
    """Draws the loss over the sent bytes, and over the time on a link, for the first seed."""
    seed = min(run["seed"] for run in runs)
    own = [run for run in runs if run["seed"] == seed and run["hook"] in (PLAIN, *AT_MOST)]
    sent = [[sent / 1e6 for sent in run["bytes_sent"]] for run in own]
    _curves(own, sent, "MB sent by a rank", PICTURES / "loss_over_bytes.png")
    seconds = _step_seconds()
    timed = [run for run in own if all(phase in seconds for phase in _phases(run["hook"]))]
    passed = [_times(run, seconds) for run in timed]
    if timed:
        _curves(timed, passed, "seconds at 200 Mbit/s", PICTURES / "loss_over_time.png")


def _phases(hook: str) -> tuple[str, str]:
    return PHASES.get(hook, (hook, hook))


def _times(run: dict[str, Any], seconds: dict[str, float]) -> list[float]:
    """The times of the points of a run's curve."""
    first, then = (seconds[phase] for phase in _phases(run["hook"]))
    steps = [_STRIDE * (i + 1) for i in range(len(run["curve"]))]
    return [first * min(step, _FIRST) + then * max(step - _FIRST, 0) for step in steps]


def _curves(
    runs: Sequence[dict[str, Any]], places: Sequence[list[float]], what: str, path: Path
) -> None:
    figure, axes = new_figure(8, 7)
    own = iter(styles_over_each_other(len(runs)))
    for run, where in zip(runs, places, strict=True):
        style = PLAIN_STYLE if run["hook"] == PLAIN else next(own)
        axes.plot(where, run["curve"][: len(where)], label=run["hook"], **style)
    axes.set(xlabel=what, ylabel="loss, nats per byte", xscale="log")
    axes.set_title(f"loss of training over {what}")
    legend_below(figure, 1)
    save(figure, path)


def _step_seconds() -> dict[str, float]:
    """Step times of ``bench_link`` at 200 Mbit/s, with the first buckets that it tried."""
    if not LINK_RESULTS.exists():
        return {}
    rows = json.loads(LINK_RESULTS.read_text())["rows"]
    slow = [row for row in rows if row["group"].startswith("200mbit")]
    return {row["job"]: row["seconds"] for row in reversed(slow)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=2, help="sequences of each rank in a step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--hooks", nargs="+", default=[PLAIN, *AT_MOST], metavar="HOOK")
    parser.add_argument("--again", action="store_true", help="ignore stored runs")
    options = parser.parse_args()
    stored: dict[str, Any] = {"environment": environment("cpu"), "runs": []}
    if RESULTS.exists() and not options.again:
        stored["runs"] = json.loads(RESULTS.read_text())["runs"]
    same = (options.steps, options.batch)
    done = {
        (run["hook"], run["seed"])
        for run in stored["runs"]
        if (run["steps"], run["batch"]) == same and has_buckets_of_train(run)
    }
    for seed in options.seeds:
        for hook in options.hooks:
            if (hook, seed) in done:
                continue
            run = train(hook, seed, *same)
            print(f"{hook}, seed {seed}: {run['loss']:.4f}", flush=True)
            key = (hook, seed, *same)
            stored["runs"] = [
                old
                for old in stored["runs"]
                if (old["hook"], old["seed"], old["steps"], old["batch"]) != key
            ]
            stored["runs"].append(run)
            RESULTS.write_text(as_lines(stored))
    runs = [run for run in stored["runs"] if (run["steps"], run["batch"]) == same]
    draw(runs)
    return 0 if print_table(table(runs)) else 1


if __name__ == "__main__":
    sys.exit(main())
