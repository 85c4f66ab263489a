"""Collectives on uncompressed tensors, and sums of 16-bit values in float32."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.collectives.compressed_call import checked_sizes
from torch_commhook.collectives.futures import traced, two_stages
from torch_commhook.collectives.gloo_groups import group_rank, is_gloo, resolve_group
from torch_commhook.collectives.issuing import (
    Place,
    as_bytes,
    as_real,
    bytes_of_sum,
    issue_all_gather,
    issue_all_reduce,
    issue_all_to_all,
    issued,
    second_place,
    sums_in_place,
    when_good,
)
from torch_commhook.collectives.traced import (
    traced_all_gather,
    traced_all_reduce,
    traced_all_to_all,
    traced_real,
)
from torch_commhook.metrics import note_collective, ring_all_reduce_bytes, tensor_bytes
from torch_commhook.native.bucket_ops import BUCKET_DTYPES
from torch_commhook.spans import on_the_wire, timed, with_spans
from torch_commhook.wording import check_type

# ---- checks of the arguments of collectives on uncompressed tensors ------------------------------


def check_tensor(op: str, tensor: object, *, sparse: bool = False, rows: bool = False) -> None:
    """Refuse tensors of which a backend would silently send the wrong memory.

    Args:
        op: the collective's name in errors.
        sparse: whether sparse_coo is supported.
        rows: whether it must have a first dimension, along which it is split.

    Raises:
        TypeError: it is not a tensor, or has a layout that cannot be sent.
        ValueError: it has no memory, is not contiguous, or is a lazy conjugate or negative.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: tensor must be a torch.Tensor, got {type(tensor).__qualname__}")
    if sparse and tensor.layout is torch.sparse_coo:
        return
    if tensor.layout is not torch.strided:
        raise TypeError(f"{op}: tensor must be dense (torch.strided), got layout {tensor.layout}")
    if tensor.is_meta:
        raise ValueError(f"{op}: tensor must have memory, got one on the meta device")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op}: tensor must be contiguous, got sizes {list(tensor.shape)} with strides "
            f"{list(tensor.stride())}; pass tensor.contiguous()"
        )
    if rows and not tensor.dim():
        raise ValueError(f"{op}: tensor must have at least one dimension, got shape []")
    if torch.compiler.is_dynamo_compiling():
        return
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < needed:
        raise ValueError(f"{op}: tensor must have memory, got one whose storage has been freed")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{op}: tensor must be resolved, got a lazy conjugate or negative; pass "
            "tensor.resolve_conj().resolve_neg()"
        )


def check_timeout(op: str, timeout: object) -> None:
    """Raise a TypeError unless a timeout is a timedelta or None."""
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(
            f"{op}: timeout must be a timedelta or None, got {type(timeout).__qualname__}"
        )


