"""How the bucket operators' CPU kernels round, overflow and treat special values.

Expected values are written out or come from torch's own casts, over every 16-bit pattern.
"""

from __future__ import annotations

import math

import pytest
import torch
from bucket_checks import INF, ROUNDED, every_16bit, float32_patterns, there_and_back
from ops_reference import (
    LEVELS,
    assert_same_bits,
    converted,
    cpu_level,
    one_thread,  # noqa: F401
)

import torch_commhook.native.bucket_ops as ops


@pytest.fixture(params=LEVELS, autouse=True)
def level(request):
    with cpu_level(request.param):
        yield request.param


@pytest.mark.parametrize("dtype", ROUNDED)
def test_written_out_values(dtype):
    given, rounded = (torch.tensor(column) for column in zip(*ROUNDED[dtype], strict=True))
    # Every value in every lane of a vector, and in the shorter rest behind the vectors.
    for shift in range(34):
        expected = rounded.roll(shift).to(dtype)
        assert_same_bits(expected.float(), rounded.roll(shift), "the table itself")
        for count in (len(expected), 1 + shift % len(expected)):
            source = given.roll(shift)[:count].contiguous()
            for actual in there_and_back(source, dtype):
                assert_same_bits(actual, expected[:count], f"shift {shift}")
            assert_same_bits(ops.flatten([source[::2]], dtype=dtype), expected[:count:2], "strided")
        nonfinite = ops.flatten_stats([given.roll(shift)], dtype=dtype).nonfinite_count
        assert nonfinite == (~expected.isfinite()).sum()


@pytest.mark.parametrize("dtype", ROUNDED)
def test_float32_to_16_bits_rounds_as_torch_does(dtype):
    source = float32_patterns()
    for scale in (1.0, 0.7):
        expected = converted(source, scale, dtype)
        for actual in there_and_back(source, dtype, scale):
            assert_same_bits(actual, expected, f"by {scale}")


@pytest.mark.parametrize("source", ROUNDED)
@pytest.mark.parametrize("target", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_16_bit_value(source, target):
    values = every_16bit(source)
    for scale in (1.0, 0.3):
        for actual in there_and_back(values, target, scale):
            assert_same_bits(actual, converted(values, scale, target), f"by {scale}")
    if source == target:
        assert_same_bits(ops.flatten([values]), values, "unchanged")


@pytest.mark.parametrize("target", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_float64(target):
    edges = [1e-310, 5e-324, 1e308, 3.5e38, 3.4028235677973366e38, 1e-45, 65520.0, 1 + 2.0**-24]
    edges += [INF, math.nan, 0.0, 1 + 2.0**-24 + 2.0**-40, 1 + 2.0**-11 + 2.0**-30]
    values = torch.tensor(edges + [-value for value in edges], dtype=torch.float64)
    for count in range(1, len(values) + 1):
        for actual in there_and_back(values[:count].contiguous(), target, 1.5):
            assert_same_bits(actual, converted(values[:count], 1.5, target), f"{count} values")
    stats = ops.flatten_stats([values], scale=1.5, dtype=target)
    assert stats.nonfinite_count == (~stats.buffer.isfinite()).sum()


def test_scaling_comes_before_the_cast():
    # 1e5 is infinite in float16, a third of it is not; 2e-8 is zero in it, a thousand times is not.
    scaled = ops.flatten([torch.tensor([1e5])], scale=1 / 3, dtype=torch.float16)
    assert scaled[0] == torch.tensor(1e5 / 3).half()
    assert ops.flatten([torch.tensor([2e-8])], scale=1e3, dtype=torch.float16)[0] > 0
    assert ops.unflatten(torch.tensor([1e5]), [scaled[:1]], scale=0.5)[0] == 5e4
    # In float32 and not in float16: 3 * 0.1 has other bits there.
    halves = torch.full((40,), 3.0, dtype=torch.float16)
    in_float32 = (halves.float() * torch.tensor(0.1)).half()
    assert_same_bits(ops.flatten([halves], scale=0.1), in_float32)
    # In float64 where a side is float64.
    product = ops.flatten([torch.full((40,), 3.0)], scale=0.1, dtype=torch.float64)
    assert (product == 3.0 * 0.1).all()


def test_denormals_are_kept():
    smallest = torch.full((40,), 2.0**-149)
    assert_same_bits(ops.flatten([smallest]), smallest)
    assert_same_bits(ops.flatten([3 * smallest], scale=0.5), 2 * smallest)  # a tie
    assert_same_bits(ops.flatten([smallest], scale=0.5), torch.zeros(40))
    assert ops.flatten_stats([smallest], scale=2.0**100).sum_of_squares == 40 * 2.0**-98


def test_signs_of_zero_and_nan():
    zeros = torch.tensor([0.0, -0.0] * 20)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert_same_bits(ops.flatten([zeros], dtype=dtype), zeros.to(dtype), dtype)
        assert_same_bits(ops.flatten([zeros], scale=-1.0, dtype=dtype), -zeros.to(dtype), dtype)
        # All NaNs stay NaNs: quiet or signalling, of either sign, with the payload in the low bits.
        bits = [0x7F800001, 0x7FFFFFFF, 0x7FC00000, -0x00400000, -0x007FFFFF, -1]
        nans = torch.tensor(bits * 7, dtype=torch.int32).view(torch.float32)
        for actual in there_and_back(nans, dtype):
            assert actual.isnan().all()


@pytest.mark.parametrize("scale", [float("inf"), 1e39])
@pytest.mark.parametrize("numel", [1, 3, 17])
def test_stats_count_no_padding(scale: float, numel: int) -> None:
    _, sum_of_squares, count = ops.flatten_stats([torch.ones(numel)], scale=scale)
    assert count.item() == numel and sum_of_squares.item() == float("inf")
