"""Hardware counters of one call, by Nsight Compute (``ncu``).

    ncu --profile-from-start off ... python -m benchmarks.gpu.counters CASE --shards 8 --record FILE

runs a call between the profiler's start and stop. It counts all kernels of that call, whatever
their names are.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .commands import write_line
from .plant import strike

SHAPES = "161x40704"
#: The counted calls, and the shards of their messages.
COUNTED = (
    ("flatten", 1),
    ("blockwise(): encode", 8),
    ("blockwise(): encode", 1),
    ("blockwise(): encode, error feedback", 8),
    ("blockwise(): decode", 8),
    ("blockwise(bits=4): encode", 8),
    ("fp8(): encode", 8),
    ("topk(): encode", 1),
)
#: Names for ncu's metrics.
METRICS = {
    "gpu__time_duration.sum": "nanoseconds",
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_written",
    "smsp__issue_active.avg.per_cycle_active": "issue_active",
    "smsp__inst_executed.sum": "warp_instructions",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_active_percent",
    "launch__registers_per_thread": "registers",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": "load_conflicts",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": "store_conflicts",
}
#: The metrics that every version and card has.
FEWEST = ("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum")
#: ncu prints this on a machine that does not let it read counters, for any program.
REFUSED = re.compile(r"ERR_NVGPUCTRPERM|Failed to initialize the profiler")


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit: on the PATH, or in the toolkit's folder."""
    found = shutil.which(name)
    if found is not None:
        return found
    homes = [os.environ.get(variable, "") for variable in ("CUDA_HOME", "CUDA_PATH")]
    paths = [Path(home, "bin", name) for home in [*filter(None, homes), "/usr/local/cuda"]]
    paths += sorted(Path("/opt/nvidia").glob(f"nsight-compute/*/{name}"))
    return next((str(path) for path in paths if os.access(path, os.X_OK)), None)


def command(ncu: str, metrics: list[str]) -> list[str]:
    """The profiler's part of the command line. Does not change the card's clocks."""
    return [
        *(ncu, "--clock-control", "none", "--profile-from-start", "off"),
        *("--csv", "--page", "raw", "--print-units", "base"),
        *("--metrics", ",".join(metrics)),
    ]


def rows_of(log: str) -> Iterator[dict[str, Any]]:
    """ncu's values for each kernel.

    A value is None if ncu has no number.
    """
    lines = [line for line in log.splitlines() if line.startswith('"')]
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        return
    for values in csv.DictReader(lines[header:]):
        if not values["ID"]:  # the line of units
            continue
        row: dict[str, Any] = {"kernel": values["Kernel Name"]}
        for metric, name in METRICS.items():
            row[name] = number(values.get(metric))
        yield row


def number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def main() -> int:
    import torch

    from .cases import Data, makers
    from .times import shapes_of

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--device", choices=("cuda", "cpu", "host"), default="cuda")
    parser.add_argument("--record", type=Path, required=True)
    arguments = parser.parse_args()
    strike(f"counters/{arguments.case}")
    on_gpu = arguments.device == "cuda"
    data = Data(shapes_of(arguments.shapes), "cuda" if on_gpu else "cpu")
    work = makers()[arguments.case](data, arguments.shards)
    write_line(arguments.record, {"numel": data.numel, "nbytes": work.nbytes})
    for _ in range(3):
        work.call()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    work.call()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
