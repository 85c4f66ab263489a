"""A bucket of whose sum each rank gets a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.bucket_with_memory import BucketWithMemory


class ShardedBucket(BucketWithMemory):
    """Gradients of sharded parameters, which a reduce-scatter is to sum over the ranks.

    Its buffer has equally many elements for each rank, in rank order: that rank's shard of each
    parameter, one after another, with padding if a parameter's rows do not divide evenly.

    Args:
        parameters: for each rank and parameter a placeholder with the shard's shape. Its values are
            meaningless.
        memory: the hook's memory of the bucket.
        shard: memory for this rank's share of the sum, ``numel() // ranks`` elements. Written.
        scale: the factor of the sum.
        op: the same as an operation of the process group.
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
