"""Signs with the mean magnitude of each block: exact values."""

from __future__ import annotations

import math

import pytest
import torch
from ops_reference import LEVELS, cpu_level
from torch import Tensor

from torch_commhook.codecs import CODECS


def restore(x: Tensor, block_size: int) -> Tensor:
    codec = CODECS["sign"](block_size)
    message = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
    codec.encode([x], message)
    out = torch.empty_like(x)
    codec.decode(message, [out])
    return out


@pytest.mark.parametrize("block_size", [32, 256, 4096])
def test_magnitude_and_error(block_size: int) -> None:
    x = torch.randn(block_size * 5)
    blocks, got = x.view(5, -1).double(), restore(x, block_size).view(5, -1).double()
    magnitude = blocks.abs().mean(1, keepdim=True)
    torch.testing.assert_close(got, blocks.sign() * magnitude, rtol=1e-6, atol=0)
    square = blocks.square().sum(1)
    expected = 1 - blocks.abs().sum(1).square() / (block_size * square)
    torch.testing.assert_close((blocks - got).square().sum(1) / square, expected)


def test_error_on_a_gaussian() -> None:
    x = torch.randn(1 << 20)
    error = (restore(x, 4096) - x).square().sum() / x.square().sum()
    assert error.item() == pytest.approx(1 - 2 / math.pi, rel=0.01)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("block_size", [32, 1024, 4096])
def test_magnitudes_whose_sum_is_beyond_float32(block_size: int, level: str) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.rand(block_size * 5) * largest
    x[:block_size] = largest
    x[block_size:].mul_(torch.randn(block_size * 4).sign())
    with cpu_level(level):
        got = restore(x, block_size).view(5, -1).double()
    blocks = x.view(5, -1).double()
    magnitude = blocks.abs().mean(1, keepdim=True)
    torch.testing.assert_close(got, blocks.sign() * magnitude, rtol=1e-6, atol=0)


def test_bytes() -> None:
    assert CODECS["sign"]().nbytes(1 << 20) == (1 << 20) * (1 / 8 + 4 / 1024)


def test_settings() -> None:
    assert repr(CODECS["sign"]()) == "sign()"
    with pytest.raises(ValueError, match="sign: block_size must be a multiple of 32"):
        CODECS["sign"](48)
