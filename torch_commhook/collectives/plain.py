"""Collectives on uncompressed tensors."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.collectives.exchange import Place, bytes_of_sum, sums_in_place
from torch_commhook.collectives.futures import traced
from torch_commhook.collectives.gloo_groups import group_name, is_destroyed, is_gloo
from torch_commhook.collectives.group_place import group_rank
from torch_commhook.collectives.issuing import (
    as_real,
    issue_all_gather,
    issue_all_reduce,
    issue_all_to_all,
)
from torch_commhook.collectives.plain_arguments import (
    check_tensor,
    check_timeout,
    checked_sizes,
    equal_shares,
    result_tensor,
)
from torch_commhook.collectives.traced_ops import (
    traced_all_gather,
    traced_all_reduce,
    traced_all_to_all,
    traced_real,
)
from torch_commhook.collectives.works import issued, when_good
from torch_commhook.metrics import note_collective, ring_all_reduce_bytes, tensor_bytes
from torch_commhook.spans import continued, sent

# Its name changes with torch; the old one warns.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# An object: PyTorch types it as an int here, and as a group where it returns it.
_NON_MEMBER: object = dist.GroupMember.NON_GROUP_MEMBER


def resolve_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return the process group itself; the default group for None.

    Args:
        group: a process group, or None.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: this rank is not in the group, or the group has been destroyed.
        TypeError: ``group`` is not a process group.

    Example:
        >>> run_ranks(lambda rank: collectives.resolve_group(None).size(), 2)
        [2, 2]
    """
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch_commhook: a process group is needed; call "
                "torch.distributed.init_process_group() first, or pass process_group="
            )
        group = dist.group.WORLD
    if torch.compiler.is_compiling():  # it was checked where it was made
        return group  # type: ignore[return-value]
    if group is _NON_MEMBER:
        raise ValueError("torch_commhook: this rank is not a member of the given process group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"torch_commhook: process_group must be a ProcessGroup, got {_C.type_name(group)}"
        )
    if is_destroyed(group):
        raise ValueError(f"torch_commhook: process group {group_name(group)!r} has been destroyed")
    return group


