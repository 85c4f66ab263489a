"""Ranks that attach the same: what differs is told at once, not by what collectives make of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


def check_agreement(
    group: Any, parameters: Sequence[tuple[str, Tensor]], settings: dict[str, object]
) -> None:
    """Compare what each rank attaches. All ranks of the group must call this.

    A group that ``torch.distributed`` does not know is left alone: it may do little.

    Args:
        group: the ranks.
        parameters: names and parameters whose gradients are averaged.
        settings: names and values that must be the same.

    Raises:
        RuntimeError: something differs. Says what, on which ranks.
    """
    size = group.size()
    if size == 1 or group not in distributed_c10d._world.pg_map:
        return
    specs = [f"'{name}' of shape {tuple(p.shape)} and {p.dtype}" for name, p in parameters]
    every: list[Any] = [None] * size
    dist.all_gather_object(every, (specs, settings), group=group)
    first_specs, first_settings = every[0]
    for rank, (others, other_settings) in enumerate(every):
        for mine, theirs in zip(first_specs, others, strict=False):
            if mine != theirs:
                raise RuntimeError(
                    f"attach: the ranks' models differ: rank 0 has parameter {mine}, "
                    f"rank {rank} has {theirs}"
                )
        if len(others) != len(first_specs):
            raise RuntimeError(
                f"attach: the ranks' models differ: rank 0 has {len(first_specs)} parameters that "
                f"require grad, rank {rank} has {len(others)}"
            )
        for name, value in first_settings.items():
            if other_settings.get(name) != value:
                raise RuntimeError(
                    f"attach: {name} must be the same on all ranks: rank 0 has {value}, "
                    f"rank {rank} has {other_settings.get(name)}"
                )
