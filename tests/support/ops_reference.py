"""The bucket operators in plain torch, tensors to test them with, and settings of the process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import torch_commhook.native.bucket_ops as ops
from torch_commhook.native.bucket_ops import check_finite

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


def differing_bits(actual: Tensor, expected: Tensor) -> Tensor:
    """Which elements of tensors of one dtype differ, if all NaNs are equal."""
    bits = _BITS[actual.element_size()]
    wrong = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    if actual.is_floating_point():
        wrong &= ~(actual.isnan() & expected.isnan())
    return wrong


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    assert actual.dtype == expected.dtype
    return not differing_bits(actual, expected).any()


def assert_same_bits(actual: Tensor, expected: Tensor, context: object = "") -> None:
    """Compares dtype, shape and bits: -0.0 is not 0.0. All NaNs are equal."""
    assert actual.dtype == expected.dtype, f"{context}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{context}: {actual.shape} is not {expected.shape}"
    wrong = differing_bits(actual, expected)
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


T = TypeVar("T")


@contextlib.contextmanager
def _changed(get: Callable[[], T], put: Callable[[T], object], value: T) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def threads(count: int) -> contextlib.AbstractContextManager[None]:
    return _changed(torch.get_num_threads, torch.set_num_threads, count)


def default_dtype(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    return _changed(torch.get_default_dtype, torch.set_default_dtype, dtype)


#: Lengths that end anywhere in a cache line; some are shorter than one.
ODD_LENGTHS = (1, 7, 70_001, 3, 64, 33, 130_003, 0, 15, 16, 17, 5000)


def cache_bytes() -> int:
    """The size from which on destinations are streamed (csrc/ops/bucket/bucket_cpu.cpp)."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
    except OSError:
        return 32 << 20
    return int(size.removesuffix("K")) << 10


#: Buffers that exceed such a cache take too much time and memory.
not_beyond_a_large_cache = pytest.mark.skipif(
    cache_bytes() > 128 << 20, reason="the last-level cache is larger than 128 MiB"
)


def split(memory: torch.Tensor) -> list[torch.Tensor]:
    """Splits memory into many tensors of odd lengths and one large tensor."""
    rest = memory.numel() - sum(ODD_LENGTHS)
    return list(memory.split([*ODD_LENGTHS[:6], rest, *ODD_LENGTHS[6:]]))


NAN, INF = float("nan"), float("inf")


def new_count(device: str = "cpu") -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def counted(*tensors: Tensor) -> int:
    count = new_count(tensors[0].device.type)
    assert check_finite(tensors, count) is None
    return int(count)


def expected_count(tensors: Sequence[Tensor]) -> int:
    return sum(int((~tensor.isfinite()).sum()) for tensor in tensors)


def spoil(tensor: Tensor) -> Tensor:
    """Sets some elements to NaN and infinity, also in tensors with elements that share memory."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    storage[::5], storage[1::7], storage[3::11] = NAN, INF, -INF
    return tensor


def check_counts(name: str, copy: Callable[[list[Tensor]], list[Tensor]] = list) -> None:
    """Counts in tensors of a class of shapes, of each dtype and of all of them together."""
    mixed = []
    for dtype in DTYPES:
        tensors = make(name, dtype)
        assert counted(*copy(tensors)) == expected_count(tensors)
        mixed += [spoil(tensor) for tensor in tensors]
        assert counted(*copy(tensors)) == expected_count(tensors)
    assert counted(*copy(mixed)) == expected_count(mixed)


def check_counts_of_16_bits(device: str = "cpu") -> None:
    """Counts in every 16-bit value."""
    bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).to(device)
    assert counted(bits.view(torch.float16)) == 2 * 1024
    assert counted(bits.view(torch.bfloat16)) == 2 * 128


def of(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **{"dtype": torch.int64, **options})


def check_that_devices_must_agree(device: str, other: str) -> None:
    """Calls operators with tensors[0] and the buffer on ``device``, tensors[1] on ``other``."""
    tensors = [torch.ones(2, device=device), torch.ones(2, device=other)]
    buffer = torch.empty(4, device=device)
    home, away = tensors[0].device, tensors[1].device
    for op, argument, beside, call in (
        ("flatten", "tensors", r"tensors\[0\]", lambda: ops.flatten(tensors)),
        ("flatten_stats", "tensors", r"tensors\[0\]", lambda: ops.flatten_stats(tensors)),
        ("flatten", "tensors", "out", lambda: ops.flatten(tensors, out=buffer)),
        ("unflatten_into", "tensors", "buffer", lambda: ops.unflatten_into(buffer, tensors)),
        ("unflatten", "like", "buffer", lambda: ops.unflatten(buffer, tensors)),
    ):
        message = rf"^{op}: {argument}\[1\] must be on the device of {beside}, {home}, got {away}$"
        with pytest.raises(ValueError, match=message):
            call()