def all_reduce(
    tensor: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> torch.futures.Future[Tensor]:
    """Return a Future of the sum of a tensor over all ranks.

    Args:
        tensor: contiguous, of a dtype that the group's backend reduces (Gloo supports bfloat16); or
            sparse_coo if the backend reduces it (Gloo does). For a sparse tensor, the bytes of this
            rank's entries are counted. Its contents are undefined afterwards.
        group: the process group; None for the default one.
        timeout: the operation's timeout in eager code; None for the group's.

    Returns:
        A Future of the sum. In eager code this is the same tensor, written in place. With one rank
        it is complete at once.

    Raises:
        TypeError: ``tensor`` is not a tensor, or has a layout that cannot be sent; the group
            returns no Work, or its Work no Future.
        ValueError: ``tensor`` is not contiguous, or on the meta device.
        RuntimeError: torch.distributed is not initialized; the backend does not support the dtype.

    Example:
        >>> def total(rank):
        ...     return collectives.all_reduce(torch.tensor([1.0, float(rank)])).wait()
        >>> run_ranks(total, 3)[0]
        tensor([3., 3.])
    """
    check_tensor("all_reduce", tensor, sparse=True)
    check_timeout("all_reduce", timeout)
    group = resolve_group(group)
    note_collective(*all_reduce_bytes(tensor, group, timeout))
    if not torch.compiler.is_compiling():
        return issue_all_reduce(tensor, group, timeout)
    return traced_all_reduce(tensor, group)


def all_reduce_bytes(
    tensor: Tensor, group: dist.ProcessGroup, timeout: timedelta | None = None
) -> tuple[int, int]:
    """Bytes that this rank sends and receives in an all-reduce."""
    if timeout is None and sums_in_place(tensor, group):
        nbytes = bytes_of_sum(tensor, group_rank(group), group.size())
        return nbytes, nbytes
    nbytes = ring_all_reduce_bytes(tensor_bytes(tensor), group.size())
    return nbytes, nbytes


def all_gather(
    tensor: Tensor,
    *,
    out: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> torch.futures.Future[Tensor]:
    """Return a Future of the tensors of all ranks.

    Args:
        tensor: contiguous, of the same shape and dtype on all ranks.
        out: memory for the result in eager code, or None. Written.
        group: the process group; None for the default one.
        timeout: as for :func:`all_reduce`.

    Returns:
        A Future of a new tensor, or ``out``, of shape ``(ranks, *tensor.shape)``.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`all_reduce`.

    Example:
        >>> def gather(rank):
        ...     return collectives.all_gather(torch.tensor([rank, 10 * rank])).wait()
        >>> run_ranks(gather, 3)[0]
        tensor([[ 0,  0],
                [ 1, 10],
                [ 2, 20]])
    """
    check_tensor("all_gather", tensor)
    check_timeout("all_gather", timeout)
    group = resolve_group(group)
    world_size = group.size()
    note_collective(tensor_bytes(tensor) * (world_size - 1))
    if torch.compiler.is_compiling():
        return traced_all_gather(tensor, group)
    out = result_tensor("all_gather", tensor, (world_size, *tensor.shape), out)
    return issue_all_gather(tensor, out, group, timeout)


def all_to_all(
    tensor: Tensor,
    *,
    input_split_sizes: Sequence[int] | None = None,
    output_split_sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> torch.futures.Future[Tensor]:
    """Send a piece of a tensor to each rank, and receive one from each.

    Args:
        tensor: contiguous; split along its first dimension.
        input_split_sizes: the number of rows for each rank. By default equal shares; the number of
            rows must then be a multiple of the number of ranks.
        output_split_sizes: the number of rows from each rank. By default equal shares of as many
            rows as ``tensor`` has.
        out: memory for the result in eager code, or None. Written.
        group: the process group; None for the default one.
        timeout: as for :func:`all_reduce`.

    Returns:
        A Future of a new tensor, or ``out``: the pieces in rank order.

    Raises:
        ValueError: the rows do not fit the splits; or as :func:`all_reduce`.
        TypeError, RuntimeError: as :func:`all_reduce`.

    Example:
        >>> def exchange(rank):
        ...     return collectives.all_to_all(torch.tensor([10 * rank, 10 * rank + 1])).wait()
        >>> run_ranks(exchange, 2)
        [tensor([ 0, 10]), tensor([ 1, 11])]
    """
    check_tensor("all_to_all", tensor, rows=True)
    check_timeout("all_to_all", timeout)
    group = resolve_group(group)
    world_size = group.size()
    if input_split_sizes is None:
        sends = equal_shares("all_to_all", tensor, world_size, "or input_split_sizes, ")
    else:
        sends = checked_sizes("input_split_sizes", input_split_sizes, world_size)
        if sum(sends) != tensor.shape[0]:
            raise ValueError(
                f"all_to_all: input_split_sizes must add up to the tensor's {tensor.shape[0]} "
                f"rows, got {sends}"
            )
    if output_split_sizes is None:
        gets = equal_shares("all_to_all", tensor, world_size, "or output_split_sizes, ")
    else:
        gets = checked_sizes("output_split_sizes", output_split_sizes, world_size)
    row_bytes = tensor_bytes(tensor) // max(tensor.shape[0], 1)
    own = group_rank(group)
    note_collective(row_bytes * (sum(sends) - sends[own]), row_bytes * (sum(gets) - gets[own]))
    if torch.compiler.is_compiling():
        return traced_all_to_all(tensor, sends, gets, group)
    result = result_tensor("all_to_all", tensor, (sum(gets), *tensor.shape[1:]), out)
    return issue_all_to_all(tensor, sends, gets, result, group, timeout)


def reduce_scatter(
    tensor: Tensor, *, group: dist.ProcessGroup | None = None
) -> torch.futures.Future[Tensor]:
    """Return a Future of this rank's share of the sum of a tensor over all ranks.

    Args:
        tensor: contiguous; its first dimension is a multiple of the number of ranks.
        group: the process group; None for the default one.

    Returns:
        A Future of a new tensor: the share of the rows with this rank's number.

    Raises:
        ValueError: the number of rows is not a multiple of the number of ranks; or as
            :func:`all_reduce`.
        TypeError, RuntimeError: as :func:`all_reduce`.

    Example:
        >>> def share(rank):
        ...     return collectives.reduce_scatter(torch.arange(4.0)).wait()
        >>> run_ranks(share, 2)
        [tensor([0., 2.]), tensor([4., 6.])]
    """
    check_tensor("reduce_scatter", tensor, rows=True)
    group = resolve_group(group)
    world_size = group.size()
    rows = equal_shares("reduce_scatter", tensor, world_size)[0]
    note_collective(tensor_bytes(tensor) // world_size * (world_size - 1))
    if torch.compiler.is_compiling():
        return traced(
            torch.ops._c10d_functional.reduce_scatter_tensor(
                tensor, "sum", world_size, group.group_name
            )
        )
    # Gloo's has no Future: the same traffic, in fixed order.
    if world_size == 1 or tensor.device.type == "cpu" or is_gloo(group, tensor.device.type):
        return sum_of_shares(tensor, group)
    result = tensor.new_empty((rows, *tensor.shape[1:]))
    return issued(
        lambda: _reduce_scatter(result, tensor, group=group, async_op=True),
        group,
        "reduce_scatter_tensor",
        result,
    )


def sum_of_shares(
    tensor: Tensor, group: dist.ProcessGroup, place: Place | None = None
) -> torch.futures.Future[Tensor]:
    """As :func:`reduce_scatter`, by an all-to-all; unchecked and uncounted, on any thread.

    Args:
        tensor, group: as there.
        place: the place of the all-to-all; None for the next one, if it needs one.
    """
    ranks = group.size()
    if ranks == 1:
        return _C.as_future(tensor.clone(), "reduce_scatter")
    rows = tensor.shape[0] // ranks
    shares = tensor.new_empty((ranks, rows, *tensor.shape[1:]))
    splits = [rows] * ranks
    future = issue_all_to_all(tensor, splits, splits, shares.flatten(0, 1), group, place=place)
    return future.then(continued(lambda done: _sum(when_good(done, shares))))


def issue_reduce_scatter(
    tensor: Tensor,
    out: Tensor,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup,
    *,
    scale: float,
) -> torch.futures.Future[Tensor]:
    """Sum a tensor over all ranks, as the backend does, and give each rank its share.

    Args:
        tensor: flat and contiguous, with equally many elements for each rank.
        out: flat and contiguous. Written.
        op: the backend's operation.
        group: the process group.
        scale: the factor of the sum, if the backend does not support ``op``.

    Returns:
        A Future of ``out``. On the CPU, where Gloo's Works have no Future, it is complete.
    """
    ranks = group.size()
    note_collective(tensor_bytes(tensor) // ranks * (ranks - 1))
    # A group around Gloo's, such as one that counts, passes its Works on.
    if tensor.device.type != "cpu" and not is_gloo(group, tensor.device.type):
        return issued(
            lambda: _reduce_scatter(out, tensor, op=op, group=group, async_op=True),
            group,
            "reduce_scatter_tensor",
            out,
        )
    premultiplied = not (op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG)

    def run() -> Any:
        _reduce_scatter(out, tensor, op=dist.ReduceOp.SUM if premultiplied else op, group=group)
        return _C.as_future(out.mul_(scale) if premultiplied else out, "reduce_scatter")

    return sent(run)


def broadcast(
    tensor: Tensor, *, src: int = 0, group: dist.ProcessGroup | None = None
) -> torch.futures.Future[Tensor]:
    """Return a Future of one rank's tensor on every rank.

    Args:
        tensor: contiguous, of the same shape and dtype on all ranks. Its contents are undefined
            afterwards.
        src: the rank within the group that sends its tensor.
        group: the process group; None for the default one.

    Returns:
        A Future of that rank's tensor. In eager code this is the same tensor, written in place.

    Raises:
        ValueError: ``src`` is not a rank; or as :func:`all_reduce`.
        TypeError, RuntimeError: as :func:`all_reduce`.

    Example:
        >>> def share(rank):
        ...     return collectives.broadcast(torch.tensor([rank]), src=1).wait()
        >>> run_ranks(share, 2)
        [tensor([1]), tensor([1])]
    """
    check_tensor("broadcast", tensor)
    group = resolve_group(group)
    world_size = group.size()
    if not isinstance(src, int) or isinstance(src, bool):
        raise TypeError(f"broadcast: src must be an int, got {type(src).__qualname__}")
    if not 0 <= src < world_size:
        raise ValueError(f"broadcast: src must be a rank below {world_size}, got {src}")
    # All ranks but one must receive it. The backend chooses the senders: an equal share each.
    note_collective(round(tensor_bytes(tensor) * (world_size - 1) / world_size))
    if torch.compiler.is_compiling():
        functional = torch.ops._c10d_functional
        return traced_real(tensor, lambda real: functional.broadcast(real, src, group.group_name))
    if world_size == 1:
        return _C.as_future(tensor, "broadcast")
    return issued(
        lambda: dist.broadcast(as_real(tensor), group_src=src, group=group, async_op=True),
        group,
        "broadcast",
        tensor,
    )


def _sum(shares: Tensor) -> Tensor:
    """Sum over the first dimension, rounded once."""
    dtype = torch.float32 if shares.dtype in (torch.float16, torch.bfloat16) else shares.dtype
    return shares.sum(0, dtype=dtype).to(shares.dtype)
