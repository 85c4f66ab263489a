"""What the bucket operators' CUDA kernels compute, bit by bit.

On a GPU, and the same kernels on the host. Streams, graphs, launches and refusals stand in
test_cuda_launch.py, the index arithmetic in test_cuda_partition.py.
"""

from __future__ import annotations

import pytest
import torch
from bucket_checks import (
    ANY_SCALES,
    CASES,
    OF_MIXED_DTYPES,
    ROUNDED,
    assert_flattens,
    assert_unflattens,
    assert_unflattens_into,
    check_mixed_dtypes,
    check_nonfinite_count,
    check_sums_before_the_cast,
    every_16bit,
    float32_patterns,
    there_and_back,
    total,
)
from kernel_device import COUNTS, DEVICE
from ops_reference import (
    DTYPES,
    PAIRS,
    SHAPE_CLASSES,
    SOURCE_CLASSES,
    assert_same_bits,
    expected_flatten,
    make,
    maker,
)

import torch_commhook.native.bucket_ops as ops

pytestmark = pytest.mark.usefixtures("cuda_kernels")

#: Shapes of so many elements that the host takes one scale for each pair of dtypes.
LARGE = ("one_large", "odd_rows", "step_and_row")


def cases(name: str) -> list[tuple[torch.dtype, torch.dtype, float]]:
    """Source, target and scale."""
    if DEVICE.name == "cuda" or name not in LARGE:
        return CASES
    # Each with itself unscaled, where bits stay, and the others scaled.
    return [case for case in CASES if (case[0] is case[1]) == (case[2] == 1)]


# ---- shapes and dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SHAPE_CLASSES, *SOURCE_CLASSES])
def test_flatten(name):
    for source, target, scale in cases(name):
        assert_flattens(DEVICE, make(name, source), scale, target)


@pytest.mark.parametrize("name", [*SHAPE_CLASSES, *SOURCE_CLASSES])
def test_unflatten(name):
    for source, target, scale in cases(name):
        like = make(name, target, seed=1)
        assert_unflattens(DEVICE, maker(source)(total(like)), like, scale)


@pytest.mark.parametrize("name", SHAPE_CLASSES)
def test_unflatten_into(name):
    for source, target, scale in cases(name):
        tensors = make(name, target, seed=1)
        assert_unflattens_into(DEVICE, maker(source)(total(tensors)), tensors, scale)


@pytest.mark.parametrize("name", OF_MIXED_DTYPES)
def test_mixed_dtypes(name):
    check_mixed_dtypes(DEVICE, name)


@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_tensors(count):
    new = maker(torch.float32)
    tensors = [new(1 + 37 * i % 101) for i in range(count)]
    assert_flattens(DEVICE, tensors, 1 / 3, torch.bfloat16)
    assert_unflattens_into(DEVICE, maker(torch.bfloat16)(total(tensors)), tensors, 1 / 3)
    assert_flattens(DEVICE, [new(64) for _ in range(count)], 1.0, torch.float32)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda dtype: str(dtype)[6:])
def test_every_relative_alignment(source, target):
    values, memory = maker(source)(700), torch.empty(700, dtype=target, device=DEVICE.name)
    (copy,) = DEVICE.copy([values])
    for first in range(9):
        for offset in range(9):
            for count in (5, 64, 640):
                expected = expected_flatten([values[first : first + count]], 0.7, target)
                out = memory[offset : offset + count]
                memory.fill_(7)
                ops.flatten([copy[first : first + count]], scale=0.7, out=out)
                context = f"{first} to {offset}, {count} elements"
                assert_same_bits(out.cpu(), expected, context)
                assert (memory[:offset] == 7).all() and (memory[offset + count :] == 7).all()
                memory.fill_(7)
                ops.unflatten_into(copy[first : first + count], [out], scale=0.7)
                assert_same_bits(out.cpu(), expected, context)
                assert (memory[:offset] == 7).all() and (memory[offset + count :] == 7).all()


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda dtype: str(dtype)[6:])
def test_rows_that_end_with_their_memory(source, target):
    """What reads or writes past them is found by memcheck and AddressSanitizer."""

    def memory(values, first):
        whole = torch.empty(first + values.numel(), dtype=values.dtype, device=DEVICE.name)
        whole[first:] = values
        return whole[first:]

    for first in range(9):
        for count in (1, 5, 64, 655):
            values = maker(source)(count)
            expected = expected_flatten([values], 0.7, target)
            given, out = memory(values, first), memory(torch.zeros_like(expected), count % 4)
            ops.flatten([given], scale=0.7, out=out)
            assert_same_bits(out.cpu(), expected, f"{count} elements at {first}")
            ops.unflatten_into(given, [out.zero_()], scale=0.7)
            assert_same_bits(out.cpu(), expected, f"{count} elements at {first}")