def equal_shares(op: str, tensor: Tensor, world_size: int, hint: str = "") -> list[int]:
    """Equal numbers of rows for all ranks.

    Raises:
        ValueError: the number of rows is not a multiple of the number of ranks.
    """
    if tensor.shape[0] % world_size:
        raise ValueError(
            f"{op}: tensor must have a multiple of {world_size} rows, equal shares for the ranks, "
            f"{hint}got shape {list(tensor.shape)}"
        )
    return [tensor.shape[0] // world_size] * world_size


def result_tensor(op: str, tensor: Tensor, shape: Sequence[int], out: Tensor | None) -> Tensor:
    """A tensor of this shape, with the dtype and device of ``tensor``: ``out`` if given.

    Raises:
        TypeError: ``out`` is not a tensor, or of another dtype.
        ValueError: it has another shape or device, or is not contiguous.
    """
    if out is None:
        return tensor.new_empty(shape)
    if not isinstance(out, Tensor):
        raise TypeError(f"{op}: out must be a torch.Tensor, got {type(out).__qualname__}")
    if out.dtype != tensor.dtype:
        raise TypeError(f"{op}: out must have dtype {tensor.dtype}, got {out.dtype}")
    if out.shape != torch.Size(shape) or not out.is_contiguous() or out.device != tensor.device:
        raise ValueError(
            f"{op}: out must be contiguous, of shape {list(shape)} on {tensor.device}, got shape "
            f"{list(out.shape)} with strides {list(out.stride())} on {out.device}"
        )
    return out


# ---- the sum of a matrix's rows, each from one rank ----------------------------------------------


def sum_rows(rows: Tensor, out: Tensor) -> Tensor:
    """Sum the rows of a matrix in float32 and in order, and round the sum once.

    On devices other than the CPU the device chooses the order.

    Args:
        rows: contiguous, of shape ``(rows, columns)``, with at least one row; float32, float16 or
            bfloat16.
        out: contiguous, of shape ``(columns,)``, of any dtype that buckets have. It shares no
            memory with ``rows``. Written.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: the tensors are of another kind.
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


# ---- collectives on uncompressed tensors ---------------------------------------------------------


# Its name changes with torch; the old one warns.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
    if not torch.compiler.is_dynamo_compiling():
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
    if torch.compiler.is_dynamo_compiling():
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
    sends = _splits("input_split_sizes", input_split_sizes, tensor, world_size)
    if input_split_sizes is not None and sum(sends) != tensor.shape[0]:
        raise ValueError(
            f"all_to_all: input_split_sizes must add up to the tensor's {tensor.shape[0]} rows, "
            f"got {sends}"
        )
    gets = _splits("output_split_sizes", output_split_sizes, tensor, world_size)
    row_bytes = tensor_bytes(tensor) // max(tensor.shape[0], 1)
    own = group_rank(group)
    note_collective(row_bytes * (sum(sends) - sends[own]), row_bytes * (sum(gets) - gets[own]))
    if torch.compiler.is_dynamo_compiling():
        return traced_all_to_all(tensor, sends, gets, group)
    result = result_tensor("all_to_all", tensor, (sum(gets), *tensor.shape[1:]), out)
    return issue_all_to_all(tensor, sends, gets, result, group, timeout)


def _splits(name: str, given: Sequence[int] | None, tensor: Tensor, world_size: int) -> list[int]:
    if given is None:
        return equal_shares("all_to_all", tensor, world_size, f"or {name}, ")
    return checked_sizes(f"all_to_all: {name}", given, world_size, "numbers of rows")


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
    if torch.compiler.is_dynamo_compiling():
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

    ``place`` is that of the all-to-all; None for the next one, if it needs one.
    """
    ranks = group.size()
    if ranks == 1:
        return _C.as_future(tensor.clone(), "reduce_scatter")
    rows = tensor.shape[0] // ranks
    shares = tensor.new_empty((ranks, rows, *tensor.shape[1:]))
    splits = [rows] * ranks
    future = issue_all_to_all(tensor, splits, splits, shares.flatten(0, 1), group, place=place)
    return future.then(with_spans(lambda done: _sum(when_good(done, shares))))


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
    with on_the_wire() as span:
        _reduce_scatter(out, tensor, op=dist.ReduceOp.SUM if premultiplied else op, group=group)
        if premultiplied:
            out.mul_(scale)
        return span.until(_C.as_future(out, "reduce_scatter"))


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
    check_type("broadcast: src", src, "an int", int)
    if not 0 <= src < world_size:
        raise ValueError(f"broadcast: src must be a rank below {world_size}, got {src}")
    # All ranks but one must receive it. The backend chooses the senders: an equal share each.
    note_collective(round(tensor_bytes(tensor) * (world_size - 1) / world_size))
    if torch.compiler.is_dynamo_compiling():
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


# ---- sums of 16-bit values in float32 ------------------------------------------------------------
#
# An all-reduce in 16 bits rounds each partial sum to 16 bits, so its error grows with the number of
# ranks. Here each rank receives its segment from all ranks, sums it in float32, and rounds the sum
# once. The bytes on the wire are those of a ring all-reduce.


#: From this number of ranks on, 16-bit values are summed in float32. With fewer ranks a second
#: stage would cost connections for little: at 7 ranks a mean in bfloat16 is off by 0.0030, summed
#: in float32 by 0.0019.
LEAST_RANKS = 8


def padded_numel(numel: int, ranks: int) -> int:
    """The smallest number of elements of at least ``numel`` that ranks can divide evenly."""
    return -(-numel // ranks) * ranks


def wide_all_reduce(
    wire: Tensor,
    numel: int,
    segments: Tensor,
    *,
    group: dist.ProcessGroup,
    timeout: timedelta | None = None,
) -> torch.futures.Future[Tensor]:
    """Sum 16-bit values over all ranks: in float32, and rounded once.

    An all-to-all and an all-gather, run by :func:`two_stages`. All ranks get the same bits. Each
    rank sends ``4 (W - 1) / W`` bytes for each element of ``wire``.

    Args:
        wire: flat and contiguous, float16 or bfloat16, with :func:`padded_numel` elements. Written.
        numel: the number of elements of the result; later ones of ``wire`` are padding.
        segments: memory for as many elements, of the same dtype and device.

    Returns:
        A Future of the sum, flat: a view of ``wire``.
    """
    ranks = group.size()
    segment = wire.numel() // ranks
    sums = wire.new_empty(segment)

    def add_up(received: Tensor) -> Tensor:
        with timed(None, "encode"):
            return sum_rows(received.view(ranks, segment), sums)

    def issue_second(tensor: Tensor) -> torch.futures.Future[Tensor]:
        return issue_all_gather(tensor, wire.view(ranks, segment), group, timeout, place=place)

    # With a timeout of its own, the second one is no exchange, and has no place.
    place = None if timeout is not None else second_place(group, wire.device)
    if place is not None:
        # A rank sends its sum after it has received this rank's segment, whose memory takes it.
        place.form = str(wire.dtype)
        place.expect_gather([as_bytes(row) for row in wire.view(ranks, segment)])
    return two_stages(
        all_to_all(wire, out=segments, group=group, timeout=timeout),
        add_up,
        issue_second,
        lambda gathered: gathered.view(-1)[:numel],
        has_place=place is not None,
        second_bytes=(tensor_bytes(sums) * (ranks - 1),) * 2,
        device=wire.device,
        group=group,
    )
