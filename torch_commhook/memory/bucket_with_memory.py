"""A bucket that carries its hook's memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.memory.bucket_memory import BucketMemory

if TYPE_CHECKING:
    from typing_extensions import Self


class BucketWithMemory(GradBucket):
    """A bucket with its hook's memory, as hooks of the library get it. A copy has no memory.

    Args:
        parameters: the parameters of its gradients.
        memory: the hook's memory of the bucket; None for hooks that are not the library's.
        settings: the other arguments of :class:`torch_commhook.GradBucket`.
    """

    __slots__ = ("memory",)

    memory: BucketMemory | None

    def __init__(
        self, parameters: Sequence[Tensor], *, memory: BucketMemory | None = None, **settings: Any
    ) -> None:
        super().__init__(parameters, **settings)
        self.memory = memory

    @classmethod
    def from_torch(cls, bucket: Any, process_group: dist.ProcessGroup | None = None) -> Self:
        """As :meth:`GradBucket.from_torch`; the bucket has no memory yet."""
        made = super().from_torch(bucket, process_group)
        made.memory = None
        return made

    @classmethod
    def over(cls, bucket: GradBucket, memory: BucketMemory) -> Self:
        """Make a bucket over another one, with its own memory: the same buffer, nothing copied."""
        return cls(
            bucket.parameters(),
            buffer=bucket.buffer(),
            index=bucket.index(),
            bucket_count=bucket.bucket_count(),
            sparse_grad_indices=bucket.sparse_grad_indices(),
            process_group=bucket.process_group(),
            memory=memory,
        )

    def _class_of_copies(self) -> type[GradBucket]:
        return GradBucket


#: For buckets that users make and pass to hooks of the library.
_memories: weakref.WeakKeyDictionary[GradBucket, BucketMemory] = weakref.WeakKeyDictionary()


def memory_of(bucket: GradBucket) -> BucketMemory | None:
    """The memory of the bucket's hook; None if it was not requested."""
    return bucket.memory if isinstance(bucket, BucketWithMemory) else _memories.get(bucket)


def set_memory(bucket: GradBucket, memory: BucketMemory) -> None:
    """Set the memory of this bucket for all hooks that get it."""
    if isinstance(bucket, BucketWithMemory):
        bucket.memory = memory
    else:
        _memories[bucket] = memory
