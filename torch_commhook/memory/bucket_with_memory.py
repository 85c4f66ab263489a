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
    """A bucket as the library gives it to hooks: with its memory. A copy of one has none.

    Args:
        parameters: whose gradients are in it.
        memory: what the hook remembers of the bucket; None for hooks that are not the library's.
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
        """A bucket over another, with a memory of its own: the same buffer, nothing copied."""
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


#: For buckets that users make and call hooks of the library with.
_memories: weakref.WeakKeyDictionary[GradBucket, BucketMemory] = weakref.WeakKeyDictionary()


def memory_of(bucket: GradBucket) -> BucketMemory | None:
    """What the hook that a bucket is for remembers of it; None where it has not been asked for."""
    return bucket.memory if isinstance(bucket, BucketWithMemory) else _memories.get(bucket)


def set_memory(bucket: GradBucket, memory: BucketMemory) -> None:
    """Let all hooks that get this bucket have this memory of it."""
    if isinstance(bucket, BucketWithMemory):
        bucket.memory = memory
    else:
        _memories[bucket] = memory
