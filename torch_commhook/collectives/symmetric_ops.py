"""The operators of ranks that share memory, as typed functions with their fakes.

In C++: ``csrc/ops/symmetric``, ``cuda/symmetric.cu``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.codecs.checks import check_failed, check_message, check_ranks

#: The longest timeout of a barrier.
MOST_SECONDS = 1e9


def control_words(ranks: int) -> int:
    """The size of a rank's controls: a signal of each rank, its number of barriers, its failure."""
    return ranks + 2


def symmetric_barrier(controls: Sequence[Tensor], rank: int, *, timeout: float) -> None:
    """Wait until all ranks have called it as often, and see their earlier writes.

    On CUDA the current stream waits, not the caller. After the timeout a rank gives up: the last of
    its controls becomes 1 plus the rank that was missing. From then on it waits for nobody, and the
    others give up at the first barrier that it does not reach.

    Args:
        controls: each rank's controls, in order, in shared memory: int64, of shape
            ``(control_words(ranks),)``, zeros before the first call.
        rank: this rank.
        timeout: seconds until it gives up, above 0 and at most :data:`MOST_SECONDS`.

    Raises:
        TypeError, ValueError: tensors, rank or timeout are of another kind.
        NotImplementedError: the tensors' device is neither the CPU nor CUDA.
    """
    torch.ops.commhook.symmetric_barrier(controls, rank, timeout=timeout)


def symmetric_gather(
    shards: Sequence[Tensor], message: Tensor, *, failed: Tensor | None = None
) -> None:
    """Copy the shards of all ranks into one message, one after another.

    Args:
        shards: the shard of each rank, in order; 1 to 16 of them: contiguous, uint8, with a
            multiple of 4 bytes, at an address that is a multiple of 4.
        message: contiguous, uint8, as long as all shards together. It shares no memory with them.
            Written.
        failed: one int64. If it is not zero, no shard is read, and all bytes become 255: the values
            of such a message are NaN.

    Raises:
        TypeError, ValueError: the tensors are of another kind.
    """
    torch.ops.commhook.symmetric_gather(shards, message, failed=failed)


@torch.library.register_fake("commhook::symmetric_barrier")
def _symmetric_barrier_fake(controls: Sequence[Tensor], rank: int, *, timeout: float) -> None:
    op = "symmetric_barrier"
    ranks = len(controls)
    check_ranks(op, "controls", ranks, 2)
    torch._check_value(
        0 <= rank < ranks,
        lambda: (
            f"{op}: rank must be at least 0 and below {ranks}, the number of controls, got {rank}"
        ),
    )
    for i, each in enumerate(controls):
        if each.dtype is not torch.int64:
            raise TypeError(f"{op}: controls[{i}] must be of dtype int64, got {each.dtype}")
        torch._check_value(
            each.shape == (control_words(ranks),),
            lambda i=i, each=each: (
                f"{op}: controls[{i}] must be flat and hold {control_words(ranks)} numbers, two "
                f"more than there are ranks, got sizes {list(each.shape)}"
            ),
        )


@torch.library.register_fake("commhook::symmetric_gather")
def _symmetric_gather_fake(
    shards: Sequence[Tensor], message: Tensor, *, failed: Tensor | None = None
) -> None:
    op = "symmetric_gather"
    check_ranks(op, "shards", len(shards), 1)
    sizes = [shard.numel() for shard in shards]
    for i, shard in enumerate(shards):
        check_message(op, f"shards[{i}]", shard, None)
    check_message(
        op,
        "message",
        message,
        sum(sizes) if all(isinstance(size, int) for size in sizes) else None,
    )
    check_failed(op, failed)
