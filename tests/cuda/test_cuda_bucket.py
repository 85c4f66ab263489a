"""What the bucket operators' CUDA kernels compute, bit by bit.

On a GPU, and the same kernels on the host: what all devices compute, and what only these kernels
treat in their own way. Streams, graphs, launches and refusals stand in test_cuda_launch.py, the
index arithmetic in test_cuda_partition.py.
"""

from __future__ import annotations

import math
import random
from contextlib import nullcontext

import pytest
import torch
from bucket_tests import *  # noqa: F403
from bucket_tests import assert_flattens, assert_unflattens_into, total
from cuda_on_host import nothing_past
from kernel_device import COUNTS
from ops_reference import (
    DTYPES,
    PAIRS,
    assert_same_bits,
    counted,
    expected_count,
    expected_flatten,
    maker,
)

import torch_commhook.native.bucket_ops as ops

of_pairs = pytest.mark.parametrize(
    ("source", "target"), PAIRS, ids=lambda dtype: str(dtype).removeprefix("torch.")
)


@pytest.fixture(autouse=True)
def device(kernel_device):
    with kernel_device.kernels():
        yield kernel_device


@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_tensors(count, device):
    new = maker(torch.float32)
    tensors = [new(1 + 37 * i % 101) for i in range(count)]
    assert_flattens(device, tensors, 1 / 3, torch.bfloat16)
    assert_unflattens_into(device, maker(torch.bfloat16)(total(tensors)), tensors, 1 / 3)
    assert_flattens(device, [new(64) for _ in range(count)], 1.0, torch.float32)


def random_tensors(draw, dtypes):
    """Tensors of random lengths and values, each at a random place among NaNs."""
    tensors = []
    for _ in range(draw.randint(1, 60)):
        numel = draw.choice([0, 64, draw.randint(1, 3), 4096 + draw.randint(-4, 4)])
        numel = draw.choice([numel, draw.randint(1, 300)])
        first, dtype = draw.randrange(16), draw.choice(dtypes)
        memory = torch.full((first + numel + draw.choice([0, 5]),), math.nan, dtype=dtype)
        values = memory[first : first + numel].copy_(maker(dtype, draw.getrandbits(30))(numel))
        for special in (math.inf, math.nan, 65520.0, 1e-41 * draw.randrange(100)):
            if numel:
                values[draw.randrange(numel)] = special
        tensors.append(values)
    return tensors


@pytest.mark.parametrize("dtypes", [DTYPES, *((dtype,) for dtype in DTYPES)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_random_tensors(seed, dtypes, kernel_device):
    """Every element once, in its dtype, whatever the number of warps is."""
    draw = random.Random(f"{seed} {dtypes}")
    for target in DTYPES:
        tensors = random_tensors(draw, dtypes)
        scale, warps = draw.choice([1.0, 0.125, 1 / 3, 3e4]), draw.choice([1, 5, 128, 6912])
        with kernel_device.kernels(warps):
            assert_flattens(kernel_device, tensors, scale, target)
            assert counted(*kernel_device.copy(tensors)) == expected_count(tensors)
            buffer = maker(target)(total(tensors))
            assert_unflattens_into(kernel_device, buffer, tensors, scale)


@of_pairs
def test_every_relative_alignment(source, target, device):
    values, memory = maker(source)(700), torch.empty(700, dtype=target, device=device.name)
    (copy,) = device.copy([values])
    for first in range(9):
        for offset in range(9):
            for count in (5, 64, 640):
                given, out = copy[first : first + count], memory[offset : offset + count]
                expected = expected_flatten([values[first : first + count]], 0.7, target)
                for write in (
                    lambda given=given, out=out: ops.flatten([given], scale=0.7, out=out),
                    lambda given=given, out=out: ops.unflatten_into(given, [out], scale=0.7),
                ):
                    memory.fill_(7)
                    write()
                    assert_same_bits(out.cpu(), expected, f"{first} to {offset}, {count} elements")
                    assert (memory[:offset] == 7).all() and (memory[offset + count :] == 7).all()


@of_pairs
def test_rows_that_end_with_their_memory(source, target, device):
    """The host finds an access past them; memcheck and AddressSanitizer find any other."""

    def memory(values, first):
        whole = torch.empty(first + values.numel(), dtype=values.dtype, device=device.name)
        whole[first:] = values
        return whole[first:]

    for first in range(9):
        for count in (1, 5, 64, 655):
            values = maker(source)(count)
            expected = expected_flatten([values], 0.7, target)
            given, out = memory(values, first), memory(torch.zeros_like(expected), count % 4)
            with nothing_past([given, out]) if device.is_slow else nullcontext():
                ops.flatten([given], scale=0.7, out=out)
                assert_same_bits(out.cpu(), expected, f"{count} elements at {first}")
                ops.unflatten_into(given, [out.zero_()], scale=0.7)
                assert_same_bits(out.cpu(), expected, f"{count} elements at {first}")
                assert counted(given) == 0


def test_more_than_2_31_elements(device):
    count = (1 << 31) + 12345
    if device.is_slow or torch.cuda.mem_get_info()[0] < 8 * count:
        pytest.skip("needs 16 GiB of free GPU memory")
    large = torch.empty(count, dtype=torch.bfloat16, device=device.name).uniform_(-1, 1)
    small = torch.ones(7, dtype=torch.bfloat16, device=device.name)
    out = ops.flatten([small, large, small])
    assert torch.equal(out[7 : 7 + count], large)
    assert (out[:7] == 1).all() and (out[7 + count :] == 1).all()
    large.zero_()
    out[7 + count - 9 : 7 + count] = 5
    ops.unflatten_into(out, [small, large, small.clone()])
    assert torch.equal(out[7 : 7 + count], large)


@pytest.mark.parametrize("count", [3, 500, 4000])
def test_flatten_stats_is_repeatable(count, device):
    new = maker(torch.float32)
    tensors = device.copy([new(1 + 997 * i % 5000) for i in range(count)])
    once = ops.flatten_stats(tensors, scale=1 / 3, dtype=torch.bfloat16)
    for _ in range(5):
        again = ops.flatten_stats(tensors, scale=1 / 3, dtype=torch.bfloat16)
        for one, other in zip(once, again, strict=True):
            assert_same_bits(other.cpu(), one.cpu())
