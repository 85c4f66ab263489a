"""Train a small model with a hook under PyTorch's profiler, and look at one step.

Two ranks train with DDP through Gloo. Afterwards there is a trace of rank 0 for
https://ui.perfetto.dev, and a picture of what the hook has done in it:

    python examples/profile_training.py trace.json --picture profile.png
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile, record_function

from torch_commhook import attach, hooks

RANKS = 2
COLORS = {"encode": "tab:orange", "wire": "tab:green", "decode": "tab:blue"}


def train(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=2)
    attach(model, hooks.error_feedback(hooks.blockwise(bits=4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        with record_function("forward"):
            loss = model(torch.randn(options.batch, 512)).square().mean()
        with record_function("backward"):
            loss.backward()
        optimizer.step()

    for _ in range(5):  # DDP forms its buckets anew after the first
        step()
    with profile() as profiler:
        step()
    if rank == 0:
        profiler.export_chrome_trace(str(options.trace))
    dist.destroy_process_group()


def spans_of(trace: Path) -> list[dict[str, Any]]:
    """The spans of the training and of the hook, in order; times in milliseconds from the first."""
    events = json.loads(trace.read_text())["traceEvents"]
    found = []
    for event in events:
        named = re.match(r"commhook::(\w+) \(bucket (\d+)", event["name"])
        if event.get("cat") != "user_annotation" or not (
            named or event["name"] in ("forward", "backward")
        ):
            continue
        stage, bucket = named.groups() if named else (event["name"], "")
        begin, end = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
        found.append(
            {"stage": stage, "bucket": bucket, "begin": begin, "end": end, "tid": event["tid"]}
        )
    found.sort(key=lambda span: span["begin"])
    start = found[0]["begin"]
    for span in found:
        span["begin"] -= start
        span["end"] -= start
    return found


def rows_of(spans: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Spans by row: those of one row do not overlap, but for forward and backward around others."""
    main = next(span["tid"] for span in spans if span["stage"] == "backward")
    rows: dict[str, list[dict[str, Any]]] = {}
    for span in spans:
        kind = "wire" if span["stage"] == "wire" else "other threads"
        if span["tid"] == main and span["stage"] != "wire":
            rows.setdefault("thread of backward()", []).append(span)
            continue
        number = 1
        while any(one["end"] > span["begin"] for one in rows.get(f"{kind} {number}", [])):
            number += 1
        rows.setdefault(f"{kind} {number}", []).append(span)
    return dict(sorted(rows.items(), key=lambda row: ("thread other wire".find(row[0][:4]), row)))


def draw(trace: Path, picture: Path) -> None:
    """A row for each thread, and for each message of those that are on their way at once."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = rows_of(spans_of(trace))
    figure = Figure(figsize=(9, 1.2 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row, spans in enumerate(rows.values()):
        for span in spans:
            left, width = span["begin"], span["end"] - span["begin"]
            is_around = span["stage"] not in COLORS
            axes.barh(
                row,
                width,
                height=0.9 if is_around else 0.6,
                left=left,
                color=COLORS.get(span["stage"], "0.88"),
                edgecolor="white",
                linewidth=0.5,
            )
            if is_around:
                axes.text(left + width / 2, row - 0.38, span["stage"], ha="center", fontsize=7)
            else:
                axes.text(left + width / 2, row, span["bucket"], ha="center", va="center", size=7)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("ms; a number is that of a bucket")
    legend = [Patch(color=color, label=f"commhook::{stage}") for stage, color in COLORS.items()]
    figure.legend(handles=legend, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="the file to write")
    parser.add_argument("--picture", type=Path, help="a picture of it (matplotlib)")
    parser.add_argument("--batch", type=int, default=1024, help="samples of each rank")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(folder, options), nprocs=RANKS)
    if options.picture is not None:
        draw(options.trace, options.picture)


if __name__ == "__main__":
    main()
