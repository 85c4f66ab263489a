"""What holds of the bucket operators for any list of tensors: Hypothesis chooses the lists."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops_reference import (
    DTYPES,
    LEVELS,
    assert_same_bits,
    cpu_level,
    expected_flatten,
    expected_sum_of_squares,
    expected_unflatten,
)

import torch_commhook.native.bucket_ops as ops

repeatable = settings(
    derandomize=True,
    deadline=None,
    max_examples=80,
    database=None,
    # The fixtures set the instruction set and the threads, which no example changes.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(params=LEVELS, autouse=True)
def level(request):
    with cpu_level(request.param):
        yield request.param


@dataclass
class View:
    """A strided tensor inside a memory of its own, which is larger on both sides."""

    memory: torch.Tensor
    tensor: torch.Tensor

    def untouched(self) -> torch.Tensor:
        """The memory outside the tensor."""
        mask = torch.ones(self.memory.shape, dtype=torch.bool)
        mask.as_strided(
            self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()
        ).fill_(False)
        return self.memory[mask]


SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 65520.0, -1e38, 2.0**-25, 1e-42)


@st.composite
def views(draw, dtypes=DTYPES, max_size=6, finite=False) -> View:
    """Of up to four dimensions in any order in memory, with gaps and an offset."""
    shape = draw(st.lists(st.integers(0, max_size), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    reach = 1
    for d in order:
        strides[d] = reach * draw(st.sampled_from((1, 1, 1, 2, 3)))
        reach = strides[d] * max(shape[d], 1)
    offset = draw(st.integers(0, 9))
    dtype = draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    memory = torch.randn(offset + reach + 9, generator=generator, dtype=torch.float64)
    if not finite:
        where = torch.randint(0, memory.numel(), (len(SPECIAL),), generator=generator)
        memory[where] = torch.tensor(SPECIAL, dtype=torch.float64)
    memory = memory.to(dtype)
    return View(memory, memory.as_strided(shape, strides, offset))


def tensors_of(list_of_views: list[View]) -> list[torch.Tensor]:
    return [view.tensor for view in list_of_views]


def total(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def random_buffer(tensors: list[torch.Tensor], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(total(tensors), generator=generator).to(dtype)


lists = st.lists(views(), min_size=1, max_size=8)
# 1e39 is infinite where scaling is done in float32.
EXTREME = (2.0**-30, 1e30, 1e39, math.inf, -math.inf, math.nan)
scales = st.one_of(st.just(1.0), st.floats(-1e3, 1e3), st.sampled_from(EXTREME))
dtypes = st.sampled_from(DTYPES)


@repeatable
@given(st.lists(views(finite=True), min_size=1, max_size=8), scales, dtypes)
def test_the_sum_of_squares_is_the_reference(inputs, scale, dtype):
    tensors = tensors_of(inputs)
    actual = float(ops.flatten_stats(tensors, scale=scale, dtype=dtype).sum_of_squares)
    expected = expected_sum_of_squares(tensors, scale, dtype)
    assert actual == pytest.approx(expected, rel=1e-12, abs=0, nan_ok=True)


@repeatable
@given(lists, scales, dtypes, st.integers(0, 17))
def test_flatten_is_the_reference_and_writes_nothing_but_out(inputs, scale, dtype, offset):
    tensors = tensors_of(inputs)
    expected = expected_flatten(tensors, scale, dtype)
    before = [view.memory.clone() for view in inputs]
    assert_same_bits(ops.flatten(tensors, scale=scale, dtype=dtype), expected)
    stats = ops.flatten_stats(tensors, scale=scale, dtype=dtype)
    assert_same_bits(stats.buffer, expected)
    assert stats.nonfinite_count == (~expected.isfinite()).sum()
    end = offset + expected.numel()
    memory = torch.full((end + 17,), -3.0, dtype=dtype)
    ops.flatten(tensors, scale=scale, out=memory[offset:end])
    assert_same_bits(memory[offset:end], expected)
    assert (memory[:offset] == -3).all() and (memory[end:] == -3).all()
    for view, old in zip(inputs, before, strict=True):
        assert_same_bits(view.memory, old)


@repeatable
@given(lists, dtypes, st.integers(0, 1 << 30), scales)
def test_unflatten_into_writes_nothing_but_the_tensors(outputs, dtype, seed, scale):
    tensors = tensors_of(outputs)
    buffer = random_buffer(tensors, dtype, seed)
    old_buffer = buffer.clone()
    before = [view.untouched() for view in outputs]
    expected = expected_unflatten(buffer, tensors, scale)
    ops.unflatten_into(buffer, tensors, scale=scale)
    for view, right, old in zip(outputs, expected, before, strict=True):
        assert_same_bits(view.tensor, right)
        assert_same_bits(view.untouched(), old)
    assert_same_bits(buffer, old_buffer)


@repeatable
@given(lists, dtypes, st.integers(0, 1 << 30), scales)
def test_unflatten_is_unflatten_into_new_tensors(models, dtype, seed, scale):
    like = tensors_of(models)
    buffer = random_buffer(like, dtype, seed)
    before = [view.memory.clone() for view in models]
    results = ops.unflatten(buffer, like, scale=scale)
    for result, right, model in zip(
        results, expected_unflatten(buffer, like, scale), like, strict=True
    ):
        assert_same_bits(result, right)
        assert result.stride() == torch.empty_like(model).stride()
    for view, old in zip(models, before, strict=True):
        assert_same_bits(view.memory, old)


@repeatable
@given(dtypes.flatmap(lambda dtype: st.lists(views((dtype,)), min_size=1, max_size=8)))
def test_unflatten_undoes_flatten(inputs):
    tensors = tensors_of(inputs)
    buffer = ops.flatten(tensors)
    for result, tensor in zip(ops.unflatten(buffer, tensors), tensors, strict=True):
        assert_same_bits(result, tensor)
    assert_same_bits(ops.flatten(ops.unflatten(buffer, tensors)), buffer)
