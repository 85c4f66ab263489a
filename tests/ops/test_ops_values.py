"""What the bucket operators' CPU kernels compute, bit by bit, at each instruction set.

What the library's own reference kernels compute, too, which serve devices without a fast kernel.
Special values and rounding stand in test_ops_rounding.py, large buffers in test_ops_streaming.py.
"""

from __future__ import annotations

import pytest
import torch
from ops_reference import (
    DTYPES,
    LEVELS,
    PAIRS,
    SHAPE_CLASSES,
    SOURCE_CLASSES,
    assert_same_bits,
    cpu_level,
    expected_flatten,
    expected_sum_of_squares,
    expected_unflatten,
    make,
    maker,
)
from settings import threads

import torch_commhook.native.bucket_ops as ops

SCALES = (1.0, 1 / 3)
#: The thread counts that split a bucket differently.
THREADS = (1, 2, 3)


@pytest.fixture(params=LEVELS[1:], autouse=True)
def level(request):
    with cpu_level(request.param):
        yield request.param


with_reference_kernels = pytest.mark.parametrize("level", LEVELS, indirect=True)


# ---- flatten -------------------------------------------------------------------------------------


@with_reference_kernels
@pytest.mark.parametrize("name", [*SHAPE_CLASSES, *SOURCE_CLASSES])
def test_flatten(name):
    for source, target in PAIRS:
        tensors = make(name, source)
        for scale in SCALES:
            actual = ops.flatten(tensors, scale=scale, dtype=target)
            expected = expected_flatten(tensors, scale, target)
            assert_same_bits(actual, expected, f"{source} to {target} by {scale}")


@with_reference_kernels
@pytest.mark.parametrize("name", [*SHAPE_CLASSES, *SOURCE_CLASSES])
def test_flatten_into_out(name):
    for source, target in PAIRS:
        tensors = make(name, source)
        expected = expected_flatten(tensors, 0.7, target)
        for offset in (0, 1, 5):
            memory = torch.full((expected.numel() + offset + 3,), 7.0, dtype=target)
            out = memory[offset : offset + expected.numel()]
            assert ops.flatten(tensors, scale=0.7, out=out) is out
            assert_same_bits(out, expected, f"{source} to {target}, offset {offset}")
            assert (memory[:offset] == 7).all() and (memory[-3:] == 7).all()


@pytest.mark.parametrize("name", [*SHAPE_CLASSES, *SOURCE_CLASSES])
def test_flatten_keeps_its_inputs(name):
    tensors = make(name, torch.float32)
    before = [tensor.clone() for tensor in tensors]
    ops.flatten(tensors, scale=0.5)
    for tensor, old in zip(tensors, before, strict=True):
        assert_same_bits(tensor, old, name)