def test_interleaved_destinations():
    memory = torch.zeros(12, device=DEVICE.name)
    ops.unflatten_into(torch.arange(12.0, device=DEVICE.name), [memory[::2], memory[1::2]])
    assert memory.tolist() == [i // 2 + 6 * (i % 2) for i in range(12)]
    gap = torch.zeros(9, device=DEVICE.name)
    ops.unflatten_into(torch.arange(1.0, 6.0, device=DEVICE.name), [gap[::4], gap[1:3]])
    assert gap.tolist() == [1, 4, 5, 0, 2, 0, 0, 0, 3]


def test_of_nothing():
    empty = torch.empty(0, device=DEVICE.name)
    assert ops.unflatten(empty, []) == []
    ops.unflatten_into(empty, [])
    assert ops.flatten([empty], out=torch.empty(2, 0, device=DEVICE.name)).shape == (2, 0)
    stats = ops.flatten_stats([empty, empty])
    assert stats.sum_of_squares == 0 and stats.nonfinite_count == 0


def test_more_than_2_31_elements():
    count = (1 << 31) + 12345
    if DEVICE.name == "cpu" or torch.cuda.mem_get_info()[0] < 8 * count:
        pytest.skip("needs 16 GiB of free GPU memory")
    large = torch.empty(count, dtype=torch.bfloat16, device=DEVICE.name).uniform_(-1, 1)
    small = torch.ones(7, dtype=torch.bfloat16, device=DEVICE.name)
    out = ops.flatten([small, large, small])
    assert torch.equal(out[7 : 7 + count], large)
    assert (out[:7] == 1).all() and (out[7 + count :] == 1).all()
    large.zero_()
    out[7 + count - 9 : 7 + count] = 5
    ops.unflatten_into(out, [small, large, small.clone()])
    assert torch.equal(out[7 : 7 + count], large)


# ---- rounding and special values -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ROUNDED)
def test_rounding(dtype):
    given, rounded = (torch.tensor(column) for column in zip(*ROUNDED[dtype], strict=True))
    for actual in there_and_back(given.to(DEVICE.name), dtype):
        assert_same_bits(actual.cpu(), rounded.to(dtype), dtype)
    source = float32_patterns()
    for scale in (1.0, 0.7):
        expected = expected_flatten([source], scale, dtype)
        for actual in there_and_back(source.to(DEVICE.name), dtype, scale):
            assert_same_bits(actual.cpu(), expected, f"{dtype} by {scale}")


@pytest.mark.parametrize("source", ROUNDED)
def test_every_16_bit_value(source):
    values = every_16bit(source)
    for target in DTYPES:
        for scale in (1.0, 0.7, 1e30):
            expected = expected_flatten([values], scale, target)
            for actual in there_and_back(values.to(DEVICE.name), target, scale):
                assert_same_bits(actual.cpu(), expected, f"{source} to {target} by {scale}")


def test_float64():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 63), (1 << 63) - 1, (200_000,), generator=generator)
    source = bits.view(torch.float64)
    near_one = torch.rand(100_000, dtype=torch.float64, generator=generator)
    for values in (source, near_one, near_one * 1e-42):
        for target in DTYPES:
            expected = expected_flatten([values], 1.0, target)
            for actual in there_and_back(values.to(DEVICE.name), target):
                assert_same_bits(actual.cpu(), expected, target)


@pytest.mark.parametrize("scale", ANY_SCALES)
def test_any_scale(scale):
    for source, target in PAIRS:
        assert_flattens(DEVICE, make("mixed", source), scale, target)


# ---- flatten_stats -------------------------------------------------------------------------------


def test_flatten_stats_counts_what_is_not_finite_in_the_buffer():
    check_nonfinite_count(DEVICE, "odd_rows")


def test_flatten_stats_sums_before_the_cast_in_float64():
    check_sums_before_the_cast(DEVICE)


@pytest.mark.parametrize("count", [3, 500, 4000])
def test_flatten_stats_is_repeatable(count):
    new = maker(torch.float32)
    tensors = DEVICE.copy([new(1 + 997 * i % 5000) for i in range(count)])
    once = ops.flatten_stats(tensors, scale=1 / 3, dtype=torch.bfloat16)
    for _ in range(5):
        again = ops.flatten_stats(tensors, scale=1 / 3, dtype=torch.bfloat16)
        for one, other in zip(once, again, strict=True):
            assert_same_bits(other.cpu(), one.cpu())
