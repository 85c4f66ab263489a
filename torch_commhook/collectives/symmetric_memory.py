"""One bucket's memory on every rank, for sums without a collective; it is tried before its use."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from torch_commhook.codecs.base import Segment, check_failed, check_message, check_ranks
from torch_commhook.codecs.block_codec import BlockCodec

# ---- the operators of ranks that share memory, as typed functions with their fakes ---------------
#
# In C++: ``csrc/ops/symmetric``, ``cuda/symmetric.cu``.


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
    segments: Sequence[Tensor], message: Tensor, *, failed: Tensor | None = None
) -> None:
    """Copy the segments of all ranks into one message, one after another.

    Args:
        segments: the segment of each rank, in order; 1 to 16 of them: contiguous, uint8, with a
            multiple of 4 bytes, at an address that is a multiple of 4.
        message: contiguous, uint8, as long as all segments together. It shares no memory with them.
            Written.
        failed: one int64. If it is not zero, no segment is read, and all bytes become 255: the
            values of such a message are NaN.

    Raises:
        TypeError, ValueError: the tensors are of another kind.
    """
    torch.ops.commhook.symmetric_gather(segments, message, failed=failed)


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
    sizes = [segment.numel() for segment in shards]
    for i, segment in enumerate(shards):
        check_message(op, f"shards[{i}]", segment, None)
    check_message(
        op,
        "message",
        message,
        sum(sizes) if all(isinstance(size, int) for size in sizes) else None,
    )
    check_failed(op, failed)


# ---- one bucket's memory on every rank, for compressed sums without a collective -----------------


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
        """Whether there is room for messages with segments of these sizes."""
        message_bytes, sum_bytes = self.capacity
        return sum(sizes) <= message_bytes and max(sizes) <= sum_bytes

    def views(self, sizes: Sequence[int]) -> _Views:
        """The tensors of a call whose messages have segments of these sizes, one for each rank."""
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

    def gather(self, segments: Sequence[Tensor], message: Tensor) -> None:
        """Run :func:`symmetric_gather`; writes NaNs if a barrier has failed."""
        symmetric_gather(segments, message, failed=self.failed)
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
    segments: list[Tensor]  # this rank's segment in the message of each rank
    sum: Tensor  # this rank's
    sums: list[Tensor]  # of each rank


# ---- tests memory that ranks share, before gradients use it --------------------------------------
#
# All ranks sum a few fixed blocks through the memory. Each rank knows the values of all, so it
# computes on its own device the result of the collectives.


#: How long a rank waits for another. The ranks have met just before.
TRIAL_TIMEOUT = timedelta(seconds=10)

_SUMS = 2  # the second overwrites the first, and keeps errors
_BLOCKS = 3  # of each rank's segment


class MissedRankError(RuntimeError):
    """A barrier has failed: another rank did not reach it in time, or had given up."""


def trial_segments(codec: BlockCodec, ranks: int) -> list[Segment]:
    """The parts of a test message, one for each rank."""
    return codec.segments(_numel(codec, ranks), ranks)


def try_out(
    memory: SymmetricBuffers,
    codec: BlockCodec,
    ranks: int,
    device: torch.device,
    *,
    timeout: timedelta = TRIAL_TIMEOUT,
) -> None:
    """Sum fixed values through the memory of all ranks, and compare the bits.

    All ranks must call it at about the same time. It waits for the device, and at most ``timeout``
    at each of four barriers; after a missing rank it waits at none. The memory can be used for
    other sums afterwards if no rank has raised.

    Args:
        memory: unused memory, with room for :func:`trial_segments`.

    Raises:
        MissedRankError: a barrier has failed.
        RuntimeError: the bits differ from those of the collectives. The message says which.
    """
    try:
        right = [_expected(codec, memory.rank, ranks, step, device) for step in range(_SUMS)]
        # All sums are issued before the first is checked, as in consecutive steps.
        got = [_shared(memory, codec, ranks, step, device, timeout) for step in range(_SUMS)]
        missed = int(memory.failed)
        if missed:
            raise MissedRankError(f"it missed rank {missed - 1} at a barrier")
        for one, other in zip(got, right, strict=True):
            _compare(codec, "values of a sum", one.total, other.total)
            _compare(codec, "errors of a sum", one.sum_error, other.sum_error)
    except BaseException:
        with suppress(RuntimeError):  # from a device that cannot continue
            memory.give_up()
        raise
    finally:
        if device.type == "cuda":  # no rank may free memory that another still reads
            with suppress(RuntimeError):
                torch.cuda.synchronize(device)


def _numel(codec: BlockCodec, ranks: int) -> int:
    # The last block is shorter.
    return codec.block_size * _BLOCKS * ranks - codec.block_size // 2 - 3


class _Given(NamedTuple):
    """A rank's input to a sum."""

    values: Tensor
    error: Tensor | None
    sum_error: Tensor
    rounding: tuple[Tensor | None, Tensor | None]
    scale: float


