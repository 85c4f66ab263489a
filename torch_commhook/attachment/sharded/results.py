"""Writes a hook's results for ``fully_shard``, and counts its traffic."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_commhook.hooks.mean import allreduce
from torch_commhook.metrics import BucketTraffic, HookStats, count_bucket
from torch_commhook.native.bucket_ops import unflatten_into
from torch_commhook.step.attached_hook import Attached


@torch.no_grad()
def write(result: Tensor, tensor: Tensor, factor: float) -> None:
    """Write ``factor`` times a hook's result, which may share memory with the destination."""
    if result.data_ptr() == tensor.data_ptr() and result.dtype == tensor.dtype:
        if factor != 1.0:
            tensor.mul_(factor)
    elif result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        unflatten_into(result.clone(), [tensor], scale=factor)
    else:
        unflatten_into(result, [tensor], scale=factor)


def is_plain(attached: Attached) -> bool:
    """Whether a hook does the same as ``fully_shard`` without one."""
    return type(attached.hook) is allreduce and attached.stages.is_empty


def count_unit(
    stats: HookStats, unit: int, units: int, traffic: BucketTraffic, *, first: bool
) -> None:
    """Count the traffic of one of several units; ``first``: whether a step begins with it.

    Units whose gradients come later have larger numbers, but some may come first or never.
    """
    empty = traffic._replace(numel=0, bytes_sent=0, bytes_received=0)
    while len(stats.buckets) < unit:
        count_bucket(stats, len(stats.buckets), units, empty, first=False)
    count_bucket(stats, unit, units, traffic, first=first)
