"""A bucket of which each rank gets a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.bucket_with_memory import BucketWithMemory


class ShardedBucket(BucketWithMemory):
    """Gradients of sharded parameters, which a reduce-scatter is to sum over the ranks.

    Its buffer has as many elements for each rank, in order of rank: that rank's shard of each
    parameter, one after another, with padding where a parameter's rows do not divide evenly.

    Args:
        parameters: for each rank and parameter a stand-in of the shard's shape. Their values mean
            nothing.
        memory: what the hook remembers of the bucket.
        shard: written: this rank's share of the sum, of ``numel() // ranks`` elements.
        scale: what the sum is multiplied by.
        op: the same as an operation of the process group's.
        settings: the other arguments of :class:`torch_commhook.GradBucket`.
    """

    __slots__ = ("op", "scale", "shard")

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        memory: BucketMemory | None,
        shard: Tensor,
        scale: float,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        **settings: Any,
    ) -> None:
        super().__init__(parameters, memory=memory, **settings)
        self.shard = shard
        self.scale = scale
        self.op = op
