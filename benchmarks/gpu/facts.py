"""Facts on which results depend: the card, the software, and whether the library loads.

    python -m benchmarks.gpu.facts --device cuda --record FILE

Appends objects to the file, so that earlier facts remain if the library crashes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from .commands import write_line
from .plant import strike

#: The properties to request from ``nvidia-smi``.
ASKED = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "temperature.gpu",
    "power.draw",
    "ecc.mode.current",
    "mig.mode.current",
)


def smi() -> dict[str, str]:
    """The properties of the first card from ``nvidia-smi``; empty if there are none."""
    query = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return dict(zip(ASKED, values, strict=False))


def card() -> dict[str, Any]:
    import torch

    about = torch.cuda.get_device_properties(0)
    return {
        "card": about.name,
        "capability": f"{about.major}.{about.minor}",
        "multiprocessors": about.multi_processor_count,
        "memory_bytes": about.total_memory,
        "cache_bytes": about.L2_cache_size,
    }


def software() -> dict[str, Any]:
    import torch

    from benchmarks.machine import environment

    about = environment("cpu")
    del about["gpu"]
    return {**about, "cuda": torch.version.cuda}


def library(device: str) -> dict[str, Any]:
    """The operators, and the cases of smoke."""
    import torch

    import torch_commhook.native.bucket_ops as ops

    from .cases import makers

    has_kernels = bool(torch.ops.commhook.has_cuda_kernels())
    x = torch.ones(5, device="cuda" if device == "cuda" else "cpu")
    if ops.flatten([x], scale=2.0).sum().item() != 10:
        raise RuntimeError("flatten gives wrong values")
    names = sorted(
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("commhook::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    )
    operators = {name.partition(".")[0] for name in names}
    return {
        "has_cuda_kernels": has_kernels,
        "operators": sorted(operators),
        "not_called_by_smoke": sorted(operators - called_by_smoke()),
        "cases": list(makers()),
    }


def called_by_smoke() -> set[str]:
    """The operators that smoke's cases call, according to the CPU's profile."""
    import torch

    from .cases import Data, makers

    data = Data([(300,)], "cpu", exact=True)
    works = [maker(data, 2) for maker in makers().values()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for work in works:
            work.call()
    names = (event.name.partition("::") for event in profile.events())
    return {name for namespace, _, name in names if namespace == "commhook"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu", "host"), default="cuda")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument(
        "--library", action="store_true", help="check only whether the library loads"
    )
    arguments = parser.parse_args()
    if not arguments.library:
        write_line(arguments.record, software())
        if arguments.device == "cuda":
            write_line(arguments.record, card())
        return 0
    strike("library")
    found = library(arguments.device)
    write_line(arguments.record, found)
    if arguments.device == "cuda" and not found["has_cuda_kernels"]:
        print("this build has no CUDA kernels")
        return 1
    print(f"loads, {len(found['operators'])} operators with CUDA kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
