"""Sums of encoded tensors, which an all-reduce cannot compute; in whole or in chunks of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.codecs.base import Codec, decay_error, error_for, keep_error
from torch_commhook.codecs.block_codec import BlockCodec
from torch_commhook.collectives.compressed_call import (
    CompressedCall,
    MessageBuffers,
    SumArguments,
    check_arguments,
    checked_sizes,
    destinations_for,
    listed_tensors,
)
from torch_commhook.collectives.futures import completed, two_stages
from torch_commhook.collectives.gloo_groups import (
    check_place,
    group_rank,
    group_timeout,
    resolve_group,
)
from torch_commhook.collectives.issuing import issue_all_reduce, second_place
from torch_commhook.collectives.plain import all_reduce_bytes
from torch_commhook.collectives.symmetric import SHARING_DEVICES, symmetric_buffers
from torch_commhook.collectives.symmetric_memory import SymmetricBuffers
from torch_commhook.collectives.traced import traced_all_reduce
from torch_commhook.metrics import CallMeter, note_collective
from torch_commhook.native.bucket_ops import check_flat
from torch_commhook.spans import timed
from torch_commhook.wording import warn_user


def compressed_all_reduce(
    tensors: Tensor | Sequence[Tensor],
    codec: Codec,
    *,
    scale: float = 1.0,
    out: Tensor | Sequence[Tensor] | None = None,
    error: Tensor | None = None,
    sum_error: Tensor | None = None,
    error_decay: float = 1.0,
    rounding: Tensor | None = None,
    buffers: MessageBuffers | None = None,
    meter: CallMeter | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    shard_error: Tensor | None = None,
) -> torch.futures.Future[Tensor]:
    """Return a Future of ``scale`` times the sum of tensors over all ranks, sent compressed.

    The algorithm depends on the codec's messages (``Codec.exchange``):

    * ``"all_to_all"``: each rank encodes one segment of its values for each rank, and sends the
      segments. It decodes the segments that it receives, sums them in float32, encodes the sum, and
      sends it to all ranks, which decode it. Values are encoded twice, at any number of ranks. Each
      rank sends about ``2 (W - 1) / W`` messages.
    * ``"all_gather"``: each rank receives all messages, and sums their values. Each rank sends
      ``W - 1`` messages, so traffic grows with the number of ranks.
    * ``"all_reduce"``: an all-reduce sums the messages themselves.

    All ranks get the same bits. If ranks give different sizes, up to 16 of them get an error on the
    CPU; otherwise the backend decides what happens.

    On the CPU over Gloo no stage waits for another bucket. CUDA tensors are encoded, sent and
    decoded on a separate stream, so that the current one continues; over NCCL only that stream
    waits. Over other groups the call waits for the first stage, and with CUDA tensors for all
    stages. In a step of an attached hook the second stage may wait for the next bucket instead.

    Over NCCL on one machine, block codecs use memory that the GPUs share, if NVLink connects all of
    them and the caller gives ``buffers``. The bits are the same. A rank that waits for another
    longer than ``timeout`` writes NaNs, and its next call with these buffers raises.
    ``COMMHOOK_SYMMETRIC_MEMORY=0`` disables this.

    If a first stage raises on a rank, that rank cannot issue the second stage, and the other ranks
    wait for it until the group's timeout. Attached hooks begin anew.

    Args:
        tensors: a tensor or a list of them: dense, of a bucket's dtypes, on one device, with the
            same sizes on all ranks. They are encoded before the call returns.
        codec: the codec, the same on all ranks.
        scale: the factor of the sum.
        out: a tensor or a list of them with the same total number of elements. Written. By default
            a new flat tensor of the first tensor's dtype.
        error: the errors of earlier calls for this rank's values: float32 or bfloat16, flat, one
            element per value. Added to the values, and replaced by this call's errors.
        sum_error: the same for the sum that this rank encodes: float32 or bfloat16, with the
            elements of ``segment_range``. Only used with the exchange ``"all_to_all"``.
        error_decay: the factor by which both errors are multiplied after they are written, in
            (0, 1].
        rounding: for codecs with random numbers (``Codec.is_random``): int64 of shape (2, 2), rows
            of seed and step: the first for this rank's values, the second for its sum. With the
            exchange ``"all_reduce"`` the first must be the same on all ranks. ``topk``,
            ``chunk_topk``, ``randomk`` and ``error_decay`` use it to round a bfloat16 error at
            random.
        buffers: memory that the next call reuses.
        meter: records the duration of the stages, and requests error measurements, in eager code.
        group: the process group; None for the default one.
        timeout: the timeout of each stage in eager code, on all ranks or on none; None for the
            group's.
        shard_error: the deprecated name of ``sum_error``.

    Returns:
        A Future of ``out``; of its first tensor if it is a list.

    Raises:
        TypeError, ValueError: tensors, codec or memory do not fit, as for ``Codec.encode``; the
            group does not know its rank, for a codec with segments.
        RuntimeError: torch.distributed is not initialized; the backend raised it.

    Example:
        >>> def mean(rank):
        ...     values = torch.full((512,), 1.0 + 2 * rank)
        ...     codec = codecs.blockwise(bits=8)
        ...     return collectives.compressed_all_reduce(values, codec, scale=1 / 2).wait()
        >>> run_ranks(mean, 2)[0][:4]
        tensor([2., 2., 2., 2.])
    """
    if shard_error is not None:
        what = "compressed_all_reduce: shard_error is deprecated: use sum_error"
        warn_user(what, DeprecationWarning)
        sum_error = shard_error
    sources = listed_tensors("compressed_all_reduce", "tensors", tensors)
    numel = sum(tensor.numel() for tensor in sources)
    destinations = destinations_for("compressed_all_reduce", out, sources, numel)
    group = resolve_group(group)
    if isinstance(codec, Codec) and codec.exchange == "all_to_all":  # others are refused below
        check_place("compressed_all_reduce", group)
    arguments = SumArguments(
        codec, scale, error, sum_error, rounding, buffers, meter, timeout, error_decay
    )
    check_arguments("compressed_all_reduce", arguments, numel, sources[0].device, group)
    return sum_compressed(sources, destinations, arguments, group)


def sum_compressed(
    sources: list[Tensor],
    destinations: list[Tensor],
    arguments: SumArguments,
    group: dist.ProcessGroup,
) -> torch.futures.Future[Tensor]:
    """As :func:`compressed_all_reduce`, which describes the arguments, without its checks."""
    numel = sum(tensor.numel() for tensor in sources)
    call = _CompressedSum(arguments, destinations, numel, group)
    error = arguments.error
    start = call.start()
    used = (sources, destinations, error, arguments.sum_error, arguments.rounding)
    with torch.no_grad(), call.on_side_stream(used):
        return start(sources, error, group)


# Inductor does not see that a view of another dtype shares memory, and reuses that memory while a
# collective still needs it. So compiled code copies.


@torch.library.custom_op("commhook::floats_of_bytes", mutates_args=())
def floats_of_bytes(message: Tensor) -> Tensor:
    """The float32 numbers in a message."""
    check_flat("floats_of_bytes", "message", message, (torch.uint8,))
    if len(message) % 4 or message.storage_offset() % 4:
        raise ValueError(
            f"floats_of_bytes: message must hold 4 bytes for each number and begin at a multiple "
            f"of 4, got {len(message)} bytes from {message.storage_offset()} on"
        )
    return message.view(torch.float32).clone()


@torch.library.custom_op("commhook::bytes_of_floats", mutates_args=())
def bytes_of_floats(values: Tensor) -> Tensor:
    """A message of float32 numbers."""
    check_flat("bytes_of_floats", "values", values, (torch.float32,))
    return values.view(torch.uint8).clone()


floats_of_bytes.register_fake(lambda m: m.new_empty(m.numel() // 4, dtype=torch.float32))
bytes_of_floats.register_fake(lambda v: v.new_empty(v.numel() * 4, dtype=torch.uint8))


def compressed_bytes(codec: Codec, numel: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """Bytes that this rank sends and receives in a sum of ranks that exchange messages."""
    ranks = group.size()
    others = ranks - 1
    if codec.exchange == "all_gather":
        return codec.nbytes(numel) * others, codec.nbytes(numel) * others
    if codec.exchange == "all_reduce":
        return all_reduce_bytes(
            torch.empty(codec.nbytes(numel) // 4, dtype=torch.float32, device="cpu"), group
        )
    sizes = [segment.nbytes for segment in codec.segments(numel, ranks)]
    own = sizes[group_rank(group)]
    # Its parts of the first stage, and in the second the sum that it encodes.
    both = sum(sizes) - own + own * others
    return both, both


class _CompressedSum(CompressedCall):
    """One running sum."""

    def __init__(
        self,
        arguments: SumArguments,
        destinations: list[Tensor],
        numel: int,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(arguments, destinations, group)
        rounding = arguments.rounding
        self.numel = numel
        self.own_buffers = arguments.buffers
        self.scale = arguments.scale
        self.sum_error = arguments.sum_error
        #: For this rank's values, and for its sum.
        self.rounding = (None, None) if rounding is None else (rounding[0], rounding[1])

    def start(self) -> Callable[..., torch.futures.Future[Tensor]]:
        """What starts it, of the tensors, their errors and the group."""
        start = {
            "all_to_all": self._exchange_segments,
            "all_gather": self._gather,
            "all_reduce": self._add_up,
        }.get(self.codec.exchange)
        if start is None:
            raise ValueError(
                "compressed_all_reduce: the codec's exchange must be 'all_to_all', 'all_gather' or "
                f"'all_reduce', got {self.codec.exchange!r}"
            )
        return start

    def _encode(
        self,
        sources: list[Tensor],
        error: Tensor | None,
        segments: int,
        message: Tensor | None = None,
    ) -> Tensor:
        own = message
        if own is None:
            own = self.buffer("message", self.codec.nbytes(self.numel, segments))

        def encode(values: list[Tensor], **given: Any) -> None:
            self.codec.encode(values, own, segments=segments, **given)

        self.encode(sources, error, self.rounding[0], encode)
        return own

    def _encode_sum(self, reduce: Callable[..., None], messages: Any, message: Tensor) -> None:
        """Encode the sum of this rank's segments, with a method of the codec."""
        with self.later_stage("encode"):
            lost, rounding = error_for(self.codec, self.sum_error), self.rounding[1]
            given: Any = {"scale": self.scale, "error": lost, "rounding": rounding}
            reduce(messages, message, self.segment.numel, **given)
            keep_error(self.sum_error, lost)
            if self.sum_error is not None and self.error_decay != 1.0:
                decay_error(self.sum_error, self.error_decay, rounding)

    # ---- messages that an all-reduce sums --------------------------------------------------------

    def _add_up(
        self, sources: list[Tensor], error: Tensor | None, group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        message = self._encode(sources, error, 1)
        values = floats_of_bytes(message) if self.is_traced else message.view(torch.float32)
        note_collective(*all_reduce_bytes(values, group, self.timeout))
        first = (
            traced_all_reduce(values, group)
            if self.is_traced
            else issue_all_reduce(values, group, self.timeout, place=self.places[0])
        )

        def decode(total: Tensor) -> None:
            if self.scale != 1.0:
                total = total * self.scale
            summed = bytes_of_floats(total) if self.is_traced else total.view(torch.uint8)
            self.codec.decode(summed, self.destinations, rounding=self.rounding[0])

        return self.then_decode(first, decode)

    # ---- messages that all ranks receive ---------------------------------------------------------

    def _gather(
        self, sources: list[Tensor], error: Tensor | None, group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        message = self._encode(sources, error, 1)
        sizes = [len(message)] * self.world_size
        note_collective(*self.gathered_bytes(sizes, group))
        first = self.issue_gather("gathered", message, sizes, group, place=self.places[0])

        def decode(gathered: Tensor) -> None:
            messages = gathered.view(self.world_size, -1)
            self.codec.decode_sum(messages, self.destinations, scale=self.scale)

        return self.then_decode(first, decode)

    # ---- messages in segments --------------------------------------------------------------------

    def _exchange_segments(
        self, sources: list[Tensor], error: Tensor | None, group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        segments = self.codec.segments(self.numel, self.world_size)
        if not isinstance(segments, list) or len(segments) != self.world_size:
            raise ValueError(
                f"compressed_all_reduce: segments({self.numel}, {self.world_size}) of "
                f"{self.codec} must return a list with a Segment for each rank, got {segments!r}"
            )
        self.sizes = [segment.nbytes for segment in segments]
        self.segment = segments[self.rank]
        if self.device.type in SHARING_DEVICES and not self.is_traced:
            shared = symmetric_buffers(self.own_buffers, self.codec, segments, self.device, group)
            if shared is not None:
                return self._share_segments(sources, error, shared, group)
        message = self._encode(sources, error, self.world_size)
        sizes, place = self.sizes, self.places[1] or second_place(group, self.device)
        if place is not None:
            self.expect_gather("sums", sizes, place, group)
        return two_stages(
            self.issue_all_to_all(message, sizes, group),
            self._reduce,
            lambda padded: self.issue_gather(
                "sums", padded, sizes, group, is_second=True, place=place
            ),
            self._decode,
            has_place=place is not None,
            second_bytes=self.gathered_bytes(sizes, group),
            device=self.device,
            group=group,
            meter=self.meter,
        )

    def _share_segments(
        self,
        sources: list[Tensor],
        error: Tensor | None,
        shared: SymmetricBuffers,
        group: dist.ProcessGroup,
    ) -> torch.futures.Future[Tensor]:
        """As :meth:`_exchange_segments`, with shared memory: no collective, and two barriers."""
        codec, own_bytes = self.codec, self.segment.nbytes
        assert isinstance(codec, BlockCodec)
        views = shared.views(self.sizes)
        timeout = group_timeout(group, self.device) if self.timeout is None else self.timeout
        # Ranks read of each other as much as they would send, without padding.
        to_others, from_others = sum(self.sizes) - own_bytes, own_bytes * (self.world_size - 1)
        note_collective(to_others, from_others)
        note_collective(from_others, to_others)
        try:
            self._encode(sources, error, self.world_size, views.message)
            with timed(self.meter, "wire"):
                shared.barrier(timeout)
            reduce = partial(codec.reduce_segments, failed=shared.failed)
            self._encode_sum(reduce, views.segments, views.sum)
            with timed(self.meter, "wire"):
                shared.barrier(timeout)
            with self.later_stage("decode"):
                message = self.buffer("message", sum(self.sizes))
                shared.gather(views.sums, message)
                codec.decode(message, self.destinations, segments=self.world_size)
        except BaseException:
            with suppress(RuntimeError):  # from a device that cannot continue
                shared.give_up()
            raise
        return completed(self.destinations[0])

    def _reduce(self, received: Tensor) -> Tensor:
        """The message of the sum of this rank's segments, as long as the longest one."""
        padded, nbytes = self.buffer("sum", max(self.sizes)), self.segment.nbytes
        messages = received.view(self.world_size, nbytes)
        self._encode_sum(self.codec.reduce, messages, padded[:nbytes])
        return padded

    def _decode(self, gathered: Tensor) -> Tensor:
        with self.later_stage("decode"):
            # The buffer of a message that has been sent by now.
            message = self.without_padding("message", gathered, self.sizes)
            self.codec.decode(message, self.destinations, segments=self.world_size)
        return self.destinations[0]


# ---- reduce-scatters and all-gathers: each rank has a chunk of a bucket --------------------------


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
    group = resolve_group(group)
    check_place(op, group)
    if sizes is None:
        counts = chunk_sizes(numel, group.size())
    else:
        counts = checked_sizes(f"{op}: sizes", sizes, group.size(), _NUMBERS)
        if sum(counts) != numel:
            raise ValueError(f"{op}: sizes must add up to {numel}, as tensors have, got {counts}")
    own = counts[group_rank(group)]
    destinations = destinations_for(op, out, sources, own, "this rank's chunk")
    arguments = SumArguments(
        codec, scale, error, None, rounding, buffers, meter, timeout, error_decay
    )
    check_arguments(op, arguments, numel, sources[0].device, group, encodes_once=True)
    call = _ChunkCall(arguments, destinations, counts, group)
    used = (sources, destinations, error, rounding)
    with torch.no_grad(), call.on_side_stream(used):
        message = call.buffer("message", sum(call.nbytes))
        call.encode_chunks(sources, message, counts, error)
        return call.then_decode(call.issue_all_to_all(message, call.nbytes, group), call.decode_sum)


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
    group = resolve_group(group)
    check_place(op, group)
    counts = [numel] * group.size()
    if sizes is not None:
        counts = checked_sizes(f"{op}: sizes", sizes, group.size(), _NUMBERS)
        own = group_rank(group)
        if counts[own] != numel:
            raise ValueError(
                f"{op}: sizes must give rank {own} the {numel} elements of its tensors, "
                f"got {counts}"
            )
    destinations = destinations_for(op, out, sources, sum(counts), "the chunks of all ranks")
    arguments = SumArguments(
        codec, 1.0, error, None, rounding, buffers, meter, timeout, error_decay
    )
    check_arguments(op, arguments, numel, sources[0].device, group, encodes_once=True)
    call = _ChunkCall(arguments, destinations, counts, group)
    used = (sources, destinations, error, rounding)
    with torch.no_grad(), call.on_side_stream(used):
        padded = call.buffer("message", max(call.nbytes))
        message = padded[: call.nbytes[call.rank]]
        call.encode_chunks(sources, message, [counts[call.rank]], error)
        note_collective(*call.gathered_bytes(call.nbytes, group))
        return call.then_decode(
            call.issue_gather("gathered", padded, call.nbytes, group), call.decode_chunks
        )


class _ChunkCall(CompressedCall):
    """A collective that encodes once; ``counts`` and ``nbytes`` are those of each rank's chunk."""

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

    def encode_chunks(
        self, sources: list[Tensor], message: Tensor, counts: list[int], error: Tensor | None
    ) -> None:
        def encode(sources: list[Tensor], **given: Any) -> None:
            if len(message):
                self.codec.encode_chunks(sources, message, counts, **given)

        self.encode(sources, error, self.rounding, encode)

    @property
    def common_rounding(self) -> Tensor | None:
        """The ``rounding`` with which other ranks' messages are decoded."""
        return self.rounding if self.codec.exchange == "all_reduce" else None

    def decode_sum(self, received: Tensor) -> None:
        if self.counts[self.rank]:
            self.codec.decode_sum(
                received.view(self.world_size, self.nbytes[self.rank]),
                self.destinations,
                scale=self.scale,
                rounding=self.common_rounding,
            )

    def decode_chunks(self, gathered: Tensor) -> None:
        if sum(self.counts):
            messages = self.without_padding("messages", gathered, self.nbytes)
            self.codec.decode_chunks(
                messages, self.destinations, self.counts, rounding=self.common_rounding
            )
