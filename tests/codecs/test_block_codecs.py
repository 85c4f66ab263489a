"""Codecs of blocks: bounds and exact values. Exact sums, errors and segments: test_codecs.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from codec_examples import LARGEST, encode, restore
from ops_reference import LEVELS, cache_bytes, cpu_level, not_beyond_a_large_cache, split, threads
from torch import Tensor

from torch_commhook.codecs import CODECS, Codec
from torch_commhook.codecs.block_codec import blockwise

fp8, sign = CODECS["fp8"], CODECS["sign"]


# ---- all kernels ---------------------------------------------------------------------------------


def values_that_need_care(block_size: int) -> Tensor:
    """Blocks of every kind follow each other, the last of them shorter; zeros of both signs."""
    generator = torch.Generator().manual_seed(block_size)
    magnitudes = torch.tensor([1.0] * 6 + [0.0, 1e-38, 1e-32, 1e-20, 7e37, 8.5e37])
    of_block = magnitudes[torch.randint(0, len(magnitudes), (150,), generator=generator)]
    x = torch.randn(150, block_size, generator=generator).clamp(-4, 4) * of_block.view(-1, 1)
    x[torch.rand(x.shape, generator=generator) < 0.1] = -0.0
    special = [torch.nan, -torch.nan, torch.inf, -torch.inf, 1e-40, -0.0, LARGEST]
    for i, value in enumerate(special):
        x[10 + i, block_size * i // 7] = value
    x[80], x[81], x[97, : block_size // 2] = 3.0, 0.0, torch.inf
    return x.flatten()[: 150 * block_size - 17]


@pytest.mark.parametrize("block_size", [24, 32, 64, 128, 256, 512])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(
            ("blockwise", {"bits": bits, "symmetric": symmetric})
            for bits in (8, 4, 2)
            for symmetric in (True, False)
        ),
        ("fp8", {"format": "e4m3"}),
        ("fp8", {"format": "e5m2"}),
        ("sign", {}),
    ],
    ids=str,
)
def test_same_bits_where_blocks_need_care(
    name: str, settings: dict[str, Any], block_size: int
) -> None:
    """Vector kernels take runs of plain blocks, and leave the others to the general ones."""
    if block_size == 24 and (name == "sign" or settings.get("bits") == 2):
        pytest.skip("has no such blocks")
    codec = CODECS[name](**settings, block_size=block_size)
    x = values_that_need_care(block_size)
    for scale in (1.0, 0.25, 1 / 3):
        for has_error in (False, True):
            found = []
            for level in LEVELS:
                error = torch.full_like(x, -0.0) if has_error else None
                with cpu_level(level):
                    message = encode(codec, [x], scale=scale, error=error)
                if error is not None and name != "blockwise":  # whose zeros differ in sign
                    error = error.view(torch.int32)
                found.append([message] if error is None else [message, error])
            for level, own in zip(LEVELS, found, strict=True):
                assert all(map(torch.equal, own, found[0])), (level, scale, has_error)


# ---- integers ------------------------------------------------------------------------------------

FORMATS = [(bits, symmetric) for bits in (8, 4, 2) for symmetric in (True, False)]

of_each_format = pytest.mark.parametrize(("bits", "symmetric"), FORMATS)

#: Of two bits, symmetric, only random rounding has the largest magnitude for a step.
of_even_steps = pytest.mark.parametrize(
    ("bits", "symmetric"), [f for f in FORMATS if f != (2, True)]
)

#: Of integers, by bits, for symmetric blocks and for others.
_STEPS = {8: (127, 255), 4: (7, 15), 2: (1, 3)}
_BLOCKWISE = ("bits", "block_size", "symmetric")


def _codec_and_arguments(options: dict[str, Any]) -> tuple[blockwise, dict[str, Any]]:
    """The codec, whose rounding is random if ``rounding`` is given, and its arguments."""
    settings = {name: options.pop(name) for name in _BLOCKWISE if name in options}
    rounding = "nearest" if options.get("rounding") is None else "stochastic"
    return blockwise(rounding=rounding, **settings), options


def encode_blockwise(tensors: list[Tensor], **options: Any) -> Tensor:
    codec, arguments = _codec_and_arguments(options)
    return encode(codec, tensors, **arguments)


def restore_blockwise(x: Tensor, **options: Any) -> Tensor:
    codec, arguments = _codec_and_arguments(options)
    return restore(codec, x, **arguments)


def steps_of(x: Tensor, bits: int, symmetric: bool, block_size: int) -> Tensor:
    blocks = x.view(-1, block_size)
    span = blocks.abs().amax(1) if symmetric else blocks.amax(1) - blocks.amin(1)
    return (span / _STEPS[bits][not symmetric])[:, None]


@of_even_steps
@pytest.mark.parametrize("block_size", [16, 64, 256, 1008])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_nearest(bits: int, symmetric: bool, block_size: int, magnitude: float) -> None:
    x = torch.randn(block_size * 50, dtype=torch.float64).mul(magnitude).float()
    got = restore_blockwise(x, bits=bits, symmetric=symmetric, block_size=block_size)
    step = steps_of(x.double(), bits, symmetric, block_size)
    lost = (got.double() - x.double()).view(-1, block_size).abs() / step
    assert lost.max() <= 0.5 + 1e-4
    assert lost.max() > 0.3


@of_each_format
def test_mean_square_on_smooth_data(bits: int, symmetric: bool) -> None:
    x = torch.rand(256 * 800) - 0.5
    step = steps_of(x, bits, symmetric, 256)
    if (bits, symmetric) != (2, True):
        lost = (restore_blockwise(x, bits=bits, symmetric=symmetric) - x).view(-1, 256) / step
        assert lost.square().mean().item() == pytest.approx(1 / 12, rel=0.03)
    rounding = torch.tensor([3, 4])
    drawn = restore_blockwise(x, bits=bits, symmetric=symmetric, rounding=rounding)
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
        total += restore_blockwise(x, bits=bits, symmetric=symmetric, rounding=rounding)
    off = (total / draws - x).view(-1, 256) / steps_of(x, bits, symmetric, 256)
    assert off.abs().max() < 6 * 0.5 / draws**0.5  # a draw's deviation is at most half a step


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_constants_are_exact_between_least_and_largest(bits: int) -> None:
    x = torch.full((600,), -1.7)
    assert torch.equal(restore_blockwise(x, bits=bits, symmetric=False), x)


@of_each_format
@pytest.mark.parametrize("value", [1e-35, 1.0, 1e20, 3e38])
def test_the_error_of_a_constant_is_small(bits: int, symmetric: bool, value: float) -> None:
    x = torch.full((300,), value)
    for level in LEVELS:
        error = torch.zeros_like(x)
        with cpu_level(level):
            encode_blockwise([x], error=error, bits=bits, symmetric=symmetric)
        # The step of two bits is counted in units of 2^-127.
        bound = 2.0**-128 if (bits, symmetric) == (2, True) else 0.0
        assert error.abs().max() <= value * 1e-6 + bound, level


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
@pytest.mark.parametrize("level", LEVELS)
def test_the_largest_numbers_come_back_finite(
    bits: int, symmetric: bool, low: float, high: float, level: str
) -> None:
    x, error = torch.rand(300) * (0.99 * (high - low)) + low, torch.zeros(300)
    x[7], x[11] = high, low
    with cpu_level(level):
        got = restore_blockwise(x, error=error, bits=bits, symmetric=symmetric)
    assert got.isfinite().all()
    assert torch.equal(error, x - got)
    step = steps_of(x[:256].double(), bits, symmetric, 256).item()
    # A step of two bits may be less than what it is to reach.
    assert error[:256].abs().max() <= (1.0 if (bits, symmetric) == (2, True) else 0.51) * step


@of_each_format
@pytest.mark.parametrize("level", LEVELS)
def test_random_rounding_of_the_largest_numbers(bits: int, symmetric: bool, level: str) -> None:
    """All of which one step more than the largest q would come back as an infinity."""
    largest = torch.tensor(LARGEST).view(torch.int32).item()
    values = torch.arange(largest - (1 << 17) + 1, largest + 1, dtype=torch.int32)
    x = -values.view(torch.float32).repeat_interleave(16)
    error = torch.zeros_like(x)
    options: dict[str, Any] = {"bits": bits, "symmetric": symmetric, "block_size": 16}
    with cpu_level(level):
        got = restore_blockwise(x, error=error, rounding=torch.tensor([1, 2]), **options)
    assert got.isfinite().all()
    assert error.isfinite().all()


@of_each_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bits: int, symmetric: bool, value: float) -> None:
    x, error = torch.randn(768), torch.randn(768)
    x[300] = value
    before = error.clone()
    got = restore_blockwise(x, bits=bits, symmetric=symmetric, error=error)
    assert got[256:512].isnan().all()
    assert got[:256].isfinite().all() and got[512:].isfinite().all()
    assert torch.equal(error[256:512], before[256:512])
    assert not torch.equal(error[:256], before[:256])


def test_denormals() -> None:
    x = torch.randn(256).mul(1e-40)
    assert (restore_blockwise(x) - x).abs().max() <= x.abs().max() / 254 + 127 * 2.0**-149


# ---- two bits, symmetric, rounded to the nearest -------------------------------------------------


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


@pytest.mark.parametrize("level", LEVELS)
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
        message = encode_blockwise([x], bits=2, block_size=block_size)
        out = torch.empty_like(x)
        blockwise(bits=2, block_size=block_size).decode(message, [out])
    codes, values = of_reference(x, block_size)
    assert np.array_equal(message[: len(codes)].numpy(), codes)
    assert np.array_equal(out.numpy(), values)


@pytest.mark.parametrize("block_size", [64, 256, 1024])
def test_two_bits_on_a_gaussian(block_size: int) -> None:
    """Its step is nearly the best, 1.224 sigma, of three levels: an error of 0.190 of its power."""
    x = torch.randn(block_size * 400 * 256 // block_size)
    lost = restore_blockwise(x, bits=2, block_size=block_size) - x
    # Of fewer values it is a little less, as their step is their own.
    error = (lost.square().sum() / x.square().sum()).item()
    assert error == pytest.approx(0.190, rel=0.03 if block_size > 64 else 0.05)
    steps = fitted_steps(x, block_size)
    assert steps.mean() == pytest.approx(1.224, rel=0.01)


@pytest.mark.parametrize("level", LEVELS)
def test_few_large_values_are_not_lost(level: str) -> None:
    x = torch.zeros(512)
    x[[3, 77, 200]] = torch.tensor([2.5, -2.5, 2.5])
    x[300] = -1e-6
    with cpu_level(level):
        assert torch.equal(restore_blockwise(x, bits=2), x)
    x[5:50] = 1e-4
    with cpu_level(level):
        got = restore_blockwise(x, bits=2)
    assert (got - x).square().sum() < 1e-6 * x.square().sum()


def test_random_two_bits_are_the_largest_magnitude_zero_or_its_negative() -> None:
    x = torch.randn(256)
    got = restore_blockwise(x, bits=2, rounding=torch.tensor([1, 2]))
    most = x.abs().max()
    assert set(got.unique().tolist()) == {-most.item(), 0.0, most.item()}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("power", [-149, -148, -140, -127, -126, -110, -109, -101, -100, -81, -80])
def test_two_bits_of_the_smallest_numbers(level: str, power: int) -> None:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(power + 200)) * 2.0**power
    error = torch.zeros_like(x)
    with cpu_level(level):
        got = restore_blockwise(x, error=error, bits=2)
    assert torch.equal(error, x - got)
    assert (got.abs() <= x.abs().max()).all()
    if power > -126:  # below, units are few
        assert error.double().square().sum() < 0.25 * x.double().square().sum()
    with cpu_level("reference"):
        assert torch.equal(got, restore_blockwise(x, bits=2))


# ---- floats of 8 bits ----------------------------------------------------------------------------

#: Of each format, the dtype, the largest number, the unit roundoff and the least number.
FLOATS = {
    "e4m3": (torch.float8_e4m3fn, 448.0, 2.0**-4, 2.0**-9),
    "e5m2": (torch.float8_e5m2, 57344.0, 2.0**-3, 2.0**-16),
}


@pytest.mark.parametrize("format", FLOATS)
def test_rounding_is_pytorchs(format: str) -> None:
    """Every float of 8 bits comes back; halves between two of them are rounded as others are."""
    dtype, largest, _, _ = FLOATS[format]
    exact = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    assert exact.max() == largest
    between = (exact[1:] + exact[:-1]) / 2
    x = torch.cat([exact, between, torch.randn(2000) * 10, torch.randn(2000) * 0.01])
    x = torch.cat([x, torch.zeros(-len(x) % 255)]).view(-1, 255)
    x = torch.cat([x, torch.full((len(x), 1), largest)], 1).flatten()  # steps are 1
    assert torch.equal(restore(fp8(format), x), x.to(dtype).float())


@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_bounds_of_fp8(format: str, magnitude: float) -> None:
    _, largest, roundoff, least = FLOATS[format]
    x = torch.randn(256 * 50) * magnitude
    off = (restore(fp8(format), x) - x).view(-1, 256).abs()
    blocks = x.view(-1, 256).abs()
    step = blocks.amax(1, keepdim=True) / largest
    assert (off <= torch.maximum(blocks * roundoff, step * least / 2) * (1 + 1e-5)).all()


@pytest.mark.parametrize("format", FLOATS)
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
            messages.append(encode(fp8(format, 8), [x.flatten()]))
    assert all(torch.equal(message, messages[0]) for message in messages)
    codes = messages[0][: x.numel()].view(-1, 8)
    most = int(torch.tensor(FLOATS[format][1]).to(FLOATS[format][0]).view(torch.uint8))
    steps = messages[0][x.numel() :].view(torch.float32)
    sure = steps > 2.0**-120  # of others a step has fewer bits
    assert (codes[sure, 0] == most).all() and (codes[sure, 1] == most + 128).all()
    torch.testing.assert_close(steps[sure] * FLOATS[format][1], largest[sure, 0], rtol=1e-6, atol=0)


# ---- signs ---------------------------------------------------------------------------------------


def check_magnitudes(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Returns the blocks of values, and of what a message restores."""
    restored = restore(sign(block_size), x)
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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("block_size", [32, 1024, 4096])
def test_magnitudes_whose_sum_is_beyond_float32(block_size: int, level: str) -> None:
    x = torch.rand(block_size * 5) * LARGEST
    x[:block_size] = LARGEST
    x[block_size:].mul_(torch.randn(block_size * 4).sign())
    with cpu_level(level):
        check_magnitudes(x, block_size)


