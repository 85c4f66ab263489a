"""What the bucket operators' CPU kernels compute, bit by bit, at each instruction set.

What the library's own reference kernels compute, too, which serve devices without a fast kernel.
Most of the tests are those of all devices. Large buffers stand in test_ops_streaming.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from bucket_tests import *  # noqa: F403
from bucket_tests import there_and_back, total
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_device import KernelDevice
from ops_reference import (
    DTYPES,
    LEVELS,
    assert_same_bits,
    cpu_level,
    expected_flatten,
    expected_sum_of_squares,
    expected_unflatten,
    make,
    maker,
    threads,
)

import torch_commhook.native.bucket_ops as ops


@pytest.fixture(params=LEVELS, autouse=True)
def device(request):
    with cpu_level(request.param):
        yield KernelDevice("cpu")


@pytest.mark.parametrize("scale", [1 / 3, 1.0])
@pytest.mark.parametrize("name", ["odd_rows", "many_tiny", "step_and_row", "one_large"])
def test_the_number_of_threads_does_not_matter(name, scale):
    pairs = [(torch.float32, target) for target in DTYPES] + [(torch.float64, torch.float32)]
    for source, target in pairs:
        tensors, found = make(name, source) * 2, []
        back = [torch.zeros_like(tensor) for tensor in tensors]
        for count in (1, 2, 3, 5):
            with threads(count):
                buffer = ops.flatten(tensors, scale=scale, dtype=target)
                stats = ops.flatten_stats(tensors, scale=scale, dtype=target)
                ops.unflatten_into(buffer, back, scale=scale)
                like = ops.unflatten(buffer, tensors, scale=scale)
            if ops.cpu_capability() == "reference":  # ATen's sum may depend on it
                stats = (stats.buffer, stats.nonfinite_count)
            found.append([buffer, *stats, *like, *(tensor.clone() for tensor in back)])
        for other in found[1:]:
            for one, another in zip(found[0], other, strict=True):
                assert_same_bits(another, one, f"{name}, {source} to {target}")
        # Each tensor is there twice, and its copies share memory.
        assert_same_bits(found[0][0], expected_flatten(tensors, scale, target), name)


def test_flatten_out_of_any_shape():
    tensors = make("mixed", torch.float32)
    count = total(tensors)
    out = torch.empty(2, count // 2) if count % 2 == 0 else torch.empty(1, count, 1)
    ops.flatten(tensors, out=out)
    assert_same_bits(out.reshape(-1), expected_flatten(tensors, 1.0, torch.float32))


def test_flatten_of_memory_that_no_element_is_aligned_to(device):
    source, other = (device.misaligned(5000, torch.float32) for _ in range(2))
    source.copy_(maker(torch.float32)(5000))
    expected = source.clone()
    assert_same_bits(ops.flatten([source]), expected)
    ops.flatten([source], out=other)
    assert_same_bits(other.clone(), expected)


def test_unflatten_takes_a_buffer_of_any_shape_and_alignment():
    like = make("mixed", torch.float32)
    count = total(like)
    memory = maker(torch.bfloat16)(count + 9)
    for offset in (0, 1, 3, 8):
        buffer = memory[offset : offset + count].view(1, count, 1)
        expected = expected_unflatten(buffer, like, 2.0)
        for new, right in zip(ops.unflatten(buffer, like, scale=2.0), expected, strict=True):
            assert_same_bits(new, right, offset)


# ---- rounding and special values -----------------------------------------------------------------


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


def test_signs_of_zero_and_nan(device):
    zeros = torch.tensor([0.0, -0.0] * 20)
    for dtype in DTYPES:
        assert_same_bits(ops.flatten([zeros], dtype=dtype), zeros.to(dtype), dtype)
        assert_same_bits(ops.flatten([zeros], scale=-1.0, dtype=dtype), -zeros.to(dtype), dtype)
        # All NaNs stay NaNs: quiet or signalling, of either sign, with the payload in the low bits.
        bits = [0x7F800001, 0x7FFFFFFF, 0x7FC00000, -0x00400000, -0x007FFFFF, -1]
        nans = torch.tensor(bits * 7, dtype=torch.int32).view(torch.float32)
        for actual in there_and_back(device, nans, dtype):
            assert actual.isnan().all()


@pytest.mark.parametrize("scale", [float("inf"), 1e39])
@pytest.mark.parametrize("numel", [1, 3, 17])
def test_stats_count_no_padding(scale: float, numel: int) -> None:
    _, sum_of_squares, count = ops.flatten_stats([torch.ones(numel)], scale=scale)
    assert count.item() == numel and sum_of_squares.item() == float("inf")


# ---- any list of tensors: Hypothesis chooses them ------------------------------------------------

repeatable = settings(
    derandomize=True,
    deadline=None,
    max_examples=80,
    database=None,
    # The fixtures set the instruction set and the threads, which no example changes.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


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
