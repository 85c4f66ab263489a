"""The library's own reference kernels, for devices without a fast kernel, against plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from ops_reference import (
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
    one_thread,  # noqa: F401
)

import torch_commhook.native.bucket_ops as ops


@pytest.mark.parametrize("name", [*SHAPE_CLASSES, *SOURCE_CLASSES])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_reference_kernels_flatten_as_documented(name, scale):
    with cpu_level("reference"):
        for source, target in PAIRS:
            tensors = make(name, source)
            expected = expected_flatten(tensors, scale, target)
            context = f"{source} to {target}"
            assert_same_bits(ops.flatten(tensors, scale=scale, dtype=target), expected, context)
            out = torch.empty_like(expected)
            assert ops.flatten(tensors, scale=scale, out=out) is out
            assert_same_bits(out, expected, context)


@pytest.mark.parametrize("name", [*SHAPE_CLASSES, *SOURCE_CLASSES])
def test_reference_kernels_measure_as_documented(name):
    with cpu_level("reference"):
        for source, target in ((torch.float32, torch.float32), (torch.float64, torch.float16)):
            tensors = make(name, source)
            stats = ops.flatten_stats(tensors, scale=1e5, dtype=target)
            expected = expected_flatten(tensors, 1e5, target)
            assert_same_bits(stats.buffer, expected, name)
            assert stats.nonfinite_count == (~expected.isfinite()).sum()
            total = expected_sum_of_squares(tensors, 1e5, target)
            assert float(stats.sum_of_squares) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("name", SHAPE_CLASSES)
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_reference_kernels_unflatten_as_documented(name, scale):
    with cpu_level("reference"):
        for source, target in PAIRS:
            like = make(name, target, seed=1)
            buffer = maker(source)(sum(tensor.numel() for tensor in like))
            expected = expected_unflatten(buffer, like, scale)
            returned = ops.unflatten(buffer, like, scale=scale)
            ops.unflatten_into(buffer, like, scale=scale)
            for new, existing, right in zip(returned, like, expected, strict=True):
                assert_same_bits(new, right, f"{source} to {target}")
                assert_same_bits(existing, right, f"{source} to {target}")


# ---- the helpers themselves ----------------------------------------------------------------------


def test_assert_same_bits_can_fail():
    ones = torch.ones(3)
    assert_same_bits(torch.tensor([math.nan, 0.0]), torch.tensor([-math.nan, 0.0]))
    for other in (torch.tensor([1.0, 1.0, 1.0 + 2**-23]), ones.double(), torch.ones(1, 3)):
        with pytest.raises(AssertionError):
            assert_same_bits(other, ones)
    with pytest.raises(AssertionError, match=r"1 of 1 elements differ, the first at \(0,\): -0.0"):
        assert_same_bits(torch.tensor([-0.0]), torch.tensor([0.0]))


def test_cpu_level_is_restored():
    before = ops.cpu_capability()
    with cpu_level("default"):
        assert ops.cpu_capability() == "default"
    assert ops.cpu_capability() == before
