"""Moves the anchors of parameters that a user has loaded."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch

from torch_commhook import collectives
from torch_commhook.hooks.local_sgd import local_sgd
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.step.step_group import StepGroup


def moved_elsewhere(
    hook: local_sgd, memories: Sequence[BucketMemory], loaded: Set[int], group: StepGroup
) -> set[int]:
    """Move the anchors of parameters that other ranks have loaded. All ranks must call this.

    If a parameter was loaded on every rank, each rank has moved its anchor already.

    Args:
        hook: the hook that keeps the ranks apart.
        memories: the hook's memory of each bucket.
        loaded: ids of the parameters whose anchors this rank has moved already.
        group: the group of the ranks.

    Returns:
        The ids of the parameters whose anchors this call has moved.
    """
    parameters = [parameter for memory in memories for parameter in memory.parameters]
    own = [float(id(parameter) in loaded) for parameter in parameters]
    device = parameters[0].device
    counts = collectives.all_reduce(
        torch.tensor(own, dtype=torch.float32, device=device), group=group.group_for(device)
    ).wait()
    moved = zip(parameters, counts.tolist(), strict=True)
    elsewhere = {id(parameter) for parameter, count in moved if count} - loaded
    for memory in memories if elsewhere else ():
        hook.anchor_at_start(memory, elsewhere)
    return elsewhere
