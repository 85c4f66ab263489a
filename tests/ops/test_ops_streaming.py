"""Buckets larger than the last-level cache, which the CPU kernels write past the caches.

Such stores must be aligned, so what matters here is where a destination begins and ends.
"""

from __future__ import annotations

import pytest
import torch
from ops_reference import (
    DTYPES,
    LEVELS,
    assert_same_bits,
    cache_bytes,
    converted,
    cpu_level,
    expected_flatten,
    maker,
    not_beyond_a_large_cache,
    split,
    threads,
)

import torch_commhook.native.bucket_ops as ops

#: From float32 to each dtype, and from each to float32.
of_dtypes = pytest.mark.parametrize(
    ("source", "target"),
    [
        *((torch.float32, target) for target in DTYPES),
        *((each, torch.float32) for each in DTYPES if each != torch.float32),
    ],
    ids=str,
)

pytestmark = not_beyond_a_large_cache


@pytest.fixture(params=LEVELS[1:], autouse=True)
def level(request):
    with cpu_level(request.param):
        yield request.param


def elements(dtype: torch.dtype) -> int:
    """The length of a buffer that is streamed."""
    return cache_bytes() // dtype.itemsize + 12_345


@pytest.fixture(scope="module")
def values():
    """Enough float32 values for every test, NaN and infinity among them."""
    memory = maker(torch.float32)(1 << 20).repeat(-(-elements(torch.float16) // (1 << 20)))
    memory[12_345] = float("nan")
    memory[2_345_678] = float("inf")
    return memory


def check_writes(write, expected: torch.Tensor) -> None:
    """Checks that ``write(out)`` writes ``expected`` and nothing around it, also on threads."""
    memory = torch.empty(expected.numel() + 7, dtype=expected.dtype)
    for offset, count in ((0, 1), (3, 2), (5, 1)):
        memory.fill_(7)
        part = memory[offset : offset + expected.numel()]
        with threads(count):
            write(part)
        assert_same_bits(part, expected, f"offset {offset}")
        assert (memory[:offset] == 7).all() and (memory[offset + expected.numel() :] == 7).all()


@of_dtypes
def test_flatten(values, source, target):
    given = values[: elements(target)].to(source)
    expected = converted(given, 1 / 3, target)
    check_writes(lambda out: ops.flatten(split(given), scale=1 / 3, out=out), expected)


def test_flatten_of_strided_tensors(values):
    count = elements(torch.float32)
    rows = count // 2 // 1001
    tensors = [
        values[: rows * 1001].view(rows, 1001)[:, :1000],
        values[: rows * 1001].view(1001, rows).t(),
    ]
    expected = expected_flatten(tensors, 2.0, torch.float32)
    assert expected.numel() * 4 > cache_bytes() * 0.99
    tensors.append(values[:count:7])
    expected = torch.cat([expected, converted(values[:count:7], 2.0, torch.float32)])
    assert_same_bits(ops.flatten(tensors, scale=2.0), expected)


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_flatten_stats(values, target):
    tensors = split(values[: elements(target)])
    first = ops.flatten_stats(tensors, dtype=target)
    assert_same_bits(first.buffer, converted(values[: elements(target)], 1.0, target))
    assert first.nonfinite_count == 2
    with threads(2):
        again = ops.flatten_stats([torch.nan_to_num(t, 0.0, 0.0) for t in tensors], dtype=target)
    finite = torch.nan_to_num(values[: elements(target)], 0.0, 0.0).double()
    assert float(again.sum_of_squares) == pytest.approx(float(finite.square().sum()), rel=1e-12)
    assert again.nonfinite_count == 0


@of_dtypes
def test_unflatten_into(values, source, target):
    buffer = values[: elements(target)].to(source)
    expected = converted(buffer, 1 / 3, target)
    check_writes(lambda out: ops.unflatten_into(buffer, split(out), scale=1 / 3), expected)
    like = split(torch.empty(buffer.numel(), dtype=target))
    results = ops.unflatten(buffer, like, scale=1 / 3)
    assert_same_bits(torch.cat([each.reshape(-1) for each in results]), expected)


def test_unflatten_into_strided_tensors(values):
    count = elements(torch.float32)
    rows = count // 1001 + 1
    memory = torch.full((rows, 1003), 7.0)
    destination = memory[:, 1:1002].t()
    buffer = values[: destination.numel()]
    assert destination.numel() * 4 > cache_bytes()
    ops.unflatten_into(buffer, [destination], scale=0.5)
    assert_same_bits(destination, converted(buffer, 0.5, torch.float32).view(destination.shape))
    assert (memory[:, 0] == 7).all() and (memory[:, 1002] == 7).all()


def test_memory_that_no_element_is_aligned_to(values):
    # torch.frombuffer takes memory that starts inside an element: streamed stores would fault.
    for dtype in (torch.float32, torch.bfloat16):
        source = values[: elements(dtype)]
        memory = bytearray(dtype.itemsize * source.numel() + 1)
        out = torch.frombuffer(memory, dtype=dtype, offset=1)
        assert out.data_ptr() % dtype.itemsize == 1
        ops.flatten(split(source), out=out)
        assert_same_bits(out.clone(), converted(source, 1.0, dtype))
        out.zero_()
        ops.unflatten_into(source, split(out))
        assert_same_bits(out.clone(), converted(source, 1.0, dtype))
