"""Measures the backend's collectives, as a part of ``bench``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torch_commhook.cli.bench.timing import median_on_all
from torch_commhook.planning.link_file import CollectiveTime

SIZES = tuple(1 << power for power in (16, 20, 24))
_ELEMENT_BYTES = 4
#: A collective of the next size may take this many times as long.
_GROWTH = 16

# Newer releases of torch have new names, and warn about the old ones.
_distributed: Any = dist
_all_gather = getattr(dist, "all_gather_single", None) or _distributed.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or _distributed.reduce_scatter_tensor


def measure_collectives(device: torch.device, seconds: float) -> list[CollectiveTime]:
    """Measure each collective at each size of :data:`SIZES`.

    Args:
        device: the device of the tensors.
        seconds: the approximate time of all measurements. The function omits sizes that would take
            longer.
    """
    smallest = torch.zeros(dist.get_world_size(), dtype=torch.float32, device=device)
    names = list(_calls(smallest))
    share = seconds / len(names) / len(SIZES)
    found = []
    last: dict[str, float] = {}
    for size in SIZES:
        elements = size // _ELEMENT_BYTES // dist.get_world_size() * dist.get_world_size()
        numel = max(elements, dist.get_world_size())
        whole = torch.zeros(numel, dtype=torch.float32, device=device)
        for name, call in _calls(whole).items():
            if last.get(name, 0.0) * _GROWTH > seconds:
                continue
            last[name] = median_on_all(call, device, share)
            found.append(CollectiveTime(name, whole.nbytes, last[name]))
    return found


def _calls(whole: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The collectives on float32 tensors, by name."""
    part = whole[: whole.numel() // dist.get_world_size()].clone()
    other = torch.empty_like(whole)
    return {
        "all_reduce": partial(dist.all_reduce, whole),
        "all_gather": partial(_all_gather, other, part),
        "reduce_scatter": partial(_reduce_scatter, part, whole),
        "all_to_all": partial(dist.all_to_all_single, other, whole),
    }
