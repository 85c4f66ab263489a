"""8-bit floats with a scale for each block: bounds and exact values."""

from __future__ import annotations

import pytest
import torch
from codec_examples import encode, restore
from ops_reference import LEVELS, cpu_level
from torch import Tensor

from torch_commhook.codecs import CODECS

FORMATS = {
    "e4m3": (torch.float8_e4m3fn, 448.0, 2.0**-4, 2.0**-9),
    "e5m2": (torch.float8_e5m2, 57344.0, 2.0**-3, 2.0**-16),
}


@pytest.mark.parametrize("format", FORMATS)
def test_every_8_bit_float_is_restored(format: str) -> None:
    dtype, largest, _, _ = FORMATS[format]
    x = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    x = x[x.isfinite()]
    assert x.max() == largest
    assert torch.equal(restore(CODECS["fp8"](format), x), x)


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_is_pytorchs(format: str) -> None:
    """Halves between two floats included."""
    dtype, largest, _, _ = FORMATS[format]
    exact = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    between = (exact[1:] + exact[:-1]) / 2
    x = torch.cat([between, torch.randn(2000) * 10, torch.randn(2000) * 0.01]).clamp(-448, 448)
    x = torch.cat([x, torch.zeros(-len(x) % 255)]).view(-1, 255)
    x = torch.cat([x, torch.full((len(x), 1), largest)], 1).flatten()  # steps are 1
    assert torch.equal(restore(CODECS["fp8"](format), x), x.to(dtype).float())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_bounds(format: str, magnitude: float) -> None:
    _, largest, roundoff, least = FORMATS[format]
    x = torch.randn(256 * 50) * magnitude
    off = (restore(CODECS["fp8"](format), x) - x).view(-1, 256).abs()
    blocks = x.view(-1, 256).abs()
    step = blocks.amax(1, keepdim=True) / largest
    assert (off <= torch.maximum(blocks * roundoff, step * least / 2) * (1 + 1e-5)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_of_any_range(format: str) -> None:
    """The largest value of a block comes to the largest float, however a factor is rounded."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(1, 0x7F800000, (20_000, 1), generator=generator)
    largest = bits.to(torch.int32).view(torch.float32)  # of all magnitudes, subnormal ones too
    others = largest * (2 * torch.rand(len(bits), 6, generator=generator) - 1)
    x = torch.cat([largest, -largest, others], 1)
    messages = []
    for level in LEVELS:
        with cpu_level(level):
            messages.append(encode(CODECS["fp8"](format, 8), [x.flatten()]))
    assert all(torch.equal(message, messages[0]) for message in messages)
    codes = messages[0][: x.numel()].view(-1, 8)
    most = int(torch.tensor(FORMATS[format][1]).to(FORMATS[format][0]).view(torch.uint8))
    steps = messages[0][x.numel() :].view(torch.float32)
    sure = steps > 2.0**-120  # of others a step has fewer bits
    assert (codes[sure, 0] == most).all() and (codes[sure, 1] == most + 128).all()
    torch.testing.assert_close(
        steps[sure] * FORMATS[format][1], largest[sure, 0], rtol=1e-6, atol=0
    )


def signed_bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize("has_error", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("block_size", [24, 64, 128, 256, 512])
@pytest.mark.parametrize("format", FORMATS)
def test_same_bits_where_blocks_need_care(
    format: str, block_size: int, scale: float, has_error: bool
) -> None:
    """Blocks of every kind follow each other, the last of them shorter; zeros of both signs."""
    generator = torch.Generator().manual_seed(block_size)
    magnitudes = torch.tensor([1.0] * 6 + [0.0, 1e-38, 1e-32, 1e-20, 7e37, 8.5e37])
    of_block = magnitudes[torch.randint(0, len(magnitudes), (150,), generator=generator)]
    x = torch.randn(150, block_size, generator=generator).clamp(-4, 4) * of_block.view(-1, 1)
    x[torch.rand(x.shape, generator=generator) < 0.1] = -0.0
    most = torch.finfo(torch.float32).max
    for block, value in ((10, torch.nan), (11, torch.inf), (80, most), (97, -torch.inf)):
        x[block, block % block_size] = value
    x = x.flatten()[: 150 * block_size - 17]
    codec, found = CODECS["fp8"](format, block_size), []
    for level in LEVELS:
        error = torch.full_like(x, -0.0) if has_error else None
        with cpu_level(level):
            message = encode(codec, [x], scale=scale, error=error)
        found.append((message, torch.zeros(0) if error is None else error))
    for level, (message, error) in zip(LEVELS, found, strict=True):
        assert torch.equal(message, found[0][0]), level
        assert torch.equal(signed_bits(error), signed_bits(found[0][1])), level