class _Result(NamedTuple):
    total: Tensor
    sum_error: Tensor


def _given(codec: BlockCodec, rank: int, ranks: int, step: int, device: torch.device) -> _Given:
    """Fixed values: integers times a power of two, so that all devices have the same bits."""
    places = torch.arange(_numel(codec, ranks), dtype=torch.int64, device=device)
    drawn = (places * 7919 + rank * 104_729 + step * 1_299_709) % 4001 - 2000
    larger = 2 ** (places // codec.block_size % 5)  # blocks have different parameters
    values = (drawn * larger).to(torch.float32) * 2.0**-9
    sum_error = values[: trial_segments(codec, ranks)[rank].numel].flip(0) * 2.0**-6
    rounding: tuple[Tensor | None, Tensor | None] = (None, None)
    if codec.is_random:
        seeds = torch.tensor(
            [[7 + rank, step], [90 + rank, step]], dtype=torch.int64, device=device
        )
        rounding = seeds[0], seeds[1]
    error = values.flip(0) * 2.0**-6 if step > 0 else None
    return _Given(values, error, sum_error, rounding, 1.0 / ranks if step > 0 else 1.0)


def _message(numel: int, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=torch.uint8, device=device)


def _shared(
    memory: SymmetricBuffers,
    codec: BlockCodec,
    ranks: int,
    step: int,
    device: torch.device,
    timeout: timedelta,
) -> _Result:
    """This rank's part of a sum through the memory, as ``compressed_all_reduce`` computes it."""
    given = _given(codec, memory.rank, ranks, step, device)
    segments = trial_segments(codec, ranks)
    sizes = [segment.nbytes for segment in segments]
    views = memory.views(sizes)
    codec.encode(
        [given.values], views.message, segments=ranks, error=given.error, rounding=given.rounding[0]
    )
    memory.barrier(timeout)
    codec.reduce_segments(
        views.segments,
        views.sum,
        segments[memory.rank].numel,
        scale=given.scale,
        error=given.sum_error,
        rounding=given.rounding[1],
        failed=memory.failed,
    )
    memory.barrier(timeout)
    message = _message(sum(sizes), device)
    memory.gather(views.sums, message)
    total = torch.zeros_like(given.values)
    codec.decode(message, [total], segments=ranks)
    return _Result(total, given.sum_error)


def _expected(codec: BlockCodec, rank: int, ranks: int, step: int, device: torch.device) -> _Result:
    """The collectives' result on a rank, with the parts of all ranks computed here."""
    given = [_given(codec, each, ranks, step, device) for each in range(ranks)]
    segments = trial_segments(codec, ranks)
    sizes = [segment.nbytes for segment in segments]
    messages = torch.empty((ranks, sum(sizes)), dtype=torch.uint8, device=device)
    for one, message in zip(given, messages, strict=True):
        codec.encode(
            [one.values], message, segments=ranks, error=one.error, rounding=one.rounding[0]
        )
    sums = []
    for owner, part in enumerate(messages.split(sizes, dim=1)):
        sums.append(_message(sizes[owner], device))
        codec.reduce(
            part.contiguous(),
            sums[owner],
            segments[owner].numel,
            scale=given[owner].scale,
            error=given[owner].sum_error,
            rounding=given[owner].rounding[1],
        )
    total = torch.zeros_like(given[rank].values)
    codec.decode(torch.cat(sums), [total], segments=ranks)
    return _Result(total, given[rank].sum_error)


def _compare(codec: BlockCodec, what: str, got: Tensor, right: Tensor) -> None:
    differs = (got.view(torch.int32) != right.view(torch.int32)).nonzero().view(-1)
    if len(differs):
        place = int(differs[0])
        raise RuntimeError(
            f"{len(differs)} of {len(right)} {what} with {codec} differ from those of the "
            f"collectives, first number {place}: {float(got[place])} instead of "
            f"{float(right[place])}"
        )
