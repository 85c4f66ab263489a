"""Sums of 16-bit values in float32.

An all-reduce in 16 bits rounds each partial sum to 16 bits, so its error grows with the number of
ranks. Here each rank receives its shard from all ranks, sums it in float32, and rounds the sum
once. The bytes on the wire are those of a ring all-reduce.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.exchange import Place
from torch_commhook.collectives.issuing import as_bytes, issue_all_gather
from torch_commhook.collectives.plain import all_to_all
from torch_commhook.collectives.stages import timed, two_stages
from torch_commhook.collectives.sum_rows import sum_rows
from torch_commhook.collectives.traced_ops import traced_all_gather
from torch_commhook.metrics import tensor_bytes

#: From this number of ranks on, 16-bit values are summed in float32. With fewer ranks a second
#: stage would cost connections for little: at 7 ranks a mean in bfloat16 is off by 0.0030, summed
#: in float32 by 0.0019.
LEAST_RANKS = 8


def padded_numel(numel: int, ranks: int) -> int:
    """The smallest number of elements of at least ``numel`` that ranks can divide evenly."""
    return -(-numel // ranks) * ranks


def wide_all_reduce(
    wire: Tensor, numel: int, shards: Tensor | None, *, group: dist.ProcessGroup
) -> torch.futures.Future[Tensor]:
    """Sum 16-bit values over all ranks: in float32, and rounded once.

    An all-to-all and an all-gather, run by :func:`two_stages`. All ranks get the same bits. Each
    rank sends ``4 (W - 1) / W`` bytes for each element of ``wire``.

    Args:
        wire: flat and contiguous, float16 or bfloat16, with :func:`padded_numel` elements. Written
            in eager code.
        numel: the number of elements of the result; later ones of ``wire`` are padding.
        shards: memory for as many elements, of the same dtype and device; None while a compiler
            traces, since it plans memory itself.
        group: the process group.

    Returns:
        A Future of the sum, flat: in eager code a view of ``wire``.
    """
    ranks = group.size()
    shard = wire.numel() // ranks
    is_traced = shards is None  # read once: other threads cannot tell whether a compiler traces
    sums = wire.new_empty(shard)

    def add_up(received: Tensor) -> Tensor:
        with timed(None, "encode"):
            return sum_rows(received.view(ranks, shard), sums)

    def issue_second(tensor: Tensor, place: Place | None) -> torch.futures.Future[Tensor]:
        if is_traced:
            return traced_all_gather(tensor, group, is_second=True)
        return issue_all_gather(tensor, wire.view(ranks, shard), group, place=place)

    def expect(place: Place) -> None:
        # A rank sends its sum after it has received this rank's shard, whose memory takes that sum.
        place.form = str(wire.dtype)
        place.expect_gather([as_bytes(row) for row in wire.view(ranks, shard)])

    return two_stages(
        lambda: all_to_all(wire, out=shards, group=group),
        add_up,
        issue_second,
        lambda gathered: gathered.view(-1)[:numel],
        expect=expect,
        second_bytes=(tensor_bytes(sums) * (ranks - 1),) * 2,
        device=wire.device,
        group=group,
    )
