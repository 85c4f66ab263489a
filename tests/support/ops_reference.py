"""The bucket operators in a few lines of plain torch, and lists of tensors to test them with."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from settings import threads
from torch import Tensor

import torch_commhook.native.bucket_ops as ops

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PAIRS = tuple(itertools.product(DTYPES, DTYPES))

#: The levels to which kernels can be limited, slowest first.
LEVELS = ("reference", "default", "avx2", "avx512")

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextlib.contextmanager
def limited_cpu(level: str) -> Iterator[str]:
    """Limits the CPU kernels to ``level``, or to the best lower level that the processor has."""
    before = ops.cpu_capability()
    try:
        yield ops.cpu_capability(level)
    finally:
        ops.cpu_capability(before)


@contextlib.contextmanager
def cpu_level(level: str) -> Iterator[str]:
    """Limits the CPU kernels to ``level``; skips the test if the processor lacks it."""
    with limited_cpu(level) as found:
        if found != level:
            pytest.skip(f"this processor has no {level}")
        yield level


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For the files that import it: on a busy machine, small work is slow on several threads."""
    with threads(1):
        yield


# ---- the documented arithmetic -------------------------------------------------------------------


def converted(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Scales in float32, or in float64 if either side is float64, then casts."""
    return scaled(values, scale, dtype).to(dtype)


def scaled(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    wide = torch.float64 if torch.float64 in (values.dtype, dtype) else torch.float32
    return values.detach().to(wide) * torch.tensor(scale, dtype=wide)


def expected_flatten(tensors: Sequence[Tensor], scale: float, dtype: torch.dtype) -> Tensor:
    """The expected result of ``flatten``: elements in logical order, each tensor converted."""
    return torch.cat([converted(tensor.reshape(-1), scale, dtype) for tensor in tensors])


def expected_sum_of_squares(tensors: Sequence[Tensor], scale: float, dtype: torch.dtype) -> float:
    """In float64, of values that are scaled as for ``dtype``."""
    wide = [scaled(tensor.reshape(-1), scale, dtype).double() for tensor in tensors]
    return float(torch.cat(wide).square().sum())


def expected_unflatten(buffer: Tensor, like: Sequence[Tensor], scale: float) -> list[Tensor]:
    """The expected result of ``unflatten``, contiguous."""
    pieces = buffer.reshape(-1).split([tensor.numel() for tensor in like]) if like else ()
    return [
        converted(piece, scale, tensor.dtype).reshape(tensor.shape)
        for piece, tensor in zip(pieces, like, strict=True)
    ]


def assert_same_bits(actual: Tensor, expected: Tensor, context: object = "") -> None:
    """Compares dtype, shape and bits: -0.0 is not 0.0. All NaNs are equal."""
    assert actual.dtype == expected.dtype, f"{context}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{context}: {actual.shape} is not {expected.shape}"
    bits = _BITS[actual.element_size()]
    wrong = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    if actual.is_floating_point():
        wrong &= ~(actual.isnan() & expected.isnan())
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{context}: {int(wrong.sum())} of {actual.numel()} elements differ, the first at "
            f"{where}: {actual[where].item()!r} is not {expected[where].item()!r}"
        )


# ---- lists of tensors ----------------------------------------------------------------------------

Shapes = Callable[[Callable[..., Tensor]], list[Tensor]]

#: name: a list of tensors, made from ``new(*shape)``.
SHAPE_CLASSES: dict[str, Shapes] = {
    "many_tiny": lambda new: [new(1 + i % 7) for i in range(400)],
    "every_short_length": lambda new: [new(n) for n in range(1, 140)],
    "one_large": lambda new: [new(300_007)],
    "single_element": lambda new: [new(1)],
    "zero_dimensional": lambda new: [new() for _ in range(5)],
    "some_empty": lambda new: [new(0), new(5), new(3, 0, 2), new(0), new(2, 2), new(0)],
    "all_empty": lambda new: [new(0), new(4, 0)],
    "transposed": lambda new: [new(37, 53).t(), new(2, 700, 3).permute(2, 0, 1), new(5, 1).t()],
    "strided": lambda new: [new(90, 30)[:, ::3], new(2001)[1::2], new(40, 70)[3:, 5:64]],
    "step_and_row": lambda new: [new(3000)[::3], new(150, 500)[:, :499]],
    "many_dimensions": lambda new: [new(*[2] * 11).permute(10, *range(1, 10), 0)],
    "channels_last": lambda new: [
        new(4, 3, 5, 7).to(memory_format=torch.channels_last),
        new(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    ],
    "misaligned": lambda new: [new(200 + i)[i:] for i in range(1, 20)],
    "odd_rows": lambda new: [new(40_001), new(3), new(70_003), new(1)],
    "mixed": lambda new: [new(7), new(), new(0), new(6, 700).t(), new(65)[1:], new(3, 4)],
}

#: Classes for sources only.
SOURCE_CLASSES: dict[str, Shapes] = {
    "expanded": lambda new: [new(5, 1).expand(5, 700), new().expand(3), new(1, 4).expand(3, 4)],
    "overlapping": lambda new: [new(12).as_strided((5, 4), (2, 1)), new(9).unfold(0, 3, 1)],
    "repeated": lambda new: [new(50)] * 3,
}


def maker(dtype: torch.dtype, seed: int = 0) -> Callable[..., Tensor]:
    """``new(*shape)``: normal values, repeatable."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def make(name: str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """The tensors of a class of shapes."""
    return {**SHAPE_CLASSES, **SOURCE_CLASSES}[name](maker(dtype, seed))
