"""Train a small model with a hook under PyTorch's profiler, and draw one step.

Two ranks train with DDP over Gloo. The script writes a trace of rank 0 for
https://ui.perfetto.dev, and a picture of the hook's spans in one step:

    python examples/profile_training.py trace.json --picture profile.png
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile, record_function

from torch_commhook import attach, hooks

RANKS = 2
MAIN = "thread of backward()"
COLORS = {"encode": "tab:orange", "wire": "tab:green", "decode": "tab:blue"}


def train(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    width = options.width
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=width * width * 4 / 2**20)
    attach(model, hooks.error_feedback(hooks.blockwise(bits=4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        with record_function("forward"):
            loss = model(torch.randn(options.batch, width)).square().mean()
        with record_function("backward"):
            loss.backward()
        optimizer.step()

    for _ in range(3):  # DDP forms its buckets anew after the first
        step()
    with profile() as profiler:
        for _ in range(options.steps):
            with record_function("step"):
                step()
    if rank == 0:
        profiler.export_chrome_trace(str(options.trace))
    dist.destroy_process_group()


class Span(NamedTuple):
    """One stage of one bucket; times in milliseconds from the start of the step."""

    stage: str
    bucket: str
    begin: float
    end: float
    thread: int


def fastest_step(trace: Path) -> list[Span]:
    """The spans of the fastest step, in order."""
    events = json.loads(trace.read_text())["traceEvents"]
    events = [event for event in events if event.get("cat") == "user_annotation"]
    step = min((each for each in events if each["name"] == "step"), key=lambda each: each["dur"])
    found = []
    for event in events:
        begin = event["ts"] - step["ts"]
        named = re.match(r"commhook::(\w+) \(bucket (\d+)", event["name"])
        if 0 <= begin < step["dur"] and (named or event["name"] in ("forward", "backward")):
            stage, bucket = named.groups() if named else (event["name"], "")
            end = begin + event["dur"]
            found.append(Span(stage, bucket, begin / 1e3, end / 1e3, event["tid"]))
    return sorted(found, key=lambda span: span.begin)


def rows_of(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Spans by row. Only forward and backward overlap other spans of their row."""
    main = next(span.thread for span in spans if span.stage == "backward")
    rows: dict[str, list[Span]] = {MAIN: []}
    for kind in ("other threads", "wire"):
        for span in spans:
            if (span.stage == "wire") != (kind == "wire"):
                continue
            if kind != "wire" and span.thread == main:
                continue
            number = 1
            while any(one.end > span.begin for one in rows.get(f"{kind} {number}", [])):
                number += 1
            rows.setdefault(f"{kind} {number}", []).append(span)
    rows[MAIN] = [span for span in spans if span.thread == main and span.stage != "wire"]
    return rows


def draw(trace: Path, picture: Path) -> None:
    """Draw a row for the thread of backward(), and rows for the spans of other threads."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    spans = fastest_step(trace)
    rows = rows_of(spans)
    whole = max(span.end for span in spans)
    figure = Figure(figsize=(9, 1.2 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row, of_row in enumerate(rows.values()):
        for span in of_row:
            width = span.end - span.begin
            middle = span.begin + width / 2
            color = COLORS.get(span.stage)
            if color is None:  # forward and backward, behind other spans
                axes.barh(row, width, height=0.9, left=span.begin, color="0.9", edgecolor="white")
                axes.text(middle, row - 0.36, span.stage, ha="center", va="center", fontsize=7)
                continue
            axes.barh(row, width, height=0.5, left=span.begin, color=color, zorder=2)
            if width > whole / 140:  # wide enough for the text
                axes.text(middle, row, span.bucket, ha="center", va="center", color="white", size=7)
    names = [n if n.replace(" 1", " 2") in rows else n.removesuffix(" 1") for n in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_xlim(0, whole * 1.01)
    axes.invert_yaxis()
    axes.set_xlabel("ms; a number is that of a bucket")
    legend = [Patch(color=color, label=f"commhook::{stage}") for stage, color in COLORS.items()]
    figure.legend(handles=legend, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="the file to write")
    parser.add_argument("--picture", type=Path, help="a picture of the fastest step (matplotlib)")
    parser.add_argument("--width", type=int, default=2048, help="of each of four layers")
    parser.add_argument("--batch", type=int, default=16, help="samples of each rank")
    parser.add_argument("--steps", type=int, default=20, help="in the profile")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(folder, options), nprocs=RANKS)
    if options.picture is not None:
        draw(options.trace, options.picture)


if __name__ == "__main__":
    main()
