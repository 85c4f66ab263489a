"""All examples of all codecs, their test data, and all their outputs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_commhook.codecs import CODECS, Codec

EXAMPLES = [example for cls in CODECS.values() for example in cls.examples()]

LARGEST = torch.finfo(torch.float32).max
of_each_codec = pytest.mark.parametrize("codec", EXAMPLES, ids=repr)


def rounding_for(codec: Codec, step: int = 0, device: torch.device | str = "cpu") -> Tensor | None:
    return torch.tensor([1, step], device=device) if codec.is_random else None


def rounding_of_error(
    codec: Codec, error: Tensor | None, device: torch.device | str = "cpu"
) -> Tensor | None:
    """Returns :func:`rounding_for`, also for codecs that round only the error at random."""
    if codec.rounds_error_at_random(error):
        return torch.tensor([1, 0], device=device)
    return rounding_for(codec, device=device)


def encode(codec: Codec, tensors: list[Tensor], **options: Any) -> Tensor:
    numel = sum(tensor.numel() for tensor in tensors)
    device = tensors[0].device
    nbytes = codec.nbytes(numel, options.get("segments", 1))
    message = torch.full((nbytes,), 77, dtype=torch.uint8, device=device)
    codec.encode(tensors, message, **{"rounding": rounding_for(codec, device=device), **options})
    return message


def encode_chunks(codec: Codec, tensors: list[Tensor], sizes: list[int], **options: Any) -> Tensor:
    device = tensors[0].device
    nbytes = sum(part.nbytes for part in codec.chunks(sizes))
    message = torch.full((nbytes,), 77, dtype=torch.uint8, device=device)
    options = {"rounding": rounding_for(codec, device=device), **options}
    codec.encode_chunks(tensors, message, sizes, **options)
    return message


def restore(codec: Codec, x: Tensor, **options: Any) -> Tensor:
    message, out = encode(codec, [x], **options), torch.empty_like(x)
    rounding = options.get("rounding", rounding_for(codec))
    codec.decode(message, [out], segments=options.get("segments", 1), rounding=rounding)
    return out


def some_tensors(rng: random.Random) -> list[Tensor]:
    """Tensors of all forms and magnitudes, with some special values of all kinds."""
    tensors = []
    for _ in range(rng.randint(1, 5)):
        shape = [rng.choice([0, 1, 3, 7, 16, 33, 100]) for _ in range(rng.randint(1, 2))]
        x = torch.randn(shape) * 10 ** rng.uniform(-40, 30)
        if rng.random() < 0.1 and x.numel():
            x.view(-1)[rng.randrange(x.numel())] = rng.choice(
                [float("nan"), float("inf"), LARGEST, 1e-42, -0.0]
            )
        if rng.random() < 0.1:
            x = -torch.zeros(shape)
        dtype = rng.choice([torch.float32] * 4 + [torch.float64, torch.float16, torch.bfloat16])
        tensors.append(x.to(dtype).t() if len(shape) == 2 and rng.random() < 0.3 else x.to(dtype))
    return tensors


def some_chunks(rng: random.Random) -> tuple[list[Tensor], list[int]]:
    """Tensors, and sizes of chunks that end anywhere in them."""
    tensors = some_tensors(rng)
    numel = sum(tensor.numel() for tensor in tensors)
    ends = sorted(rng.randint(0, numel) for _ in range(rng.randint(0, 4)))
    return tensors, [b - a for a, b in zip([0, *ends], [*ends, numel], strict=True)]


def _copy_of(x: Tensor) -> Tensor:
    """A flat copy, as badly aligned."""
    memory = x.new_empty(x.storage_offset() + x.numel())
    return memory[x.storage_offset() :].copy_(x)


def everything(
    codec: Codec,
    tensors: list[Tensor],
    segments: int,
    scale: float,
    error: Tensor | None,
    sizes: list[int] | None = None,  # of chunks; by default, there are none
    *,
    rounding: Tensor | None = None,  # by default, :func:`rounding_for`
    added: int = 3,  # the number of messages in sums
) -> list[Tensor]:
    """The outputs of all methods, the errors last."""
    has_segments = codec.exchange == "all_to_all"
    segments = segments if has_segments else 1
    error = error if codec.takes_error else None
    device = tensors[0].device
    drawn = rounding_of_error(codec, error, device) if rounding is None else rounding
    rounding = rounding_for(codec, device=device) if rounding is None else rounding
    errors = [] if error is None else [_copy_of(error) for _ in range(2 if sizes is None else 3)]
    first, second, third = [*errors, None, None, None][:3]
    message = encode(codec, tensors, segments=segments, scale=scale, error=first, rounding=drawn)
    out = [torch.full_like(tensor, 7) for tensor in tensors]
    codec.decode(message, out, segments=segments, rounding=rounding)
    numel = sum(tensor.numel() for tensor in tensors)
    halves = [tensor / 2 for tensor in tensors]
    sources = [tensors, halves, tensors, halves][:added]
    stacked = torch.stack([encode(codec, each) for each in sources])
    reduced = torch.full_like(stacked[0], 3)
    if has_segments:
        codec.reduce(stacked, reduced, numel, scale=scale, error=second, rounding=rounding)
    sums = [torch.full_like(tensor, 7) for tensor in tensors]
    codec.decode_sum(stacked, sums, scale=scale, rounding=rounding)
    found = [message, reduced, *out, *sums]
    if sizes is not None:
        chunks = encode_chunks(codec, tensors, sizes, scale=scale, error=third, rounding=drawn)
        of_chunks = [torch.full_like(tensor, 7) for tensor in tensors]
        codec.decode_chunks(chunks, of_chunks, sizes, rounding=rounding)
        found += [chunks, *of_chunks]
    return [*found, *errors]


def same(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point():  # all NaNs count as equal
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(
            a.nan_to_num(1.0), b.nan_to_num(1.0)
        )
    return torch.equal(a, b)
