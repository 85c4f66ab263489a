"""Sums of 16-bit values that are added up in float32.

An all-reduce in 16 bits rounds each partial sum to 16 bits, so that its error grows with the number
of ranks. Here each rank gets its shard from all ranks, adds these up in float32, and rounds the sum
once. The bytes on the wire are those of a ring all-reduce.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.plain import all_to_all, issue_all_gather
from torch_commhook.collectives.stages import timed, two_stages
from torch_commhook.metrics import tensor_bytes
from torch_commhook.native.bucket_ops import BUCKET_DTYPES

#: From so many ranks on, 16-bit values are added up in float32. Below, a second stage would cost
#: connections for little: at 7 ranks a mean in bfloat16 is off by 0.0030, added up in float32 by
#: 0.0019.
LEAST_RANKS = 8


def padded_numel(numel: int, ranks: int) -> int:
    """The elements of a buffer that holds as many for each rank, and ``numel`` in all or more."""
    return -(-numel // ranks) * ranks


def sum_rows(rows: Tensor, out: Tensor) -> Tensor:
    """Add up the rows of a matrix in float32 and in their order, and round the sum once.

    On devices other than the CPU the order is the device's own.

    Args:
        rows: contiguous, of shape ``(rows, columns)``, with one row or more; float32, float16 or
            bfloat16.
        out: written: contiguous, of shape ``(columns,)``, of any dtype that buckets have. It shares
            no memory with ``rows``.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: tensors that are none of this.
    """
    torch.ops.commhook.sum_rows(rows, out)
    return out


@torch.library.register_fake("commhook::sum_rows")
def _sum_rows_fake(rows: Tensor, out: Tensor) -> None:
    if rows.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(
            f"sum_rows: rows must be of dtype float32, float16 or bfloat16, got {rows.dtype}"
        )
    if out.dtype not in BUCKET_DTYPES:
        raise TypeError(
            f"sum_rows: out must be of dtype float64, float32, float16 or bfloat16, got {out.dtype}"
        )
    torch._check_value(
        rows.dim() == 2 and rows.is_contiguous(),
        lambda: (
            "sum_rows: rows must be contiguous, of two dimensions, with one row or more, got sizes "
            f"{list(rows.shape)} with strides {list(rows.stride())}"
        ),
    )
    torch._check_value(
        out.device == rows.device,
        lambda: (
            f"sum_rows: out must be on the device of the values, {rows.device}, got {out.device}"
        ),
    )
    torch._check_value(
        out.dim() == 1 and out.shape[0] == rows.shape[1] and out.is_contiguous(),
        lambda: (
            f"sum_rows: out must be contiguous, of sizes [{rows.shape[1]}], got sizes "
            f"{list(out.shape)} with strides {list(out.stride())}"
        ),
    )


def wide_all_reduce(
    wire: Tensor, numel: int, shards: Tensor | None, *, group: dist.ProcessGroup
) -> torch.futures.Future[Tensor]:
    """Sum 16-bit values over all ranks: in float32, and rounded once.

    An all-to-all and an all-gather, as :func:`two_stages` runs them. All ranks get the same bits.
    Each rank sends ``4 (W - 1) / W`` bytes for each element of ``wire``.

    Args:
        wire: flat and contiguous, float16 or bfloat16, of :func:`padded_numel` elements. In eager
            it is written.
        numel: elements of the result; those of ``wire`` past them are padding.
        shards: memory for as many elements, of the same dtype and device; None while a compiler
            traces, which plans memory itself.
        group: the process group.

    Returns:
        A Future of the sum, flat: in eager a view of ``wire``.
    """
    ranks = group.size()
    shard = wire.numel() // ranks
    is_traced = shards is None  # asked once: other threads cannot tell who compiles
    sums = wire.new_empty(shard)

    def add_up(received: Tensor) -> Tensor:
        with timed(None, "encode"):
            return sum_rows(received.view(ranks, shard), sums)

    def issue_second(
        tensor: Tensor, second_group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        # All of what was in `wire` has been sent by now.
        out = None if is_traced else wire.view(ranks, shard)
        return issue_all_gather(tensor, out, second_group, is_traced=is_traced)

    return two_stages(
        lambda: all_to_all(wire, out=shards, group=group),
        add_up,
        issue_second,
        lambda gathered: gathered.view(-1)[:numel],
        second_bytes=tensor_bytes(sums) * (ranks - 1),
        device=wire.device,
        group=group,
    )
