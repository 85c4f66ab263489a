"""Measures works on one bucket: the device's time, and the host's.

    python -m benchmarks.gpu.times --shapes 161x40704 --shards 8 --device cuda --record FILE

The device replays a CUDA graph, so that launches do not count. A work that no graph can capture is
queued behind a kernel that waits (``how`` says so). The host's time is for issuing the calls while
such a kernel keeps the device busy.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.machine import FOLDER

from .cases import COPY, Data, Work, copy, depends_on_shards, makers
from .commands import write_line
from .plant import strike

SAMPLES = 30
FEWEST_SAMPLES = 5
HOST_SAMPLES = 9
#: The approximate seconds of a sample on the device.
SAMPLE_SECONDS = 1e-3
MOST_CALLS = 48
#: Calls to issue while the device waits; their launches must fit into its queue.
HOST_CALLS = 20
#: Cycles of a waiting kernel in a millisecond: cards run at 1.0 to 2.0 GHz.
CYCLES_OF_A_MILLISECOND = 2_000_000


@dataclass
class Timed:
    """A work on several copies of its data, which take turns, and its samples."""

    name: str
    works: list[Work]
    calls: list[Callable[[], object]] = field(default_factory=list)
    run: Callable[[], None] | None = None
    how: str = "clock"
    seconds: list[float] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)


def shapes_of(name: str) -> list[tuple[int, ...]]:
    sys.path.insert(0, str(FOLDER))  # benchmarks import each other from there
    from model_shapes import read_shapes

    return read_shapes(name)


def copies_of(device: str, nbytes: int) -> int:
    """The number of copies that exceed the device's cache."""
    if device != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(8, -(-4 * cache // nbytes)))


# ---- on a GPU ------------------------------------------------------------------------------------


def time_events(run: Callable[[], None], wait_milliseconds: float = 0.0) -> float:
    """Seconds of the device between two events around ``run``."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if wait_milliseconds:
        torch.cuda._sleep(int(CYCLES_OF_A_MILLISECOND * wait_milliseconds))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def capture(calls: Sequence[Callable[[], object]]) -> Callable[[], None] | None:
    """The replay of a graph; None if the calls cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError as error:
        print(f"no graph: {str(error).splitlines()[0]}")
        torch.cuda.synchronize()
        return None
    return graph.replay


def issue(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def prepare_on_gpu(timed: Timed) -> None:
    """Warms up, chooses the number of calls, and captures them."""
    for work in timed.works:
        work.call()
    torch.cuda.synchronize()
    own = [work.call for work in timed.works]
    took = time_events(lambda: issue(own), 20.0) / len(own)
    turns = max(1, min(MOST_CALLS // len(own), round(SAMPLE_SECONDS / took / len(own))))
    timed.calls = own * turns
    timed.host_seconds = [host_time(timed) for _ in range(HOST_SAMPLES)]
    timed.run, timed.how = capture(timed.calls), "graph"
    if timed.run is None:
        timed.how = "backlog"


def host_time(timed: Timed) -> float:
    """CPU seconds for a call, while the device is busy."""
    calls = (timed.calls * HOST_CALLS)[:HOST_CALLS]
    torch.cuda.synchronize()
    torch.cuda._sleep(20 * CYCLES_OF_A_MILLISECOND)
    start = time.perf_counter()
    for call in calls:
        call()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took / len(calls)


def sample_on_gpu(timed: Timed) -> float:
    if timed.run is not None:
        return time_events(timed.run) / len(timed.calls)
    host = statistics.median(timed.host_seconds) * len(timed.calls)
    return time_events(lambda: issue(timed.calls), 1 + 2e3 * host) / len(timed.calls)


# ---- in a dry run --------------------------------------------------------------------------------


def sample_on_cpu(timed: Timed) -> float:
    start = time.perf_counter()
    for work in timed.works:
        work.call()
    return (time.perf_counter() - start) / len(timed.works)


# ---- all together --------------------------------------------------------------------------------


def row_of(arguments: argparse.Namespace, timed: Timed, copy_speed: float) -> dict[str, object]:
    work = timed.works[0]
    seconds = statistics.median(timed.seconds)
    first, _, third = statistics.quantiles(timed.seconds, n=4)
    return {
        "group": arguments.shapes,
        "shards": arguments.shards,
        "works": arguments.works,
        "work": timed.name,
        "seconds": seconds,
        "first_quartile": first,
        "third_quartile": third,
        "samples": len(timed.seconds),
        "calls": len(timed.calls) or len(timed.works),
        "how": timed.how,
        "host_seconds": statistics.median(timed.host_seconds) if timed.host_seconds else None,
        "nbytes": work.nbytes,
        "of_copy": work.nbytes / seconds / copy_speed,
        "least": work.least,
        "most_host_seconds": work.most_host_seconds,
    }


def measure(arguments: argparse.Namespace) -> None:
    """Appends a row for each work. Its samples alternate with those of the copy."""
    device = "cuda" if arguments.device == "cuda" else "cpu"
    shapes = shapes_of(arguments.shapes)
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    copies = [Data(shapes, device, seed) for seed in range(copies_of(device, 8 * numel))]
    chosen = {
        name: maker
        for name, maker in makers(arguments.works).items()
        if (arguments.shards == 1 or depends_on_shards(name)) and name not in arguments.without
    }
    all_timed = []
    for name, maker in [(COPY, copy), *chosen.items()]:
        write_line(arguments.record, {"begun": name})
        strike(f"times/{arguments.shards}/{name}")
        timed = Timed(name, [maker(data, arguments.shards) for data in copies])
        if device == "cuda":
            prepare_on_gpu(timed)
        else:
            sample_on_cpu(timed)
        all_timed.append(timed)
    write_line(arguments.record, {"begun": None})
    sample = sample_on_gpu if device == "cuda" else sample_on_cpu
    shuffle, end = random.Random(0).shuffle, time.monotonic() + arguments.seconds
    order = list(all_timed)
    for number in range(SAMPLES):
        if number == FEWEST_SAMPLES:
            write_rows(arguments, all_timed)  # the process may be killed before the rest
        if number >= FEWEST_SAMPLES and time.monotonic() > end:
            break
        shuffle(order)
        for timed in order:
            timed.seconds.append(sample(timed))
    write_rows(arguments, all_timed)


def write_rows(arguments: argparse.Namespace, all_timed: Sequence[Timed]) -> None:
    copied = all_timed[0]
    copy_speed = copied.works[0].nbytes / statistics.median(copied.seconds)
    for timed in all_timed:
        write_line(arguments.record, {"row": row_of(arguments, timed, copy_speed)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", required=True)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--works", choices=("targeted", "rest", "all"), default="targeted")
    parser.add_argument("--without", action="append", default=[], help="a work to skip")
    parser.add_argument("--device", choices=("cuda", "cpu", "host"), default="cuda")
    parser.add_argument("--seconds", type=float, default=10.0, help="time for the samples")
    parser.add_argument("--record", type=Path, required=True)
    arguments = parser.parse_args()
    measure(arguments)
    print(f"{arguments.shapes}, {arguments.shards} shards: timed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
