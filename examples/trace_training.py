"""Train a small model over a simulated link of 200 Mbit/s, and record its collectives.

Two ranks train with DDP over Gloo. A ThrottledProcessGroup delays each collective as the link
would, and a RecordingProcessGroup around it records the operations. The script prints a table, and
writes a trace for https://ui.perfetto.dev and a picture of it:

    python examples/trace_training.py trace.json --picture trace.png

With ``--codec bfloat16`` the gradients travel in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook.process_group import (
    CompressedProcessGroup,
    RecordingProcessGroup,
    ThrottledProcessGroup,
    merge_traces,
    register,
)

RANKS = 2
#: Of each rank's bars: light, so that black text on them can be read.
COLORS = ("#9ecae1", "#fdc086")


def train(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    link = ThrottledProcessGroup(
        dist.group.WORLD, bandwidth=options.mbit_per_s * 1e6, latency=options.latency_ms * 1e-3
    )
    recording = RecordingProcessGroup(link)
    group: Any = recording
    if options.codec is not None:
        group = CompressedProcessGroup(recording, getattr(torch, options.codec))
    register(group, "recorded")
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = DDP(nn.Sequential(*layers), process_group=group, bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(options.steps):
        if step == 1:
            recording.clear()  # the first step has only one bucket
        optimizer.zero_grad()
        model(torch.randn(256, 512)).square().mean().backward()
        optimizer.step()
    recording.save_trace(f"{folder}/{rank}.json")
    if rank == 0:
        print(recording.summary())
    dist.destroy_process_group(group)
    dist.destroy_process_group()


def draw(trace: Path, picture: Path, title: str) -> None:
    """Draw a row for each lane of each rank, and a bar for each operation."""
    from matplotlib.figure import Figure

    events = [event for event in json.loads(trace.read_text())["traceEvents"] if "dur" in event]
    rows = sorted({(event["pid"], event["tid"]) for event in events}, reverse=True)
    start = min(event["ts"] for event in events)
    whole = (max(event["ts"] + event["dur"] for event in events) - start) / 1e3
    figure = Figure(figsize=(9, 1.0 + 0.55 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for event in events:
        row = rows.index((event["pid"], event["tid"]))
        left, width = (event["ts"] - start) / 1e3, event["dur"] / 1e3
        color = COLORS[event["pid"] % len(COLORS)]
        axes.barh(row, width, left=left, color=color, edgecolor="0.3", linewidth=0.6)
        if width > whole / 8:  # wide enough for the text
            label = f"{event['name']}\n{event['args']['bytes'] / 1e6:.1f} MB"
            axes.text(left + width / 2, row, label, ha="center", va="center", fontsize=9)
    names = [f"rank {rank}, under way: {lane + 1}" for rank, lane in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_xlabel("time (ms)")
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="the file to write")
    parser.add_argument("--picture", type=Path, help="a picture of it (matplotlib)")
    parser.add_argument("--mbit-per-s", type=float, default=200.0)
    parser.add_argument("--latency-ms", type=float, default=0.5)
    parser.add_argument("--codec", choices=["bfloat16", "float16"])
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(folder, options), nprocs=RANKS)
        merge_traces([f"{folder}/{rank}.json" for rank in range(RANKS)], options.trace)
    if options.picture is not None:
        codec = "" if options.codec is None else f", in {options.codec}"
        title = f"all-reduces of two ranks over a link of {options.mbit_per_s:g} Mbit/s{codec}"
        draw(options.trace, options.picture, title)


if __name__ == "__main__":
    main()
