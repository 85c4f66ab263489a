"""Reduce-scatters and all-gathers of codecs' messages: each rank has a chunk of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.codecs.base import Codec, error_for, keep_error
from torch_commhook.collectives.compressed_call import (
    CompressedCall,
    MessageBuffers,
    SumArguments,
    begin_measuring,
    check_arguments,
    check_out,
    checked_sizes,
    listed_tensors,
)
from torch_commhook.collectives.futures import on_wire, then_on_side_stream
from torch_commhook.collectives.gloo_groups import check_place, group_rank, resolve_group
from torch_commhook.metrics import CallMeter, note_collective
from torch_commhook.spans import timed

#: What sizes of chunks must be.
_NUMBERS = "numbers of at least 0"


def chunk_sizes(numel: int, world_size: int) -> list[int]:
    """The number of elements of each rank, divided as ``torch.chunk`` and FSDP do.

    Each rank has ``ceil(numel / world_size)``; the last ones have fewer, or none.
    """
    most = -(-numel // world_size)
    return [min(numel, most * (rank + 1)) - min(numel, most * rank) for rank in range(world_size)]


def compressed_reduce_scatter(
    tensors: Tensor | Sequence[Tensor],
    codec: Codec,
    *,
    sizes: Sequence[int] | None = None,
    scale: float = 1.0,
    out: Tensor | Sequence[Tensor] | None = None,
    error: Tensor | None = None,
    error_decay: float = 1.0,
    rounding: Tensor | None = None,
    buffers: MessageBuffers | None = None,
    meter: CallMeter | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> torch.futures.Future[Tensor]:
    """Return a Future of this rank's chunk of ``scale`` times the sum over all ranks.

    Each rank encodes its values once, in one message for each rank, and sends the messages. It
    decodes the messages that it receives, and sums them in float32 in rank order. It does not
    encode the sum, so the result has the error of one encoding. Each rank sends the messages of all
    chunks but its own, about ``(W - 1) / W`` of a message of all values.

    Any codec works. One that sends some of the values (``topk``, ``randomk``) takes its share of
    each chunk; ``chunk_topk`` divides each into its own, smaller chunks.

    On the CPU, and on CUDA over NCCL, the call does not wait for the wire. If ranks give different
    sizes or codecs, the backend decides what happens: Gloo may end the process.

    Args:
        tensors: a tensor or a list of them: dense, of a bucket's dtypes, on one device, with the
            same sizes on all ranks. They are encoded before the call returns.
        codec: the codec, the same on all ranks.
        sizes: the number of elements of each rank's chunk, in rank order, the same on all ranks; 0
            is allowed. They add up to the tensors' elements. By default all chunks have
            ``ceil(n / W)`` of n elements, and the last ones fewer or none, as with ``torch.chunk``.
        scale: the factor of the sum.
        out: a tensor or a list of them with as many elements as this rank's chunk. Written. They
            may be part of ``tensors``. By default a new flat tensor of the first tensor's dtype.
        error: the errors of earlier calls for this rank's values of all chunks: float32 or
            bfloat16, flat, one element per value. Added to the values, and replaced by this call's
            errors.
        error_decay: the factor by which the error is multiplied after it is written, in (0, 1].
        rounding: for codecs with random numbers (``Codec.is_random``): int64 of shape (2,): seed
            and step. With the exchange ``"all_reduce"`` the same on all ranks.
        buffers: memory that the next call reuses.
        meter: records the duration of the stages, and requests error measurements, in eager code.
        group: the process group; None for the default one.
        timeout: the timeout in eager code, on all ranks or on none; None for the group's.

    Returns:
        A Future of ``out``; of its first tensor if it is a list.

    Raises:
        TypeError, ValueError: tensors, codec, sizes or memory do not fit, as for
            ``Codec.encode``; the group does not know its rank.
        RuntimeError: torch.distributed is not initialized; the backend raised it.

    Example:
        >>> def mean_of_chunk(rank):
        ...     values = torch.cat([torch.ones(256), torch.full((256,), 3.0)])
        ...     codec = codecs.blockwise(bits=8)
        ...     return collectives.compressed_reduce_scatter(values, codec, scale=1 / 2).wait()
        >>> [chunk[:2] for chunk in run_ranks(mean_of_chunk, 2)]
        [tensor([1., 1.]), tensor([3., 3.])]
    """
    op = "compressed_reduce_scatter"
    sources = listed_tensors(op, "tensors", tensors)
    numel = sum(tensor.numel() for tensor in sources)
    group = _checked_group(op, group)
    if sizes is None:
        counts = chunk_sizes(numel, group.size())
    else:
        counts = checked_sizes(f"{op}: sizes", sizes, group.size(), _NUMBERS)
        if sum(counts) != numel:
            raise ValueError(f"{op}: sizes must add up to {numel}, as tensors have, got {counts}")
    own = counts[group_rank(group)]
    out = sources[0].new_empty(own) if out is None else out
    destinations = listed_tensors(op, "out", out)
    check_out(op, destinations, own, "this rank's chunk")
    arguments = SumArguments(
        codec, scale, error, None, rounding, buffers, meter, timeout, error_decay
    )
    check_arguments(op, arguments, numel, sources[0].device, group, encodes_once=True)
    call = _ReduceScatter(arguments, destinations, counts, group)
    used = (sources, destinations, error, rounding)
    with torch.no_grad(), call.on_side_stream(used):
        message = call.buffer("message", sum(call.nbytes))
        call.encode(sources, message, counts, error)
        first = call.issue_all_to_all(message, call.nbytes, group)
        return then_on_side_stream(
            on_wire(first, call.meter, call.device), call.decode, call.device
        )


def compressed_all_gather(
    tensors: Tensor | Sequence[Tensor],
    codec: Codec,
    *,
    sizes: Sequence[int] | None = None,
    out: Tensor | Sequence[Tensor] | None = None,
    error: Tensor | None = None,
    error_decay: float = 1.0,
    rounding: Tensor | None = None,
    buffers: MessageBuffers | None = None,
    meter: CallMeter | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> torch.futures.Future[Tensor]:
    """Return a Future of the chunks of all ranks, as a codec restores them.

    Each rank encodes its chunk once and sends the message to all. All ranks get the same bits: a
    rank's own chunk comes from its message, too. Each rank sends ``W - 1`` messages, each padded to
    the longest one.

    Args:
        tensors: this rank's chunk, a tensor or a list of them: dense, of a bucket's dtypes, on one
            device. They are encoded before the call returns.
        codec: the codec, the same on all ranks.
        sizes: the number of elements of each rank's chunk, in rank order, the same on all ranks; 0
            is allowed. By default all ranks have equally many.
        out: a tensor or a list of them with as many elements as the chunks of all ranks. Written.
            They may share memory with ``tensors``. By default a new flat tensor of the first
            tensor's dtype.
        error: the errors of earlier calls for this rank's chunk: float32 or bfloat16, flat, one
            element per value. Added to the chunk, and replaced by this call's errors.
        error_decay, rounding, buffers, meter, group, timeout: as for
            :func:`compressed_reduce_scatter`.

    Returns:
        A Future of ``out``; of its first tensor if it is a list.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`compressed_reduce_scatter`.

    Example:
        >>> def gather(rank):
        ...     chunk = torch.full((256,), float(rank))
        ...     return collectives.compressed_all_gather(chunk, codecs.fp8()).wait()
        >>> run_ranks(gather, 2)[0][::128]
        tensor([0., 0., 1., 1.])
    """
    op = "compressed_all_gather"
    sources = listed_tensors(op, "tensors", tensors)
    numel = sum(tensor.numel() for tensor in sources)
    group = _checked_group(op, group)
    counts = [numel] * group.size()
    if sizes is not None:
        counts = checked_sizes(f"{op}: sizes", sizes, group.size(), _NUMBERS)
        own = group_rank(group)
        if counts[own] != numel:
            raise ValueError(
                f"{op}: sizes must give rank {own} the {numel} elements of its tensors, "
                f"got {counts}"
            )
    out = sources[0].new_empty(sum(counts)) if out is None else out
    destinations = listed_tensors(op, "out", out)
    check_out(op, destinations, sum(counts), "the chunks of all ranks")
    arguments = SumArguments(
        codec, 1.0, error, None, rounding, buffers, meter, timeout, error_decay
    )
    check_arguments(op, arguments, numel, sources[0].device, group, encodes_once=True)
    call = _AllGather(arguments, destinations, counts, group)
    used = (sources, destinations, error, rounding)
    with torch.no_grad(), call.on_side_stream(used):
        padded = call.buffer("message", max(call.nbytes))
        message = padded[: call.nbytes[call.rank]]
        call.encode(sources, message, [counts[call.rank]], error)
        note_collective(*call.gathered_bytes(call.nbytes, group))
        first = call.issue_gather("gathered", padded, call.nbytes, group)
        return then_on_side_stream(
            on_wire(first, call.meter, call.device), call.decode, call.device
        )


def _checked_group(op: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = resolve_group(group)
    check_place(op, group)
    return group


class _ChunkCall(CompressedCall):
    """A collective that encodes once.

    Attributes:
        counts: the number of elements of each rank's chunk.
        nbytes: the size of each rank's chunk's message.
    """

    def __init__(
        self,
        arguments: SumArguments,
        destinations: list[Tensor],
        counts: list[int],
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(arguments, destinations, group)
        self.scale = arguments.scale
        self.rounding = arguments.rounding
        self.counts = counts
        self.nbytes = [part.nbytes for part in self.codec.chunks(counts)]

    def encode(
        self, sources: list[Tensor], message: Tensor, counts: list[int], error: Tensor | None
    ) -> None:
        measured = begin_measuring(self.meter, sources, error)
        with timed(self.meter, "encode"):
            if len(message):
                lost = error_for(self.codec, error)
                self.codec.encode_chunks(
                    sources, message, counts, error=lost, rounding=self.rounding
                )
                keep_error(error, lost)
        if self.meter is not None and measured is not None:
            measured.note(self.meter, self.codec, error, self.rounding)
        self.decay_own(error, self.rounding)

    @property
    def common_rounding(self) -> Tensor | None:
        """The ``rounding`` with which other ranks' messages are decoded."""
        return self.rounding if self.codec.exchange == "all_reduce" else None


class _ReduceScatter(_ChunkCall):
    def decode(self, done: torch.futures.Future[Tensor]) -> Tensor:
        received = done.value()
        with self.later_stage("decode"):
            if self.counts[self.rank]:
                self.codec.decode_sum(
                    received.view(self.world_size, self.nbytes[self.rank]),
                    self.destinations,
                    scale=self.scale,
                    rounding=self.common_rounding,
                )
        return self.destinations[0]


class _AllGather(_ChunkCall):
    def decode(self, done: torch.futures.Future[Tensor]) -> Tensor:
        gathered = done.value()
        with self.later_stage("decode"):
            if sum(self.counts):
                messages = self.without_padding("messages", gathered, self.nbytes)
                self.codec.decode_chunks(
                    messages, self.destinations, self.counts, rounding=self.common_rounding
                )
        return self.destinations[0]
