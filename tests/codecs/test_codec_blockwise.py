"""Block quantisation: bounds and exact values. Exact sums, errors and shards: test_codecs.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from codec_examples import encode_blockwise as encode
from codec_examples import restore_blockwise as restore
from codec_examples import steps_of
from ops_reference import LEVELS as KERNELS
from ops_reference import cpu_level

FORMATS = [(bits, symmetric) for bits in (8, 4, 2) for symmetric in (True, False)]

of_each_format = pytest.mark.parametrize(("bits", "symmetric"), FORMATS)

#: Of two bits, symmetric, only random rounding has the largest magnitude for a step.
of_even_steps = pytest.mark.parametrize(
    ("bits", "symmetric"), [f for f in FORMATS if f != (2, True)]
)


@of_even_steps
@pytest.mark.parametrize("block_size", [16, 64, 256, 1008])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_nearest(bits: int, symmetric: bool, block_size: int, magnitude: float) -> None:
    x = torch.randn(block_size * 50, dtype=torch.float64).mul(magnitude).float()
    got = restore(x, bits=bits, symmetric=symmetric, block_size=block_size)
    step = steps_of(x.double(), bits, symmetric, block_size)
    lost = (got.double() - x.double()).view(-1, block_size).abs() / step
    assert lost.max() <= 0.5 + 1e-4
    assert lost.max() > 0.3


@of_each_format
def test_mean_square_on_smooth_data(bits: int, symmetric: bool) -> None:
    x = torch.rand(256 * 800) - 0.5
    step = steps_of(x, bits, symmetric, 256)
    if (bits, symmetric) != (2, True):
        lost = (restore(x, bits=bits, symmetric=symmetric) - x).view(-1, 256) / step
        assert lost.square().mean().item() == pytest.approx(1 / 12, rel=0.03)
    rounding = torch.tensor([3, 4])
    drawn = restore(x, bits=bits, symmetric=symmetric, rounding=rounding)
    lost = (drawn - x).view(-1, 256) / step
    assert lost.abs().max() < 1 + 1e-4
    assert lost.square().mean().item() == pytest.approx(1 / 6, rel=0.03)
    assert abs(lost.mean().item()) < 6 * (1 / 6 / lost.numel()) ** 0.5


@of_each_format
def test_stochastic_rounding_is_unbiased(bits: int, symmetric: bool) -> None:
    x = torch.randn(512)
    draws = 3000
    total = torch.zeros(512)
    for step in range(draws):
        rounding = torch.tensor([7, step])
        total += restore(x, bits=bits, symmetric=symmetric, rounding=rounding)
    off = (total / draws - x).view(-1, 256) / steps_of(x, bits, symmetric, 256)
    assert off.abs().max() < 6 * 0.5 / draws**0.5  # a draw's deviation is at most half a step


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_constants_are_exact_between_least_and_largest(bits: int) -> None:
    x = torch.full((600,), -1.7)
    assert torch.equal(restore(x, bits=bits, symmetric=False), x)


@of_each_format
@pytest.mark.parametrize("value", [1e-35, 1.0, 1e20, 3e38])
def test_the_error_of_a_constant_is_small(bits: int, symmetric: bool, value: float) -> None:
    x = torch.full((300,), value)
    for level in KERNELS:
        error = torch.zeros_like(x)
        with cpu_level(level):
            encode([x], error=error, bits=bits, symmetric=symmetric)
        # The step of two bits is counted in units of 2^-127.
        bound = 2.0**-128 if (bits, symmetric) == (2, True) else 0.0
        assert error.abs().max() <= value * 1e-6 + bound, level


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0.0, LARGEST),
        (-1.0, LARGEST),
        (3 * 2.0**103, LARGEST),  # high - low is rounded up, by half of LARGEST's last bit
        (0.2 * LARGEST, LARGEST),
        (0.999 * LARGEST, LARGEST),
        (-LARGEST, 0.0),
        (-0.5 * LARGEST, 0.5 * LARGEST),
    ],
)
@of_each_format
@pytest.mark.parametrize("level", KERNELS)
def test_the_largest_numbers_come_back_finite(
    bits: int, symmetric: bool, low: float, high: float, level: str
) -> None:
    x, error = torch.rand(300) * (0.99 * (high - low)) + low, torch.zeros(300)
    x[7], x[11] = high, low
    with cpu_level(level):
        got = restore(x, error=error, bits=bits, symmetric=symmetric)
    assert got.isfinite().all()
    assert torch.equal(error, x - got)
    step = steps_of(x[:256].double(), bits, symmetric, 256).item()
    # A step of two bits may be less than what it is to reach.
    assert error[:256].abs().max() <= (1.0 if (bits, symmetric) == (2, True) else 0.51) * step


@of_each_format
@pytest.mark.parametrize("level", KERNELS)
def test_random_rounding_of_the_largest_numbers(bits: int, symmetric: bool, level: str) -> None:
    """All of which one step more than the largest q would come back as an infinity."""
    largest = torch.tensor(LARGEST).view(torch.int32).item()
    values = torch.arange(largest - (1 << 17) + 1, largest + 1, dtype=torch.int32)
    x = -values.view(torch.float32).repeat_interleave(16)
    error = torch.zeros_like(x)
    options: dict[str, Any] = {"bits": bits, "symmetric": symmetric, "block_size": 16}
    with cpu_level(level):
        got = restore(x, error=error, rounding=torch.tensor([1, 2]), **options)
    assert got.isfinite().all()
    assert error.isfinite().all()


@of_each_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bits: int, symmetric: bool, value: float) -> None:
    x, error = torch.randn(768), torch.randn(768)
    x[300] = value
    before = error.clone()
    got = restore(x, bits=bits, symmetric=symmetric, error=error)
    assert got[256:512].isnan().all()
    assert got[:256].isfinite().all() and got[512:].isfinite().all()
    assert torch.equal(error[256:512], before[256:512])
    assert not torch.equal(error[:256], before[:256])


@of_each_format
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("block_size", [64, 128, 256])
def test_blocks_that_need_care_among_others(
    bits: int, symmetric: bool, scale: float, block_size: int
) -> None:
    """Vector kernels take runs of plain blocks, and leave the others to the general ones."""
    generator = torch.Generator().manual_seed(bits + block_size)
    values = torch.randn(40 * 256 + 77, generator=generator)
    care = [torch.nan, -torch.nan, torch.inf, -torch.inf, 1e-40, -0.0, LARGEST]
    for i, value in enumerate(care):
        values[1000 * (i + 1) + 37 * i] = value
    values[7500:8200] = 0.0
    values[8300:8700] = 3.0
    values[9000:9300] *= 1e-38
    form: dict[str, Any] = {"bits": bits, "symmetric": symmetric, "block_size": block_size}
    with cpu_level("reference"):
        expected = encode([values], scale=scale, **form)
    for level in KERNELS:
        with cpu_level(level):
            assert torch.equal(encode([values], scale=scale, **form), expected), level


def test_denormals() -> None:
    x = torch.randn(256).mul(1e-40)
    assert (restore(x) - x).abs().max() <= x.abs().max() / 254 + 127 * 2.0**-149