def test_flatten_out_of_any_shape():
    tensors = make("mixed", torch.float32)
    total = sum(tensor.numel() for tensor in tensors)
    out = torch.empty(2, total // 2) if total % 2 == 0 else torch.empty(1, total, 1)
    ops.flatten(tensors, out=out)
    assert_same_bits(out.reshape(-1), expected_flatten(tensors, 1.0, torch.float32))


def test_flatten_dtype_defaults_to_that_of_the_tensors():
    for dtype in DTYPES:
        assert ops.flatten(make("mixed", dtype)).dtype == dtype


@pytest.mark.parametrize("name", ["some_empty", "mixed", "strided", "transposed", "odd_rows"])
def test_flatten_of_mixed_dtypes(name):
    tensors = [tensor for dtype in DTYPES for tensor in make(name, dtype)]
    tensors = tensors[::2] + tensors[1::2]
    for target in DTYPES:
        expected = expected_flatten(tensors, 1 / 3, target)
        assert_same_bits(ops.flatten(tensors, scale=1 / 3, dtype=target), expected, target)


def test_flatten_on_several_threads():
    for name in ("odd_rows", "many_tiny", "step_and_row", "one_large"):
        tensors = make(name, torch.float32)
        for target in DTYPES:
            expected = expected_flatten(tensors, 1 / 3, target)
            for count in THREADS:
                with threads(count):
                    actual = ops.flatten(tensors, scale=1 / 3, dtype=target)
                assert_same_bits(actual, expected, f"{name} to {target}, {count} threads")


@pytest.mark.parametrize("scale", [0.0, -0.0, -2.0, 1e-50, 1e300, float("inf"), float("nan")])
def test_flatten_by_any_scale(scale):
    for source, target in PAIRS:
        tensors = make("mixed", source)
        expected = expected_flatten(tensors, scale, target)
        actual = ops.flatten(tensors, scale=scale, dtype=target)
        assert_same_bits(actual, expected, f"{source} to {target}")


def test_flatten_of_memory_that_no_element_is_aligned_to():
    memory = bytearray(4 * 5000 + 1)
    source = torch.frombuffer(memory, dtype=torch.float32, offset=1)
    source.copy_(maker(torch.float32)(5000))
    expected = source.clone()
    assert_same_bits(ops.flatten([source]), expected)
    other = torch.frombuffer(bytearray(4 * 5000 + 1), dtype=torch.float32, offset=1)
    ops.flatten([source], out=other)
    assert_same_bits(other.clone(), expected)


def test_flatten_of_a_lazily_negated_tensor():
    values = maker(torch.float32)(40, 2)
    imaginary = torch.view_as_complex(values).conj().imag
    assert imaginary.is_neg()
    assert_same_bits(ops.flatten([imaginary]), -values[:, 1])


# ---- flatten_stats -------------------------------------------------------------------------------


@with_reference_kernels
@pytest.mark.parametrize("name", [*SHAPE_CLASSES, *SOURCE_CLASSES])
@pytest.mark.parametrize(
    ("scale", "pairs"),
    # By 1e5 float16 overflows.
    [(1 / 3, PAIRS), (1e5, ((torch.float32, torch.float32), (torch.float64, torch.float16)))],
    ids=["small", "large"],
)
def test_flatten_stats(name, scale, pairs):
    for source, target in pairs:
        tensors = make(name, source)
        stats = ops.flatten_stats(tensors, scale=scale, dtype=target)
        expected = expected_flatten(tensors, scale, target)
        context = f"{source} to {target}"
        assert_same_bits(stats.buffer, expected, context)
        assert_same_bits(stats.nonfinite_count, (~expected.isfinite()).sum(), context)
        assert stats.sum_of_squares.dtype == torch.float64 and stats.sum_of_squares.shape == ()
        total = expected_sum_of_squares(tensors, scale, target)
        assert float(stats.sum_of_squares) == pytest.approx(total, rel=1e-12, abs=0), context


def test_flatten_stats_counts_what_is_not_finite_in_the_buffer():
    for source, target in PAIRS:
        for name in ("every_short_length", "transposed", "odd_rows"):
            tensors = make(name, source)
            for i, tensor in enumerate(tensors):
                flat = torch.empty(0, dtype=source).set_(tensor.untyped_storage())
                flat[i % 7 :: 11] = float("nan")
                flat[i % 5 :: 13] = float("-inf")
                flat[i % 3 :: 17] = torch.finfo(source).max  # finite only in some dtypes
            stats = ops.flatten_stats(tensors, dtype=target)
            expected = expected_flatten(tensors, 1.0, target)
            assert_same_bits(stats.buffer, expected, f"{source} to {target}")
            count = (~expected.isfinite()).sum()
            assert_same_bits(stats.nonfinite_count, count, f"{name}, {source} to {target}")
            assert not stats.sum_of_squares.isfinite()


def test_flatten_stats_sums_before_the_cast():
    # 1e5 is finite before the cast, and its square counts; after it, it is infinite.
    stats = ops.flatten_stats([torch.full((3,), 1e5)], dtype=torch.float16)
    assert stats.nonfinite_count == 3
    assert stats.sum_of_squares == 3e10


def test_flatten_stats_keeps_large_sums():
    # The squares overflow float32, and 2^24 + 1 ones would not add up in it.
    assert ops.flatten_stats([torch.full((8,), 1e30)]).sum_of_squares > 7.9e60
    tensors = [torch.tensor([2.0**20]), torch.full((1 << 17,), 2.0**-6)]
    assert ops.flatten_stats(tensors).sum_of_squares == 2.0**40 + 2.0**5


def test_flatten_stats_does_not_depend_on_the_number_of_threads():
    for name in ("odd_rows", "many_tiny", "step_and_row", "one_large"):
        for source, target in ((torch.float32, torch.bfloat16), (torch.float64, torch.float32)):
            tensors = make(name, source) * 2
            with threads(1):
                once = ops.flatten_stats(tensors, scale=1 / 3, dtype=target)
            for count in (2, 3, 5):
                with threads(count):
                    again = ops.flatten_stats(tensors, scale=1 / 3, dtype=target)
                for one, other in zip(once, again, strict=True):
                    assert_same_bits(other, one, f"{name}, {count} threads")


# ---- unflatten -----------------------------------------------------------------------------------


@with_reference_kernels
@pytest.mark.parametrize("name", [*SHAPE_CLASSES, *SOURCE_CLASSES])
def test_unflatten(name):
    for source, target in PAIRS:
        like = make(name, target, seed=1)
        for tensor in like:
            tensor.untyped_storage().fill_(255)  # NaN: the contents are not to be read
        buffer = maker(source)(sum(tensor.numel() for tensor in like))
        for scale in SCALES:
            actual = ops.unflatten(buffer, like, scale=scale)
            expected = expected_unflatten(buffer, like, scale)
            for new, right, model in zip(actual, expected, like, strict=True):
                assert_same_bits(new, right, f"{source} to {target} by {scale}")
                assert new.stride() == torch.empty_like(model).stride()


@with_reference_kernels
@pytest.mark.parametrize("name", SHAPE_CLASSES)
def test_unflatten_into(name):
    for source, target in PAIRS:
        tensors = make(name, target, seed=1)
        buffer = maker(source)(sum(tensor.numel() for tensor in tensors))
        before = buffer.clone()
        for scale in SCALES:
            assert ops.unflatten_into(buffer, tensors, scale=scale) is None
            expected = expected_unflatten(buffer, tensors, scale)
            for tensor, right in zip(tensors, expected, strict=True):
                assert_same_bits(tensor, right, f"{source} to {target} by {scale}")
        assert_same_bits(buffer, before, name)


def test_unflatten_of_mixed_dtypes():
    like = [tensor for dtype in DTYPES for tensor in make("mixed", dtype)]
    for source in DTYPES:
        buffer = maker(source)(sum(tensor.numel() for tensor in like))
        expected = expected_unflatten(buffer, like, 1 / 3)
        returned = ops.unflatten(buffer, like, scale=1 / 3)
        ops.unflatten_into(buffer, like, scale=1 / 3)
        for new, existing, right in zip(returned, like, expected, strict=True):
            assert_same_bits(new, right, source)
            assert_same_bits(existing, right, source)


def test_unflatten_into_on_several_threads():
    for name in ("odd_rows", "many_tiny", "step_and_row", "one_large"):
        tensors = make(name, torch.float32)
        buffer = maker(torch.bfloat16)(sum(tensor.numel() for tensor in tensors))
        expected = expected_unflatten(buffer, tensors, 1 / 3)
        for count in THREADS:
            for tensor in tensors:
                tensor.zero_()
            with threads(count):
                ops.unflatten_into(buffer, tensors, scale=1 / 3)
            for tensor, right in zip(tensors, expected, strict=True):
                assert_same_bits(tensor, right, f"{name}, {count} threads")


def test_unflatten_of_nothing():
    assert ops.unflatten(torch.empty(0), []) == []
    ops.unflatten_into(torch.empty(2, 0), [])


def test_unflatten_takes_a_buffer_of_any_shape_and_alignment():
    like = make("mixed", torch.float32)
    total = sum(tensor.numel() for tensor in like)
    memory = maker(torch.bfloat16)(total + 9)
    for offset in (0, 1, 3, 8):
        buffer = memory[offset : offset + total].view(1, total, 1)
        expected = expected_unflatten(buffer, like, 2.0)
        for new, right in zip(ops.unflatten(buffer, like, scale=2.0), expected, strict=True):
            assert_same_bits(new, right, offset)


def test_unflatten_into_a_lazy_copy_leaves_the_original():
    original = torch.zeros(100)
    copy = torch._lazy_clone(original)
    ops.unflatten_into(torch.ones(100), [copy])
    assert (copy == 1).all() and (original == 0).all()
