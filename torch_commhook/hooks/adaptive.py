"""A choice of bits for each bucket, under a budget of bytes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.codecs.blockwise import blockwise
from torch_commhook.collectives.exchange import exchanges
from torch_commhook.collectives.plain import all_reduce
from torch_commhook.hooks.base import Hook
from torch_commhook.hooks.compressed import compressed
from torch_commhook.hooks.traits import HookTraits
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.replays import cannot_be_captured

_NAME = "adaptive_bits"


class adaptive(Hook):  # noqa: N801 (a hook is written as it is called)
    """Average gradients in 4 or 8 bits, chosen for each bucket, with error feedback.

    Every ``every`` steps the ranks sum each bucket's errors and choose again. Buckets get 8 bits in
    the order of the error that they save per additional byte, while a rank sends no more than
    ``budget`` in a step. A choice sends one number per bucket and takes one pass over the error
    memory. A compiled backward recompiles when a bucket's bits change.

    Args:
        budget: the number of bytes that each rank may send in a step.
        every: the number of steps between two choices.
        block_size: as for :class:`torch_commhook.codecs.blockwise`.

    Raises:
        TypeError: ``budget`` or ``every`` is not an int.
        ValueError: one of them is not positive, or the codec refuses the block size.

    Example:
        >>> def train(rank):
        ...     model = nn.Linear(4096, 1, bias=False)
        ...     handle = attach(model, hooks.adaptive(budget=3000))
        ...     model(torch.ones(1, 4096)).sum().backward()
        ...     return handle.stats().bytes_sent_last_step
        >>> run_ranks(train, 2)[0] <= 3000
        True
    """

    _commhook_traceable = True
    _lets_stages_wait = True
    traits = HookTraits(is_lossy=True, has_stages=True, keeps_error=True, settles_buckets=True)

    def __init__(self, budget: int, *, every: int = 100, block_size: int = 256) -> None:
        super().__init__()
        given: tuple[tuple[str, Any], ...] = (("budget", budget), ("every", every))
        for name, value in given:
            if not isinstance(value, int) or isinstance(value, bool):
                whole = isinstance(value, float) and value.is_integer()
                raise TypeError(
                    f"adaptive: {name} must be an int, got {type(value).__qualname__}"
                    + (f"; write {int(value)}" if whole else "")
                )
            if value < 1:
                raise ValueError(f"adaptive: {name} must be at least 1, got {value}")
        self.budget = budget
        self.every = every
        self.block_size = block_size
        self._hooks = {bits: compressed(blockwise(bits, block_size)) for bits in (4, 8)}

    def prepare(self, memory: BucketMemory) -> None:
        memory.with_error = True
        for hook in self._hooks.values():  # both have the same shards
            hook.prepare(memory)
        memory.declare_choice(_NAME, 4, among=(4, 8))

    def check_capture(self, memory: BucketMemory) -> None:
        raise cannot_be_captured(str(self), "the host chooses bits by the number of the step")

    def shards(self, memory: BucketMemory) -> list[str]:
        return self._hooks[8].shards(memory)  # the other hook has the same

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return self._hooks[self.memory(bucket).choices[_NAME]].average(bucket)

    def step_counted(self, memory: HookMemory) -> None:
        # After the first step too: before it, the errors are unknown.
        if memory.steps != 1 and memory.steps % self.every != 0:
            return
        buckets = memory.bucket_memories()
        lost = torch.tensor(
            [self._lost(bucket) for bucket in buckets], dtype=torch.float64, device="cpu"
        )
        if memory.world_size > 1:
            lost = all_reduce(lost.to(_wire_device(memory)), group=memory.group).wait().cpu()
        self._settle(buckets, lost.tolist(), memory)

    def _settle(
        self, buckets: Sequence[BucketMemory], lost: list[float], memory: HookMemory
    ) -> None:
        sizes = [
            {bits: self._bytes(bits, bucket.numel, memory) for bits in (4, 8)} for bucket in buckets
        ]
        left = self.budget - sum(size[4] for size in sizes)
        if left < 0:
            warnings.warn(
                f"{self}: with 4 bits for each value a step sends {self.budget - left} bytes "
                "already",
                stacklevel=2,
            )
        gains = []
        for number, (bucket, square, size) in enumerate(zip(buckets, lost, sizes, strict=True)):
            # A step of 8 bits is 7 / 127 as wide as one of 4 bits, and so is the error.
            at_four = square * ((127 / 7) ** 2 if bucket.choices[_NAME] == 8 else 1.0)
            more = max(size[8] - size[4], 1)
            gains.append((-(at_four - at_four * (7 / 127) ** 2) / more, number))
        for _, number in sorted(gains):
            more = sizes[number][8] - sizes[number][4]
            bits = 8 if more <= left else 4
            left -= more if bits == 8 else 0
            if buckets[number].choices[_NAME] != bits:
                buckets[number].set_choice(_NAME, bits)

    def _lost(self, memory: BucketMemory) -> float:
        """The square of this rank's unsent error; 0 if it is not finite."""
        square = sum(
            torch.linalg.vector_norm(memory.tensors[name], dtype=torch.float64).item() ** 2
            for name in ("error", *self.shards(memory))
        )
        return square if square < float("inf") else 0.0

    def _bytes(self, bits: int, numel: int, memory: HookMemory) -> int:
        """The bytes of a bucket on the rank that sends most."""
        ranks = memory.world_size
        sizes = [shard.nbytes for shard in blockwise(bits, self.block_size).shards(numel, ranks)]
        group = memory.group
        if group is not None and _wire_device(memory).type == "cpu" and exchanges(group):
            return max(sum(sizes) + (ranks - 2) * own for own in sizes)
        return sum(sizes) - min(sizes) + (ranks - 1) * max(sizes)

    def __repr__(self) -> str:
        every = "" if self.every == 100 else f", every={self.every}"
        size = "" if self.block_size == 256 else f", block_size={self.block_size}"
        return f"adaptive({self.budget}{every}{size})"


def _wire_device(memory: HookMemory) -> torch.device:
    return memory.bucket_memories()[0].device
