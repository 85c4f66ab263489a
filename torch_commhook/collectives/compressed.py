"""Sums of encoded tensors, which an all-reduce cannot compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.codecs.base import Codec, error_for, keep_error
from torch_commhook.codecs.block_codec import BlockCodec
from torch_commhook.collectives.compressed_call import (
    CompressedCall,
    MessageBuffers,
    SumArguments,
    begin_measuring,
    check_arguments,
    check_out,
    listed_tensors,
)
from torch_commhook.collectives.futures import completed, on_wire, then_on_side_stream, two_stages
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


def compressed_all_reduce(
    tensors: Tensor | Sequence[Tensor],
    codec: Codec,
    *,
    scale: float = 1.0,
    out: Tensor | Sequence[Tensor] | None = None,
    error: Tensor | None = None,
    shard_error: Tensor | None = None,
    error_decay: float = 1.0,
    rounding: Tensor | None = None,
    buffers: MessageBuffers | None = None,
    meter: CallMeter | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> torch.futures.Future[Tensor]:
    """Return a Future of ``scale`` times the sum of tensors over all ranks, sent compressed.

    The algorithm depends on the codec's messages (``Codec.exchange``):

    * ``"all_to_all"``: each rank encodes one shard of its values for each rank, and sends the
      shards. It decodes the shards that it receives, sums them in float32, encodes the sum, and
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
        shard_error: the same for the sum that this rank encodes: float32 or bfloat16, with the
            elements of ``shard_range``. Only used with the exchange ``"all_to_all"``.
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

    Returns:
        A Future of ``out``; of its first tensor if it is a list.

    Raises:
        TypeError, ValueError: tensors, codec or memory do not fit, as for ``Codec.encode``; the
            group does not know its rank, for a codec with shards.
        RuntimeError: torch.distributed is not initialized; the backend raised it.

    Example:
        >>> def mean(rank):
        ...     values = torch.full((512,), 1.0 + 2 * rank)
        ...     codec = codecs.blockwise(bits=8)
        ...     return collectives.compressed_all_reduce(values, codec, scale=1 / 2).wait()
        >>> run_ranks(mean, 2)[0][:4]
        tensor([2., 2., 2., 2.])
    """
    sources = listed_tensors("compressed_all_reduce", "tensors", tensors)
    numel = sum(tensor.numel() for tensor in sources)
    out = sources[0].new_empty(numel) if out is None else out
    destinations = listed_tensors("compressed_all_reduce", "out", out)
    check_out("compressed_all_reduce", destinations, numel)
    group = resolve_group(group)
    if isinstance(codec, Codec) and codec.exchange == "all_to_all":  # others are refused below
        check_place("compressed_all_reduce", group)
    arguments = SumArguments(
        codec, scale, error, shard_error, rounding, buffers, meter, timeout, error_decay
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
    used = (sources, destinations, error, arguments.shard_error, arguments.rounding)
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


@floats_of_bytes.register_fake
def _floats_of_bytes_fake(message: Tensor) -> Tensor:
    return message.new_empty(message.numel() // 4, dtype=torch.float32)


@bytes_of_floats.register_fake
def _bytes_of_floats_fake(values: Tensor) -> Tensor:
    return values.new_empty(values.numel() * 4, dtype=torch.uint8)


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
    sizes = [shard.nbytes for shard in codec.shards(numel, ranks)]
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
        self.shard_error = arguments.shard_error
        #: For this rank's values, and for its sum.
        self.rounding = (None, None) if rounding is None else (rounding[0], rounding[1])

    def start(self) -> Callable[..., torch.futures.Future[Tensor]]:
        """What starts it, of the tensors, their errors and the group."""
        start = {
            "all_to_all": self._exchange_shards,
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
        shards: int,
        message: Tensor | None = None,
    ) -> Tensor:
        if message is None:
            message = self.buffer("message", self.codec.nbytes(self.numel, shards))
        measured = begin_measuring(self.meter, sources, error)
        with timed(self.meter, "encode"):
            lost = error_for(self.codec, error)
            self.codec.encode(
                sources, message, shards=shards, error=lost, rounding=self.rounding[0]
            )
            keep_error(error, lost)
        if self.meter is not None and measured is not None:
            measured.note(self.meter, self.codec, error, self.rounding[0])
        self.decay_own(error, self.rounding[0])
        return message

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
        wire = on_wire(first, self.meter, self.device)

        def finish(done: torch.futures.Future[Tensor]) -> Tensor:
            total = done.value()
            with self.later_stage("decode"):
                if self.scale != 1.0:
                    total = total * self.scale
                summed = bytes_of_floats(total) if self.is_traced else total.view(torch.uint8)
                self.codec.decode(summed, self.destinations, rounding=self.rounding[0])
            return self.destinations[0]

        return then_on_side_stream(wire, finish, self.device)

    # ---- messages that all ranks receive ---------------------------------------------------------

    def _gather(
        self, sources: list[Tensor], error: Tensor | None, group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        message = self._encode(sources, error, 1)
        sizes = [len(message)] * self.world_size
        note_collective(*self.gathered_bytes(sizes, group))
        first = self.issue_gather("gathered", message, sizes, group, place=self.places[0])
        wire = on_wire(first, self.meter, self.device)

        def finish(done: torch.futures.Future[Tensor]) -> Tensor:
            messages = done.value().view(self.world_size, -1)
            with self.later_stage("decode"):
                self.codec.decode_sum(messages, self.destinations, scale=self.scale)
            return self.destinations[0]

        return then_on_side_stream(wire, finish, self.device)

    # ---- messages in shards ----------------------------------------------------------------------

    def _exchange_shards(
        self, sources: list[Tensor], error: Tensor | None, group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        shards = self.codec.shards(self.numel, self.world_size)
        if not isinstance(shards, list) or len(shards) != self.world_size:
            raise ValueError(
                f"compressed_all_reduce: shards({self.numel}, {self.world_size}) of "
                f"{self.codec} must return a list with a Shard for each rank, got {shards!r}"
            )
        self.sizes = [shard.nbytes for shard in shards]
        self.shard = shards[self.rank]
        if self.device.type in SHARING_DEVICES and not self.is_traced:
            shared = symmetric_buffers(self.own_buffers, self.codec, shards, self.device, group)
            if shared is not None:
                return self._share_shards(sources, error, shared, group)
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

    def _share_shards(
        self,
        sources: list[Tensor],
        error: Tensor | None,
        shared: SymmetricBuffers,
        group: dist.ProcessGroup,
    ) -> torch.futures.Future[Tensor]:
        """As :meth:`_exchange_shards`, with shared memory: no collective, and two barriers."""
        codec, own_bytes = self.codec, self.shard.nbytes
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
            with self.later_stage("encode"):
                lost = error_for(codec, self.shard_error)
                codec.reduce_shards(
                    views.shards,
                    views.sum,
                    self.shard.numel,
                    scale=self.scale,
                    error=lost,
                    rounding=self.rounding[1],
                    failed=shared.failed,
                )
                keep_error(self.shard_error, lost)
                self.decay(self.shard_error, self.rounding[1])
            with timed(self.meter, "wire"):
                shared.barrier(timeout)
            with self.later_stage("decode"):
                message = self.buffer("message", sum(self.sizes))
                shared.gather(views.sums, message)
                codec.decode(message, self.destinations, shards=self.world_size)
        except BaseException:
            with suppress(RuntimeError):  # from a device that cannot continue
                shared.give_up()
            raise
        return completed(self.destinations[0])

    def _reduce(self, received: Tensor) -> Tensor:
        """The message of the sum of this rank's shards, as long as the longest one."""
        padded = self.buffer("sum", max(self.sizes))
        with self.later_stage("encode"):
            lost = error_for(self.codec, self.shard_error)
            self.codec.reduce(
                received.view(self.world_size, self.shard.nbytes),
                padded[: self.shard.nbytes],
                self.shard.numel,
                scale=self.scale,
                error=lost,
                rounding=self.rounding[1],
            )
            keep_error(self.shard_error, lost)
            self.decay(self.shard_error, self.rounding[1])
        return padded

    def _decode(self, gathered: Tensor) -> Tensor:
        with self.later_stage("decode"):
            # The buffer of a message that has been sent by now.
            message = self.without_padding("message", gathered, self.sizes)
            self.codec.decode(message, self.destinations, shards=self.world_size)
        return self.destinations[0]
