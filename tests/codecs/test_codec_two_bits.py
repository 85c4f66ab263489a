"""``blockwise`` with two bits, symmetric, rounded to the nearest: its steps and bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_examples import encode_blockwise as encode
from codec_examples import restore_blockwise as restore
from ops_reference import LEVELS as KERNELS
from ops_reference import cpu_level
from torch import Tensor

from torch_commhook.codecs.blockwise import blockwise


def fitted_steps(x: Tensor, block_size: int) -> np.ndarray:
    """The steps of blocks as ``blockwise_math.h`` describes them, in NumPy."""
    steps = []
    for first in range(0, len(x), block_size):
        magnitudes = np.abs(x[first : first + block_size].numpy())
        one = np.float32
        most = magnitudes.max()
        largest = max(most, one(2.0**-109))
        units = np.rint(magnitudes * (one(2.0**18) / largest)).astype(np.int64)
        limit = np.rint(one(units.sum()) * one(0.767) / one(len(units)))
        larger = units[units > limit]
        step = most
        if len(larger):
            step = min(largest * (one(larger.sum()) / one(len(larger)) * one(2.0**-18)), most)
        steps.append(step)
    return np.array(steps, dtype=np.float32)


def of_reference(x: Tensor, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """A message's codes and steps, and what they mean."""
    steps = fitted_steps(x, block_size)
    codes, values = [], []
    with np.errstate(divide="ignore", invalid="ignore"):
        for number, first in enumerate(range(0, len(x), block_size)):
            p, step = x[first : first + block_size].numpy(), steps[number]
            factor = np.float32(1) / step if step > 0 else np.float32(0)
            q = np.rint(np.clip(p * factor, -1, 1)).astype(np.int64)
            width = -(-len(q) // 4)
            padded = np.concatenate([q, np.zeros(4 * width - len(q), dtype=np.int64)]) & 3
            codes.append(sum(padded.reshape(4, width) << 2 * np.arange(4)[:, None]))
            values.append(q.astype(np.float32) * step)
    return np.concatenate(codes).astype(np.uint8), np.concatenate(values)


@pytest.mark.parametrize("level", KERNELS)
@pytest.mark.parametrize("block_size", [16, 48, 64, 128, 256, 320, 1024, 4096])
@pytest.mark.parametrize("numel", [1, 3, 16, 17, 255, 4 * 256, 20 * 256 + 77, 4 * 4096 + 5])
def test_bits_of_two_bits(level: str, block_size: int, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel + block_size)
    x = torch.randn(numel, generator=generator)
    x *= 10.0 ** torch.randint(-20, 20, (numel,), generator=generator)  # none too small to lift
    if numel > 600:
        x[200:500] = torch.randn(300, generator=generator)
        x[500:560] = 0.0
    with cpu_level(level):
        message = encode([x], bits=2, block_size=block_size)
        out = torch.empty_like(x)
        blockwise(bits=2, block_size=block_size).decode(message, [out])
    codes, values = of_reference(x, block_size)
    assert np.array_equal(message[: len(codes)].numpy(), codes)
    assert np.array_equal(out.numpy(), values)


@pytest.mark.parametrize("block_size", [64, 256, 1024])
def test_two_bits_on_a_gaussian(block_size: int) -> None:
    """Its step is nearly the best, 1.224 sigma, of three levels: an error of 0.190 of its power."""
    x = torch.randn(block_size * 400 * 256 // block_size)
    lost = restore(x, bits=2, block_size=block_size) - x
    # Of fewer values it is a little less, as their step is their own.
    error = (lost.square().sum() / x.square().sum()).item()
    assert error == pytest.approx(0.190, rel=0.03 if block_size > 64 else 0.05)
    steps = fitted_steps(x, block_size)
    assert steps.mean() == pytest.approx(1.224, rel=0.01)


@pytest.mark.parametrize("level", KERNELS)
def test_few_large_values_are_not_lost(level: str) -> None:
    x = torch.zeros(512)
    x[[3, 77, 200]] = torch.tensor([2.5, -2.5, 2.5])
    x[300] = -1e-6
    with cpu_level(level):
        assert torch.equal(restore(x, bits=2), x)
    x[5:50] = 1e-4
    with cpu_level(level):
        got = restore(x, bits=2)
    assert (got - x).square().sum() < 1e-6 * x.square().sum()


def test_random_two_bits_are_the_largest_magnitude_zero_or_its_negative() -> None:
    x = torch.randn(256)
    got = restore(x, bits=2, rounding=torch.tensor([1, 2]))
    most = x.abs().max()
    assert set(got.unique().tolist()) == {-most.item(), 0.0, most.item()}


@pytest.mark.parametrize("level", KERNELS)
@pytest.mark.parametrize("power", [-149, -148, -140, -127, -126, -110, -109, -101, -100, -81, -80])
def test_two_bits_of_the_smallest_numbers(level: str, power: int) -> None:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(power + 200)) * 2.0**power
    error = torch.zeros_like(x)
    with cpu_level(level):
        got = restore(x, error=error, bits=2)
    assert torch.equal(error, x - got)
    assert (got.abs() <= x.abs().max()).all()
    if power > -126:  # below, units are few
        assert error.double().square().sum() < 0.25 * x.double().square().sum()
    with cpu_level("reference"):
        assert torch.equal(got, restore(x, bits=2))
