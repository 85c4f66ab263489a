"""The arguments of compressed sums, and their checks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.codecs.base import Codec
from torch_commhook.codecs.checks import ERROR_DTYPES
from torch_commhook.codecs.error_decay import check_decay, decays_at_random
from torch_commhook.collectives.exchange import Place
from torch_commhook.collectives.group_place import group_rank
from torch_commhook.collectives.message_buffers import MessageBuffers
from torch_commhook.metrics import CallMeter
from torch_commhook.native.bucket_ops import BUCKET_DTYPES

_LARGEST_FLOAT = int(sys.float_info.max)


class SumArguments(NamedTuple):
    """Arguments of ``compressed_all_reduce``, which describes them."""

    codec: Codec
    scale: float
    error: Tensor | None
    shard_error: Tensor | None
    rounding: Tensor | None
    buffers: MessageBuffers | None
    meter: CallMeter | None
    timeout: timedelta | None = None
    error_decay: float = 1.0
    #: Of the stages, if they were taken before.
    places: tuple[Place | None, Place | None] = (None, None)


def check_arguments(
    op: str,
    arguments: SumArguments,
    numel: int,
    device: torch.device,
    group: dist.ProcessGroup,
    *,
    encodes_once: bool = False,
) -> None:
    """Refuse arguments that would fail in a later stage, when other ranks are already waiting.

    Args:
        op: the function's name in errors.
        arguments: the user's arguments.
        numel: the number of elements of ``error``.
        device: the tensors' device.
        group: the group of the compressed sum.
        encodes_once: whether no sum is encoded: ``rounding`` is then one pair of seed and step.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    _check_settings(op, arguments)
    check_decay(f"{op}: error_decay", arguments.error_decay)
    for name, tensor in (("error", arguments.error), ("shard_error", arguments.shard_error)):
        if tensor is not None:
            _check_dtype(op, name, tensor, *ERROR_DTYPES)
            _check_error(op, name, tensor, device)
    codec, rounding = arguments.codec, arguments.rounding
    if rounding is not None:
        _check_dtype(op, "rounding", rounding, torch.int64)
    shape, content = ((2,), "seed and step") if encodes_once else ((2, 2), "rows of seed and step")
    draws = codec.is_random or (
        rounding is not None
        and (
            codec.rounds_error_at_random(arguments.error)
            or decays_at_random(arguments.error, arguments.error_decay)
        )
    )
    if draws and (rounding is None or rounding.shape != shape):
        raise ValueError(
            f"{op}: rounding must be of shape {shape} for {codec}, {content}, got "
            f"{None if rounding is None else list(rounding.shape)}"
        )
    if torch.compiler.is_compiling():  # sizes may be dynamic
        return
    error, shard_error = arguments.error, arguments.shard_error
    if error is not None and error.shape != (numel,):
        raise ValueError(
            f"{op}: error must be flat and hold {numel} elements, got sizes {list(error.shape)}"
        )
    if shard_error is not None and codec.exchange == "all_to_all":
        begin, end = shard_range(codec, numel, rank=group_rank(group), world_size=group.size())
        if shard_error.shape != (end - begin,):
            raise ValueError(
                f"{op}: shard_error must be flat and hold {end - begin} elements, got sizes "
                f"{list(shard_error.shape)}"
            )


def _check_settings(op: str, arguments: SumArguments) -> None:
    codec, scale = arguments.codec, arguments.scale
    if not isinstance(codec, Codec):
        raise TypeError(f"{op}: codec must be a Codec, got {type(codec).__qualname__}")
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    if not isinstance(scale, numbers) or isinstance(scale, bool):
        raise TypeError(f"{op}: scale must be a number, got {type(scale).__qualname__}")
    if isinstance(scale, int) and not -_LARGEST_FLOAT <= scale <= _LARGEST_FLOAT:
        got = f"an int of {scale.bit_length()} bits"
        raise ValueError(f"{op}: scale must be a number that a float can hold, got {got}")
    for name, value, kind in (
        ("buffers", arguments.buffers, MessageBuffers),
        ("meter", arguments.meter, CallMeter),
        ("timeout", arguments.timeout, timedelta),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"{op}: {name} must be a {kind.__name__} or None, got {type(value).__qualname__}"
            )


def _check_dtype(op: str, name: str, tensor: object, *dtypes: torch.dtype) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__qualname__}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(map(str, dtypes))
        raise TypeError(f"{op}: {name} must be of dtype {allowed}, got {tensor.dtype}")


def _check_error(op: str, name: str, error: Tensor, device: torch.device) -> None:
    if error.device != device:
        raise ValueError(
            f"{op}: {name} must be on the tensors' device, {device}, got {error.device}"
        )
    if error.layout is not torch.strided or error.dim() != 1:
        raise ValueError(f"{op}: {name} must be dense and flat, got sizes {list(error.shape)}")
    if not error.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous, got strides {list(error.stride())}")


def check_out(
    op: str, destinations: Sequence[Tensor], numel: int, as_many_as: str = "tensors"
) -> None:
    """Refuse tensors without exactly this number of elements.

    Raises:
        ValueError: they hold more or fewer.
    """
    room = sum(tensor.numel() for tensor in destinations)
    if room != numel:
        raise ValueError(
            f"{op}: out must hold {numel} elements, as many as {as_many_as}, got {room}"
        )


def checked_sizes(op: str, sizes: Sequence[int], world_size: int) -> list[int]:
    """Numbers of elements, one for each rank, checked.

    Raises:
        TypeError: they are no list of ints.
        ValueError: there are more or fewer numbers, or one is negative.
    """
    if not isinstance(sizes, Sequence) or any(
        not isinstance(size, int) or isinstance(size, bool) for size in sizes
    ):
        raise TypeError(f"{op}: sizes must be a list of ints, got {sizes!r}")
    counts = list(sizes)
    if len(counts) != world_size or any(count < 0 for count in counts):
        raise ValueError(
            f"{op}: sizes must be {world_size} numbers of at least 0, one for each rank, got "
            f"{counts}"
        )
    return counts


def shard_range(codec: Codec, numel: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """The elements ``[begin, end)`` whose sum a rank encodes in :func:`compressed_all_reduce`."""
    if codec.exchange != "all_to_all":
        return 0, 0
    counts = [shard.numel for shard in codec.shards(numel, world_size)]
    begin = sum(counts[:rank])
    return begin, begin + counts[rank]


def listed_tensors(op: str, name: str, tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """A tensor or several that codecs support, as a list.

    Raises:
        ValueError: there are none, or they are on several devices.
        TypeError: a value is not a tensor, or has another dtype.
    """
    if not isinstance(tensors, (Tensor, Iterable)):
        raise TypeError(
            f"{op}: {name} must be a tensor or a list of tensors, got {type(tensors).__qualname__}"
        )
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not found:
        raise ValueError(f"{op}: {name} must hold at least one tensor, got none")
    for i, tensor in enumerate(found):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name}[{i}] must be a tensor, got {type(tensor).__qualname__}")
        if tensor.dtype not in BUCKET_DTYPES:
            raise TypeError(
                f"{op}: {name}[{i}] must be of dtype float64, float32, float16 or "
                f"bfloat16, got {tensor.dtype}"
            )
        if tensor.device != found[0].device:
            raise ValueError(
                f"{op}: {name}[{i}] must be on the device of {name}[0], {found[0].device}, got "
                f"{tensor.device}"
            )
    return found
