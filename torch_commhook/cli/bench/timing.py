"""Times calls that all ranks of ``bench`` do together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

_LEAST_TRIES = 3
_MOST_TRIES = 50


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """The seconds of a call, including its work on the device."""
    synchronize(device)
    begun = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begun


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """The element-wise maximum of the ranks' values, on all ranks."""
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    found: list[float] = shared.tolist()
    return found


def median_on_all(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The median time of a call on the slowest rank, in seconds, after one untimed call.

    Args:
        call: a call that all ranks do.
        device: the device of its work.
        seconds: the approximate time of all calls. There are at least a few.
    """
    begun = time.perf_counter()
    call()
    found: list[float] = []
    while len(found) < _MOST_TRIES:
        dist.barrier()
        took, elapsed = slowest([timed(call, device), time.perf_counter() - begun], device)
        found.append(took)
        if len(found) >= _LEAST_TRIES and elapsed > seconds:
            break
    return statistics.median(found)
