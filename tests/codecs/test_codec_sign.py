"""Signs with the mean magnitude of each block: exact values."""

from __future__ import annotations

import math

import pytest
import torch
from codec_examples import restore
from ops_reference import LEVELS, cpu_level
from torch import Tensor

from torch_commhook.codecs import CODECS


def check_magnitudes(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Returns the blocks of values, and of what a message restores."""
    restored = restore(CODECS["sign"](block_size), x)
    blocks, got = (values.view(-1, block_size).double() for values in (x, restored))
    magnitude = blocks.abs().mean(1, keepdim=True)
    torch.testing.assert_close(got, blocks.sign() * magnitude, rtol=1e-6, atol=0)
    return blocks, got


@pytest.mark.parametrize("block_size", [32, 256, 4096])
def test_magnitude_and_error(block_size: int) -> None:
    blocks, got = check_magnitudes(torch.randn(block_size * 5), block_size)
    square = blocks.square().sum(1)
    expected = 1 - blocks.abs().sum(1).square() / (block_size * square)
    torch.testing.assert_close((blocks - got).square().sum(1) / square, expected)


def test_error_on_a_gaussian() -> None:
    x = torch.randn(1 << 20)
    error = (restore(CODECS["sign"](4096), x) - x).square().sum() / x.square().sum()
    assert error.item() == pytest.approx(1 - 2 / math.pi, rel=0.01)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("block_size", [32, 1024, 4096])
def test_magnitudes_whose_sum_is_beyond_float32(block_size: int, level: str) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.rand(block_size * 5) * largest
    x[:block_size] = largest
    x[block_size:].mul_(torch.randn(block_size * 4).sign())
    with cpu_level(level):
        check_magnitudes(x, block_size)
