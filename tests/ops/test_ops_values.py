"""What the bucket operators' CPU kernels compute, bit by bit, at each instruction set.

What the library's own reference kernels compute, too, which serve devices without a fast kernel.
Special values and rounding stand in test_ops_rounding.py, large buffers in test_ops_streaming.py.
"""

from __future__ import annotations

import pytest
import torch
from bucket_checks import (
    ANY_SCALES,
    CASES,
    OF_MIXED_DTYPES,
    assert_flattens,
    assert_unflattens,
    assert_unflattens_into,
    check_mixed_dtypes,
    check_nonfinite_count,
    check_sums_before_the_cast,
    total,
)
from kernel_device import KernelDevice
from ops_reference import (
    DTYPES,
    LEVELS,
    PAIRS,
    SHAPE_CLASSES,
    SOURCE_CLASSES,
    assert_same_bits,
    cpu_level,
    expected_flatten,
    expected_unflatten,
    make,
    maker,
    threads,
)

import torch_commhook.native.bucket_ops as ops

CPU = KernelDevice("cpu")
#: By this scale, float16 overflows.
LARGE = [(torch.float32, torch.float32, 1e5), (torch.float64, torch.float16, 1e5)]


@pytest.fixture(params=LEVELS[1:], autouse=True)
def level(request):
    with cpu_level(request.param):
        yield request.param


with_reference_kernels = pytest.mark.parametrize("level", LEVELS, indirect=True)
of_sources = pytest.mark.parametrize("name", [*SHAPE_CLASSES, *SOURCE_CLASSES])


# ---- all operators -------------------------------------------------------------------------------


@with_reference_kernels
@of_sources
def test_flatten(name):
    for source, target, scale in [*CASES, *LARGE]:
        assert_flattens(CPU, make(name, source), scale, target)


@with_reference_kernels
@of_sources
def test_unflatten(name):
    for source, target, scale in CASES:
        like = make(name, target, seed=1)
        assert_unflattens(CPU, maker(source)(total(like)), like, scale)


@with_reference_kernels
@pytest.mark.parametrize("name", SHAPE_CLASSES)
def test_unflatten_into(name):
    for source, target, scale in CASES:
        tensors = make(name, target, seed=1)
        assert_unflattens_into(CPU, maker(source)(total(tensors)), tensors, scale)


@pytest.mark.parametrize("name", OF_MIXED_DTYPES)
def test_mixed_dtypes(name):
    check_mixed_dtypes(CPU, name)


@pytest.mark.parametrize("scale", ANY_SCALES)
def test_any_scale(scale):
    for source, target in PAIRS:
        assert_flattens(CPU, make("mixed", source), scale, target)


@pytest.mark.parametrize("name", ["odd_rows", "many_tiny", "step_and_row", "one_large"])
def test_the_number_of_threads_does_not_matter(name):
    pairs = [(torch.float32, target) for target in DTYPES] + [(torch.float64, torch.float32)]
    for source, target in pairs:
        tensors, found = make(name, source) * 2, []
        back = [torch.zeros_like(tensor) for tensor in tensors]
        for count in (1, 2, 3, 5):
            with threads(count):
                buffer = ops.flatten(tensors, scale=1 / 3, dtype=target)
                stats = ops.flatten_stats(tensors, scale=1 / 3, dtype=target)
                ops.unflatten_into(buffer, back, scale=1 / 3)
            found.append([buffer, *stats, *(tensor.clone() for tensor in back)])
        for other in found[1:]:
            for one, another in zip(found[0], other, strict=True):
                assert_same_bits(another, one, f"{name}, {source} to {target}")
        # Each tensor is there twice, and its copies share memory.
        assert_same_bits(found[0][0], expected_flatten(tensors, 1 / 3, target), name)


# ---- flatten -------------------------------------------------------------------------------------


def test_flatten_out_of_any_shape():
    tensors = make("mixed", torch.float32)
    count = total(tensors)
    out = torch.empty(2, count // 2) if count % 2 == 0 else torch.empty(1, count, 1)
    ops.flatten(tensors, out=out)
    assert_same_bits(out.reshape(-1), expected_flatten(tensors, 1.0, torch.float32))


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


@pytest.mark.parametrize("name", ["every_short_length", "transposed", "odd_rows"])
def test_flatten_stats_counts_what_is_not_finite_in_the_buffer(name):
    check_nonfinite_count(CPU, name)


def test_flatten_stats_sums_before_the_cast_in_float64():
    check_sums_before_the_cast(CPU)


# ---- unflatten -----------------------------------------------------------------------------------


def test_unflatten_of_nothing():
    assert ops.unflatten(torch.empty(0), []) == []
    ops.unflatten_into(torch.empty(2, 0), [])


def test_unflatten_takes_a_buffer_of_any_shape_and_alignment():
    like = make("mixed", torch.float32)
    count = total(like)
    memory = maker(torch.bfloat16)(count + 9)
    for offset in (0, 1, 3, 8):
        buffer = memory[offset : offset + count].view(1, count, 1)
        expected = expected_unflatten(buffer, like, 2.0)
        for new, right in zip(ops.unflatten(buffer, like, scale=2.0), expected, strict=True):
            assert_same_bits(new, right, offset)


def test_unflatten_into_a_lazy_copy_leaves_the_original():
    original = torch.zeros(100)
    copy = torch._lazy_clone(original)
    ops.unflatten_into(torch.ones(100), [copy])
    assert (copy == 1).all() and (original == 0).all()