# ---- messages that are written past the caches ---------------------------------------------------

STREAMED = [
    *(c for name in ("blockwise", "sign", "fp8") for c in CODECS[name].examples()),
    CODECS["blockwise"](bits=4, block_size=128),  # type: ignore[call-arg]
    # of which the parameters take more bytes than the codes
    CODECS["blockwise"](bits=4, block_size=8, symmetric=False),  # type: ignore[call-arg]
]


@not_beyond_a_large_cache
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("codec", STREAMED, ids=str)
def test_same_bits_at_any_offset(codec: Codec, segments: int) -> None:
    numel = cache_bytes() // 4 + 12_345
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    values[5], values[numel // 2] = float("nan"), float("inf")
    values[5000:20_000] = 0.0
    rounding = torch.tensor([1, 2]) if codec.is_random else None
    nbytes = codec.nbytes(numel, segments)
    expected: tuple[Tensor, Tensor] | None = None
    for level in LEVELS:
        for offset, count in ((0, 2), (5, 1)):
            memory = torch.full((nbytes + 64,), 7, dtype=torch.uint8)
            message = memory[4 * offset : 4 * offset + nbytes]
            out = torch.full((numel + 7,), 7.0)
            with cpu_level(level), threads(count):
                codec.encode(
                    split(values), message, segments=segments, scale=1 / segments, rounding=rounding
                )
                codec.decode(
                    message,
                    split(out[offset : offset + numel]),
                    segments=segments,
                    rounding=rounding,
                )
            assert (memory[: 4 * offset] == 7).all()
            assert (memory[4 * offset + nbytes :] == 7).all()
            assert (out[:offset] == 7).all()
            assert (out[offset + numel :] == 7).all()
            bits = out[offset : offset + numel].view(torch.int32)
            if expected is None:
                expected = message.clone(), bits.clone()
            assert torch.equal(message, expected[0]), (level, offset)
            assert torch.equal(bits, expected[1]), (level, offset)
            if level == "reference":
                break  # slow, and streams nothing
