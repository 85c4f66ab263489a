"""Tests memory that ranks share, before gradients use it.

All ranks sum a few fixed blocks through the memory. Each rank knows the values of all, so it
computes on its own device the result of the collectives.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from torch_commhook.codecs.base import Shard
from torch_commhook.codecs.block_codec import BlockCodec
from torch_commhook.collectives.symmetric_memory import SymmetricBuffers

#: How long a rank waits for another. The ranks have met just before.
TRIAL_TIMEOUT = timedelta(seconds=10)

_SUMS = 2  # the second overwrites the first, and keeps errors
_BLOCKS = 3  # of each rank's shard


class MissedRankError(RuntimeError):
    """A barrier has failed: another rank did not reach it in time, or had given up."""


def trial_shards(codec: BlockCodec, ranks: int) -> list[Shard]:
    """The parts of a test message, one for each rank."""
    return codec.shards(_numel(codec, ranks), ranks)


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
        memory: unused memory, with room for :func:`trial_shards`.
        codec: the codec of the messages.
        ranks: the number of ranks.
        device: the memory's device.
        timeout: the timeout of each barrier. After one timeout a rank waits at no later barrier.

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
            _compare(codec, "errors of a sum", one.shard_error, other.shard_error)
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
    shard_error: Tensor
    rounding: tuple[Tensor | None, Tensor | None]


class _Result(NamedTuple):
    total: Tensor
    shard_error: Tensor


def _given(codec: BlockCodec, rank: int, ranks: int, step: int, device: torch.device) -> _Given:
    """Fixed values: integers times a power of two, so that all devices have the same bits."""
    places = torch.arange(_numel(codec, ranks), dtype=torch.int64, device=device)
    drawn = (places * 7919 + rank * 104_729 + step * 1_299_709) % 4001 - 2000
    larger = 2 ** (places // codec.block_size % 5)  # blocks have different parameters
    values = (drawn * larger).to(torch.float32) * 2.0**-9
    shard_error = values[: trial_shards(codec, ranks)[rank].numel].flip(0) * 2.0**-6
    rounding: tuple[Tensor | None, Tensor | None] = (None, None)
    if codec.is_random:
        seeds = torch.tensor(
            [[7 + rank, step], [90 + rank, step]], dtype=torch.int64, device=device
        )
        rounding = seeds[0], seeds[1]
    error = values.flip(0) * 2.0**-6 if step > 0 else None
    return _Given(values, error, shard_error, rounding)


def _scale(ranks: int, step: int) -> float:
    return 1.0 / ranks if step > 0 else 1.0


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
    shards = trial_shards(codec, ranks)
    sizes = [shard.nbytes for shard in shards]
    views = memory.views(sizes)
    codec.encode(
        [given.values], views.message, shards=ranks, error=given.error, rounding=given.rounding[0]
    )
    memory.barrier(timeout)
    codec.reduce_shards(
        views.shards,
        views.sum,
        shards[memory.rank].numel,
        scale=_scale(ranks, step),
        error=given.shard_error,
        rounding=given.rounding[1],
        failed=memory.failed,
    )
    memory.barrier(timeout)
    message = _message(sum(sizes), device)
    memory.gather(views.sums, message)
    total = torch.zeros_like(given.values)
    codec.decode(message, [total], shards=ranks)
    return _Result(total, given.shard_error)


def _expected(codec: BlockCodec, rank: int, ranks: int, step: int, device: torch.device) -> _Result:
    """The collectives' result on a rank, with the parts of all ranks computed here."""
    given = [_given(codec, each, ranks, step, device) for each in range(ranks)]
    shards = trial_shards(codec, ranks)
    sizes = [shard.nbytes for shard in shards]
    messages = torch.empty((ranks, sum(sizes)), dtype=torch.uint8, device=device)
    for one, message in zip(given, messages, strict=True):
        codec.encode([one.values], message, shards=ranks, error=one.error, rounding=one.rounding[0])
    sums = []
    for owner, part in enumerate(messages.split(sizes, dim=1)):
        sums.append(_message(sizes[owner], device))
        codec.reduce(
            part.contiguous(),
            sums[owner],
            shards[owner].numel,
            scale=_scale(ranks, step),
            error=given[owner].shard_error,
            rounding=given[owner].rounding[1],
        )
    total = torch.zeros_like(given[rank].values)
    codec.decode(torch.cat(sums), [total], shards=ranks)
    return _Result(total, given[rank].shard_error)


def _compare(codec: BlockCodec, what: str, got: Tensor, right: Tensor) -> None:
    differs = (got.view(torch.int32) != right.view(torch.int32)).nonzero().view(-1)
    if len(differs):
        place = int(differs[0])
        raise RuntimeError(
            f"{len(differs)} of {len(right)} {what} with {codec} differ from those of the "
            f"collectives, first number {place}: {float(got[place])} instead of "
            f"{float(right[place])}"
        )
