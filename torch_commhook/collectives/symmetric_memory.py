"""One bucket's memory on every rank, for compressed sums without a collective."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from torch_commhook.collectives.symmetric_ops import (
    MOST_SECONDS,
    control_words,
    symmetric_barrier,
    symmetric_gather,
)

_ALIGNMENT = 256  # of each region, in bytes: two sectors of 128


def _filled_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class SymmetricBuffers:
    """One bucket's memory on every rank: controls of barriers, a message, a message of a sum.

    A rank writes to its own memory, and to its signals in the others' controls. It overwrites its
    message only after the second barrier, when all ranks have read the last one. It overwrites its
    sum only after the first, when all have read the last sum. So a call needs no third barrier.

    Args:
        memories: the memory of each rank, in order: flat, uint8, :meth:`bytes_for` bytes, zeros
            before any rank uses it, at addresses that are multiples of 16.
        rank: this rank.
        message_bytes, sum_bytes: the size of the largest message, and of a sum's largest message.
        kept: an object that the memories depend on.
    """

    def __init__(
        self,
        memories: Sequence[Tensor],
        rank: int,
        message_bytes: int,
        sum_bytes: int,
        kept: object = None,
    ) -> None:
        ranks = len(memories)
        words = control_words(ranks)
        self.rank = rank
        self.capacity = message_bytes, sum_bytes
        self._kept = kept
        self._memories = list(memories)
        self._message_start = _filled_up(8 * words)
        self._sum_start = self._message_start + _filled_up(message_bytes)
        self._controls = [memory[: 8 * words].view(torch.int64) for memory in memories]
        #: 0, or 1 plus the rank that did not reach a barrier in time.
        self.failed = self._controls[rank][words - 1 :]
        # The device's last report of it: read without waiting.
        self._seen = self.failed
        if self.failed.is_cuda:
            self._seen = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self._sizes: list[int] | None = None
        self._views: _Views

    @staticmethod
    def bytes_for(ranks: int, message_bytes: int, sum_bytes: int) -> int:
        """The bytes of one rank's memory."""
        start = _filled_up(8 * control_words(ranks)) + _filled_up(message_bytes)
        return start + _filled_up(sum_bytes)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether there is room for messages with shards of these sizes."""
        message_bytes, sum_bytes = self.capacity
        return sum(sizes) <= message_bytes and max(sizes) <= sum_bytes

    def views(self, sizes: Sequence[int]) -> _Views:
        """The tensors of a call whose messages have shards of these sizes, one for each rank."""
        if self._sizes != list(sizes):
            own = self._memories[self.rank]
            begin = self._message_start + sum(sizes[: self.rank])
            end = begin + sizes[self.rank]
            self._views = _Views(
                own[self._message_start :][: sum(sizes)],
                [memory[begin:end] for memory in self._memories],
                own[self._sum_start :][: sizes[self.rank]],
                [
                    memory[self._sum_start :][:size]
                    for memory, size in zip(self._memories, sizes, strict=True)
                ],
            )
            self._sizes = list(sizes)
        return self._views

    def barrier(self, timeout: timedelta) -> None:
        """Run :func:`symmetric_barrier`, with a timeout of at most the longest possible."""
        seconds = min(timeout.total_seconds(), MOST_SECONDS)
        symmetric_barrier(self._controls, self.rank, timeout=seconds)

    def gather(self, shards: Sequence[Tensor], message: Tensor) -> None:
        """Run :func:`symmetric_gather`; writes NaNs if a barrier has failed."""
        symmetric_gather(shards, message, failed=self.failed)
        if self._seen is not self.failed:
            self._seen.copy_(self.failed, non_blocking=True)

    def check(self) -> None:
        """Refuse to continue after a failure that the device has reported.

        Raises:
            RuntimeError: an earlier barrier has failed.
        """
        missed = int(self._seen)
        if missed:
            raise RuntimeError(
                f"compressed_all_reduce: rank {missed - 1} of the group did not reach an earlier "
                "sum over symmetric memory in time, or had given up; the results of that sum "
                "are NaN. The group cannot continue: make a new one, from a checkpoint"
            )

    def give_up(self) -> None:
        """Tell the other ranks that this one reaches no barrier any more; they then fail too.

        On CUDA in the order of the current stream.
        """
        self.failed.fill_(1 + self.rank)
        if self._seen is not self.failed:
            self._seen.fill_(1 + self.rank)
        self.barrier(timedelta(seconds=1))  # sends the signal, and does not wait


class _Views(NamedTuple):
    message: Tensor  # this rank's
    shards: list[Tensor]  # this rank's shard in the message of each rank
    sum: Tensor  # this rank's
    sums: list[Tensor]  # of each rank
