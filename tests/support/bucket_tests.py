"""Tests of the bucket operators against ops_reference, for the CPU's kernels and for CUDA's.

A file imports all of them, and has a fixture ``device``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from kernel_device import KernelDevice
from ops_reference import (
    DTYPES,
    PAIRS,
    SHAPE_CLASSES,
    SOURCE_CLASSES,
    assert_same_bits,
    converted,
    expected_flatten,
    expected_sum_of_squares,
    expected_unflatten,
    make,
    maker,
)
from torch import Tensor

import torch_commhook.native.bucket_ops as ops

#: Sources, targets and scales. By the largest scale, float16 overflows.
CASES = [
    *((source, target, scale) for source, target in PAIRS for scale in (1.0, 1 / 3)),
    (torch.float32, torch.float32, 1e5),
    (torch.float64, torch.float16, 1e5),
]
#: Shapes of so many elements that the host takes one scale for each pair of dtypes.
LARGE = ("one_large", "odd_rows", "step_and_row")
of_sources = pytest.mark.parametrize("name", [*SHAPE_CLASSES, *SOURCE_CLASSES])


def cases(device: KernelDevice, name: str) -> list[tuple[torch.dtype, torch.dtype, float]]:
    """Source, target and scale."""
    if not device.is_slow or name not in LARGE:
        return CASES
    # Each with itself unscaled, where bits stay, and the others scaled.
    return [case for case in CASES if (case[0] is case[1]) == (case[2] == 1)]


def total(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def whole_storage(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def assert_flattens(
    device: KernelDevice, tensors: Sequence[Tensor], scale: float, dtype: torch.dtype
) -> None:
    """Tries the three operators that read tensors, with CPU tensors copied to the device."""
    expected = expected_flatten(tensors, scale, dtype)
    copies = device.copy(tensors)
    context = f"{tensors[0].dtype} to {dtype} by {scale}"
    assert_same_bits(ops.flatten(copies, scale=scale, dtype=dtype).cpu(), expected, context)

    memory = torch.full((expected.numel() + 8,), 7.0, dtype=dtype, device=device.name)
    for offset in (0, 1, 5):
        out = memory[offset : offset + expected.numel()]
        assert ops.flatten(copies, scale=scale, out=out) is out
        assert_same_bits(out.cpu(), expected, f"{context}, offset {offset}")
        assert (memory[:offset] == 7).all() and (memory[offset + expected.numel() :] == 7).all()
        memory.fill_(7.0)

    stats = ops.flatten_stats(copies, scale=scale, dtype=dtype)
    assert_same_bits(stats.buffer.cpu(), expected, context)
    assert_same_bits(stats.nonfinite_count.cpu(), (~expected.isfinite()).sum(), context)
    assert stats.sum_of_squares.dtype == torch.float64 and stats.sum_of_squares.shape == ()
    squares = expected_sum_of_squares(tensors, scale, dtype)
    if math.isfinite(squares):
        assert float(stats.sum_of_squares) == pytest.approx(squares, rel=1e-12, abs=0), context
    for copy, tensor in zip(copies, tensors, strict=True):
        assert_same_bits(copy.cpu(), tensor, "the tensors must stay as they are")


def assert_unflattens(
    device: KernelDevice, buffer: Tensor, tensors: Sequence[Tensor], scale: float
) -> None:
    """Tries ``unflatten``, with CPU tensors copied to the device."""
    for tensor in tensors:
        tensor.untyped_storage().fill_(255)  # NaN: the contents must not be read
    expected = expected_unflatten(buffer, tensors, scale)
    context = f"from {buffer.dtype} by {scale}"
    source, copies = buffer.to(device.name), device.copy(tensors)
    for new, right, model in zip(
        ops.unflatten(source, copies, scale=scale), expected, tensors, strict=True
    ):
        assert_same_bits(new.cpu(), right, context)
        assert new.stride() == torch.empty_like(model).stride()
    for copy, tensor in zip(copies, tensors, strict=True):
        assert_same_bits(copy.cpu(), tensor, "like must stay as it is")


def assert_unflattens_into(
    device: KernelDevice, buffer: Tensor, tensors: Sequence[Tensor], scale: float
) -> None:
    """Tries ``unflatten_into``, with CPU tensors copied to the device."""
    expected = expected_unflatten(buffer, tensors, scale)
    source, copies = buffer.to(device.name, copy=True), device.copy(tensors)
    assert ops.unflatten_into(source, copies, scale=scale) is None
    # Everything around and between the elements of a destination must stay.
    for tensor, right in zip(tensors, expected, strict=True):
        tensor.copy_(right)
    for copy, tensor in zip(copies, tensors, strict=True):
        wanted, context = whole_storage(tensor), f"from {buffer.dtype} by {scale}"
        assert_same_bits(whole_storage(copy).cpu(), wanted, context)
    assert_same_bits(source.cpu(), buffer, "the buffer must stay as it is")


INF = math.inf
FP16_STEP = 2.0**-10  # between 1 and 2
BF16_STEP = 2.0**-7

#: dtype: (float32 value, its value in the dtype). Rounding is to nearest, ties to even.
ROUNDED = {
    torch.float16: [
        (1 + FP16_STEP / 2, 1.0),  # ties
        (1 + 3 * FP16_STEP / 2, 1 + 2 * FP16_STEP),
        (-1 - FP16_STEP / 2, -1.0),
        (1 + FP16_STEP / 2 + 2.0**-23, 1 + FP16_STEP),  # just above, just below
        (1 + 3 * FP16_STEP / 2 - 2.0**-23, 1 + FP16_STEP),
        (65504.0, 65504.0),  # the largest
        (65519.996, 65504.0),
        (65520.0, INF),  # the tie
        (-65520.0, -INF),
        (3.0e38, INF),
        (2.0**-14, 2.0**-14),  # the smallest normal
        (2.0**-24, 2.0**-24),  # the smallest denormal
        (2.0**-25, 0.0),  # ties of denormals
        (3 * 2.0**-25, 2.0**-23),
        (-(2.0**-25), -0.0),
        (2.0**-25 * (1 + 2.0**-23), 2.0**-24),
        (2.0**-40, 0.0),
        (-(2.0**-149), -0.0),
    ],
    torch.bfloat16: [
        (1 + BF16_STEP / 2, 1.0),
        (1 + 3 * BF16_STEP / 2, 1 + 2 * BF16_STEP),
        (-1 - BF16_STEP / 2, -1.0),
        (1 + BF16_STEP / 2 + 2.0**-23, 1 + BF16_STEP),
        (1 + 3 * BF16_STEP / 2 - 2.0**-23, 1 + BF16_STEP),
        ((2 - BF16_STEP) * 2.0**127, (2 - BF16_STEP) * 2.0**127),  # the largest
        ((2 - BF16_STEP / 2 - 2.0**-23) * 2.0**127, (2 - BF16_STEP) * 2.0**127),
        ((2 - BF16_STEP / 2) * 2.0**127, INF),  # the tie
        (-(2 - BF16_STEP / 2) * 2.0**127, -INF),
        ((2 - 2.0**-23) * 2.0**127, INF),
        (2.0**-126, 2.0**-126),
        (2.0**-133, 2.0**-133),  # the smallest denormal
        (2.0**-134, 0.0),
        (3 * 2.0**-134, 2.0**-132),
        (-(2.0**-134), -0.0),
        (2.0**-149, 0.0),
    ],
}
for rounded in ROUNDED.values():
    rounded += [(0.0, 0.0), (-0.0, -0.0), (INF, INF), (-INF, -INF), (math.nan, math.nan)]


def float32_patterns() -> Tensor:
    """Every upper half of a float32, with lower halves at and next to every tie of both dtypes."""
    lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    upper = torch.arange(1 << 16, dtype=torch.int64)
    bits = (upper[:, None] << 16) + torch.tensor(lower)
    return bits.reshape(-1).to(torch.int32).view(torch.float32)


def there_and_back(
    device: KernelDevice, source: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, ...]:
    """The source converted by each operator: flatten, flatten_stats, unflatten, unflatten_into."""
    source = source.to(device.name)
    destination = torch.zeros_like(source, dtype=dtype)
    ops.unflatten_into(source, [destination], scale=scale)
    found = (
        ops.flatten([source], scale=scale, dtype=dtype),
        ops.flatten_stats([source], scale=scale, dtype=dtype).buffer,
        ops.unflatten(source, [destination.new_empty(source.shape)], scale=scale)[0],
        destination,
    )
    return tuple(each.cpu() for each in found)


# ---- shapes and dtypes ---------------------------------------------------------------------------


@of_sources
def test_flatten(name, device):
    for source, target, scale in cases(device, name):
        assert_flattens(device, make(name, source), scale, target)


@of_sources
def test_unflatten(name, device):
    for source, target, scale in cases(device, name):
        like = make(name, target, seed=1)
        assert_unflattens(device, maker(source)(total(like)), like, scale)


@pytest.mark.parametrize("name", SHAPE_CLASSES)
def test_unflatten_into(name, device):
    for source, target, scale in cases(device, name):
        tensors = make(name, target, seed=1)
        assert_unflattens_into(device, maker(source)(total(tensors)), tensors, scale)


@pytest.mark.parametrize("name", ["some_empty", "mixed", "strided", "transposed", "odd_rows"])
def test_mixed_dtypes(name, device):
    tensors = [tensor for dtype in DTYPES for tensor in make(name, dtype)]
    tensors = tensors[::2] + tensors[1::2]
    for dtype in DTYPES:
        assert_flattens(device, tensors, 1 / 3, dtype)
        assert_unflattens(device, maker(dtype)(total(tensors)), tensors, 1 / 3)
        assert_unflattens_into(device, maker(dtype)(total(tensors)), tensors, 1 / 3)


@pytest.mark.parametrize("scale", [0.0, -0.0, -2.0, 1e-50, 1e300, math.inf, math.nan])
def test_any_scale(scale, device):
    for source, target in PAIRS:
        assert_flattens(device, make("mixed", source), scale, target)


def test_of_nothing(device):
    empty = torch.empty(0, device=device.name)
    assert ops.unflatten(empty, []) == []
    ops.unflatten_into(empty, [])
    ops.unflatten_into(empty.view(2, 0), [])
    assert ops.flatten([empty], out=empty.view(2, 0)).shape == (2, 0)
    stats = ops.flatten_stats([empty, empty])
    assert stats.sum_of_squares == 0 and stats.nonfinite_count == 0


def test_interleaved_destinations(device):
    memory, gap = (torch.zeros(size, device=device.name) for size in (12, 9))
    ops.unflatten_into(torch.arange(12.0, device=device.name), [memory[::2], memory[1::2]])
    assert memory.tolist() == [i // 2 + 6 * (i % 2) for i in range(12)]
    # Between the elements of a strided destination lies a dense one.
    ops.unflatten_into(torch.arange(1.0, 6.0, device=device.name), [gap[::4], gap[1:3]])
    assert gap.tolist() == [1, 4, 5, 0, 2, 0, 0, 0, 3]


def test_a_lazy_copy_leaves_the_original(device):
    original = torch.zeros(100, device=device.name)
    copy = torch._lazy_clone(original)
    ops.unflatten_into(torch.ones(100, device=device.name), [copy])
    assert (copy == 1).all() and (original == 0).all()


def test_a_lazily_negated_tensor(device):
    values = maker(torch.float32)(40, 2).to(device.name)
    imaginary = torch.view_as_complex(values).conj().imag
    assert imaginary.is_neg()
    assert_same_bits(ops.flatten([imaginary]), -values[:, 1])


# ---- rounding and special values -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ROUNDED)
def test_written_out_values(dtype, device):
    given, rounded = (torch.tensor(column) for column in zip(*ROUNDED[dtype], strict=True))
    # Every value in every lane of a vector, and in the shorter rest behind the vectors.
    for shift in range(34):
        expected = rounded.roll(shift).to(dtype)
        assert_same_bits(expected.float(), rounded.roll(shift), "the table itself")
        for count in (len(expected), 1 + shift % len(expected)):
            source = given.roll(shift)[:count].to(device.name)
            for actual in there_and_back(device, source, dtype):
                assert_same_bits(actual, expected[:count], f"shift {shift}")
            strided = ops.flatten([source[::2]], dtype=dtype).cpu()
            assert_same_bits(strided, expected[:count:2], "strided")
        stats = ops.flatten_stats([given.roll(shift).to(device.name)], dtype=dtype)
        assert stats.nonfinite_count == (~expected.isfinite()).sum()


@pytest.mark.parametrize("dtype", ROUNDED)
def test_float32_to_16_bits_rounds_as_torch_does(dtype, device):
    source = float32_patterns()
    for scale in (1.0, 0.7):
        expected = converted(source, scale, dtype)
        for actual in there_and_back(device, source, dtype, scale):
            assert_same_bits(actual, expected, f"by {scale}")


@pytest.mark.parametrize("source", ROUNDED)
def test_every_16_bit_value(source, device):
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(source)
    for target in DTYPES:
        for scale in (1.0, 0.3, 1e30):
            for actual in there_and_back(device, values, target, scale):
                assert_same_bits(actual, converted(values, scale, target), f"{target} by {scale}")
    assert_same_bits(ops.flatten([values.to(device.name)]).cpu(), values, "unchanged")


@pytest.mark.parametrize("target", DTYPES)
def test_float64(target, device):
    edges = [1e-310, 5e-324, 1e308, 3.5e38, 3.4028235677973366e38, 1e-45, 65520.0, 1 + 2.0**-24]
    edges += [INF, math.nan, 0.0, 1 + 2.0**-24 + 2.0**-40, 1 + 2.0**-11 + 2.0**-30]
    values = torch.tensor(edges + [-value for value in edges], dtype=torch.float64)
    for count in range(1, len(values) + 1):
        for actual in there_and_back(device, values[:count], target, 1.5):
            assert_same_bits(actual, converted(values[:count], 1.5, target), f"{count} values")
    stats = ops.flatten_stats([values.to(device.name)], scale=1.5, dtype=target)
    assert stats.nonfinite_count == (~stats.buffer.isfinite()).sum()
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 63), (1 << 63) - 1, (200_000,), generator=generator)
    near_one = torch.rand(100_000, dtype=torch.float64, generator=generator)
    for values in (bits.view(torch.float64), near_one, near_one * 1e-42):
        for actual in there_and_back(device, values, target):
            assert_same_bits(actual, converted(values, 1.0, target), target)


# ---- flatten_stats -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["every_short_length", "transposed", "odd_rows"])
def test_flatten_stats_counts_what_is_not_finite_in_the_buffer(name, device):
    for source, target in PAIRS:
        tensors = make(name, source)
        for i, tensor in enumerate(tensors):
            flat = whole_storage(tensor)
            flat[i % 7 :: 11], flat[i % 5 :: 13] = math.nan, -math.inf
            flat[i % 3 :: 17] = torch.finfo(source).max  # finite only in some dtypes
        stats = ops.flatten_stats(device.copy(tensors), dtype=target)
        expected, context = expected_flatten(tensors, 1.0, target), f"{source} to {target}"
        assert_same_bits(stats.buffer.cpu(), expected, context)
        assert_same_bits(stats.nonfinite_count.cpu(), (~expected.isfinite()).sum(), context)
        assert not stats.sum_of_squares.isfinite()


def test_flatten_stats_sums_before_the_cast_in_float64(device):
    """1e5 is finite before the cast, and its square counts."""
    stats = ops.flatten_stats([torch.full((3,), 1e5, device=device.name)], dtype=torch.float16)
    assert stats.nonfinite_count == 3 and stats.sum_of_squares == 3e10
    # The squares overflow float32, and 2^24 + 1 ones would not add up in it.
    assert ops.flatten_stats([torch.full((8,), 1e30, device=device.name)]).sum_of_squares > 7.9e60
    tensors = [torch.tensor([2.0**20]), torch.full((1 << 17,), 2.0**-6)]
    assert ops.flatten_stats(device.copy(tensors)).sum_of_squares == 2.0**40 + 2.0**5
