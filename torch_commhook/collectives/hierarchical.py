"""Sums that are exact inside a node and compressed between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.codecs.base import Codec
from torch_commhook.codecs.checks import ERROR_DTYPES
from torch_commhook.collectives.compressed import compressed_all_reduce
from torch_commhook.collectives.futures import then_beside
from torch_commhook.collectives.group_place import check_place, group_rank
from torch_commhook.collectives.message_buffers import MessageBuffers
from torch_commhook.collectives.plain import all_gather, reduce_scatter, resolve_group
from torch_commhook.collectives.streams import beside
from torch_commhook.collectives.sum_arguments import (
    SumArguments,
    check_arguments,
    check_out,
    listed_tensors,
    shard_range,
)
from torch_commhook.metrics import CallMeter
from torch_commhook.native import bucket_ops


def hierarchical_all_reduce(
    tensors: Tensor | Sequence[Tensor],
    codec: Codec,
    *,
    intra_group: dist.ProcessGroup,
    inter_group: dist.ProcessGroup,
    scale: float = 1.0,
    out: Tensor | Sequence[Tensor] | None = None,
    carry: Tensor | None = None,
    error: Tensor | None = None,
    shard_error: Tensor | None = None,
    rounding: Tensor | None = None,
    buffers: MessageBuffers | None = None,
    meter: CallMeter | None = None,
) -> torch.futures.Future[Tensor]:
    """``scale`` times the sum of tensors over all ranks of all nodes, compressed between nodes.

    A reduce-scatter in float32 inside the node gives each of its ranks the node's sum of one share
    of the elements; :func:`compressed_all_reduce` adds that up over the nodes; an all-gather inside
    the node brings the shares together. So the links between nodes carry compressed messages of
    each element once for each node, and the links inside exact ones. All ranks get the same bits.

    The call waits for all stages but the last; with CUDA tensors and NCCL it is the stream that
    waits.

    Args:
        tensors: as :func:`compressed_all_reduce` takes them.
        codec: the same on all ranks.
        intra_group: the ranks of this node; equally many on all nodes.
        inter_group: the ranks that have this rank's place in their nodes, one of each.
        scale: factor of the sum.
        out: written; as in :func:`compressed_all_reduce`.
        carry: added to this rank's values, if given, and then zeros: float32 or bfloat16, flat, as
            many.
        error: what the node's earlier messages have lost: float32 or bfloat16, as many as the share
            has.
        shard_error, rounding, buffers, meter: as in :func:`compressed_all_reduce`, of the share.

    Returns:
        A Future of ``out``, or of the first of its tensors where it is a list.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`compressed_all_reduce`.
    """
    sources = listed_tensors("hierarchical_all_reduce", "tensors", tensors)
    intra_group, inter_group = _checked_groups(intra_group, inter_group)
    numel = sum(tensor.numel() for tensor in sources)
    if out is None:
        out = sources[0].new_empty(numel)
    destinations = listed_tensors("hierarchical_all_reduce", "out", out)
    check_out("hierarchical_all_reduce", destinations, numel)
    begin, end = share_range(numel, rank=group_rank(intra_group), ranks=intra_group.size())
    buffers = MessageBuffers() if buffers is None else buffers
    arguments = SumArguments(codec, scale, error, shard_error, rounding, buffers, meter)
    device = sources[0].device
    check_arguments("hierarchical_all_reduce", arguments, end - begin, device, inter_group)
    _check_carry(carry, numel)
    used = (sources, destinations, carry, error, shard_error, rounding)
    is_traced = torch.compiler.is_compiling()
    stream = nullcontext() if is_traced else beside(device, buffers.stream, used)
    with torch.no_grad(), stream:
        own = _sum_in_node(sources, carry, buffers, intra_group)
        if end > begin:  # the last share may be shorter than the others
            _sum_over_nodes(own[: end - begin], arguments, inter_group)

        def finish(done: torch.futures.Future[Tensor]) -> Tensor:
            gathered = done.value().view(-1)
            with torch.no_grad():
                bucket_ops.unflatten_into(gathered[:numel], destinations)
            return destinations[0]

        return then_beside(all_gather(own, group=intra_group), finish, device)


def _checked_groups(
    intra_group: dist.ProcessGroup, inter_group: dist.ProcessGroup
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    intra_group, inter_group = resolve_group(intra_group), resolve_group(inter_group)
    if intra_group is inter_group and intra_group.size() > 1:
        raise ValueError(
            "hierarchical_all_reduce: intra_group and inter_group must have this rank alone in "
            "common, got the same group"
        )
    for group in (intra_group, inter_group):
        check_place("hierarchical_all_reduce", group)
    return intra_group, inter_group


def _check_carry(carry: object, numel: int) -> None:
    if carry is None:
        return
    if not isinstance(carry, Tensor) or carry.dtype not in ERROR_DTYPES:
        raise TypeError(
            "hierarchical_all_reduce: carry must be a tensor of float32 or bfloat16, or None"
        )
    if carry.dim() != 1 or (not torch.compiler.is_compiling() and len(carry) != numel):
        raise ValueError(
            f"hierarchical_all_reduce: carry must be flat and hold {numel} elements, got sizes "
            f"{list(carry.shape)}"
        )


def _sum_in_node(
    sources: list[Tensor],
    carry: Tensor | None,
    buffers: MessageBuffers,
    intra_group: dist.ProcessGroup,
) -> Tensor:
    """The node's sum of this rank's share, exact, as long as the longest share."""
    numel, ranks = sum(tensor.numel() for tensor in sources), intra_group.size()
    padded, device = (-(-numel // ranks) * ranks,), sources[0].device
    if torch.compiler.is_compiling():  # which plans memory itself
        flat = torch.empty(padded, dtype=torch.float32, device=device)
    else:
        flat = buffers.get("flat", padded, torch.float32, device)
    bucket_ops.flatten(sources, out=flat[:numel])
    flat[numel:] = 0
    if carry is not None:
        flat[:numel] += carry
        carry.zero_()
    return reduce_scatter(flat, group=intra_group).wait()


def _sum_over_nodes(own: Tensor, arguments: SumArguments, inter_group: dist.ProcessGroup) -> None:
    """Replace a share's sum of the node by that of all nodes."""
    compressed_all_reduce(
        own,
        arguments.codec,
        scale=arguments.scale,
        out=own,
        error=arguments.error,
        shard_error=arguments.shard_error,
        rounding=arguments.rounding,
        buffers=arguments.buffers,
        meter=arguments.meter,
        group=inter_group,
    ).wait()


def share_range(numel: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """The elements ``[begin, end)`` of which a rank of a node gets the node's sum."""
    share = -(-numel // ranks)
    return min(numel, share * rank), min(numel, share * (rank + 1))


def inter_shard_range(
    codec: Codec, numel: int, *, intra_group: dist.ProcessGroup, inter_group: dist.ProcessGroup
) -> tuple[int, int]:
    """The elements ``[begin, end)`` whose sum over the nodes a rank encodes."""
    begin, end = share_range(numel, rank=group_rank(intra_group), ranks=intra_group.size())
    ranks = {"rank": group_rank(inter_group), "world_size": inter_group.size()}
    first, last = shard_range(codec, end - begin, **ranks)
    return begin + first, begin + last
