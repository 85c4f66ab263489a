"""Block quantisation: bounds and exact values, operators, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ops_reference import LEVELS as KERNELS
from ops_reference import cpu_level
from torch import Tensor

from torch_commhook.codecs.blockwise import blockwise

commhook = torch.ops.commhook

FORMATS = [(bits, symmetric) for bits in (8, 4, 2) for symmetric in (True, False)]
of_each_format = pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
#: Of two bits, symmetric, only random rounding has the largest magnitude for a step.
of_even_steps = pytest.mark.parametrize(
    ("bits", "symmetric"), [f for f in FORMATS if f != (2, True)]
)
LEVELS = {
    (8, True): 127,
    (4, True): 7,
    (2, True): 1,
    (8, False): 255,
    (4, False): 15,
    (2, False): 3,
}


def codec_for(rounding: Tensor | None = None, **form: Any) -> blockwise:
    return blockwise(rounding="nearest" if rounding is None else "stochastic", **form)


def encode(
    tensors: list[Tensor],
    *,
    shards: int = 1,
    scale: float = 1.0,
    error: Tensor | None = None,
    rounding: Tensor | None = None,
    **form: Any,
) -> Tensor:
    codec = codec_for(rounding, **form)
    numel = sum(tensor.numel() for tensor in tensors)
    message = torch.full((codec.nbytes(numel, shards),), 77, dtype=torch.uint8)
    codec.encode(tensors, message, shards=shards, scale=scale, error=error, rounding=rounding)
    return message


def restore(
    x: Tensor,
    *,
    shards: int = 1,
    scale: float = 1.0,
    error: Tensor | None = None,
    rounding: Tensor | None = None,
    **form: Any,
) -> Tensor:
    message = encode([x], shards=shards, scale=scale, error=error, rounding=rounding, **form)
    out = torch.empty_like(x)
    blockwise(**form).decode(message, [out], shards=shards)
    return out


def steps_of(x: Tensor, bits: int, symmetric: bool, block_size: int) -> Tensor:
    blocks = x.view(-1, block_size)
    span = blocks.abs().amax(1) if symmetric else blocks.amax(1) - blocks.amin(1)
    return (span / LEVELS[bits, symmetric])[:, None]


# ---- bounds and exact values ---------------------------------------------------------------------


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


@of_each_format
def test_zeros_and_constants_are_exact(bits: int, symmetric: bool) -> None:
    assert torch.equal(restore(torch.zeros(600), bits=bits, symmetric=symmetric), torch.zeros(600))
    if not symmetric:
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


@of_each_format
@pytest.mark.parametrize("rounding", [None, torch.tensor([5, 6])])
def test_the_error_is_what_is_lost(bits: int, symmetric: bool, rounding: Tensor | None) -> None:
    x, error = torch.randn(1000), torch.randn(1000) * 0.01
    sent = x * 0.5 + error
    options: dict[str, Any] = {"bits": bits, "symmetric": symmetric, "rounding": rounding}
    got = restore(x, scale=0.5, error=error, **options)
    assert torch.equal(error, sent - got)
    assert torch.equal(got, restore(sent, **options))


@pytest.mark.parametrize("numel", [0, 1, 7, 255, 256, 257, 5000])
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@of_each_format
def test_shards_are_messages(numel: int, shards: int, bits: int, symmetric: bool) -> None:
    x = torch.randn(numel)
    options: dict[str, Any] = {"bits": bits, "symmetric": symmetric}
    message = encode([x], shards=shards, **options)
    parts = blockwise(**options).shards(numel, shards)
    assert sum(part.numel for part in parts) == numel
    assert sum(part.nbytes for part in parts) == message.numel()
    pieces = []
    for part, own in zip(parts, message.split([part.nbytes for part in parts]), strict=True):
        pieces.append(torch.empty(part.numel))
        blockwise(**options).decode(own.clone(), [pieces[-1]])
    assert torch.equal(torch.cat(pieces), restore(x, shards=shards, **options))


def test_bytes() -> None:
    assert blockwise().nbytes(1 << 20) == (1 << 20) * (1 + 4 / 256)
    assert blockwise(bits=4).nbytes(1 << 20) == (1 << 20) * (0.5 + 4 / 256)
    assert blockwise(bits=2).nbytes(1 << 20) == (1 << 20) * (0.25 + 4 / 256)
    assert blockwise(symmetric=False).nbytes(1 << 20) == (1 << 20) * (1 + 8 / 256)
    assert blockwise(bits=2, symmetric=False).nbytes(1 << 20) == (1 << 20) * (0.25 + 8 / 256)
    assert [part.numel for part in blockwise().shards(1000, 3)] == [256, 256, 488]


@of_each_format
@pytest.mark.parametrize("messages", [1, 3])
def test_reduce(bits: int, symmetric: bool, messages: int) -> None:
    options: dict[str, Any] = {"bits": bits, "symmetric": symmetric}
    sources = [torch.randn(1000) for _ in range(messages)]
    stacked = torch.stack([encode([x], **options) for x in sources])
    total = restore(sources[0], **options)
    for x in sources[1:]:
        total = total + restore(x, **options)
    error, rounding = torch.randn(1000) * 0.01, torch.tensor([1, 2])
    own_error = error.clone()
    got = torch.empty_like(stacked[0])
    codec = codec_for(rounding, **options)
    codec.reduce(stacked, got, 1000, scale=1 / 3, error=error, rounding=rounding)
    right = encode([total], scale=1 / 3, error=own_error, rounding=rounding, **options)
    assert torch.equal(got, right)
    assert torch.equal(error, own_error)


# ---- two bits, symmetric, to the nearest ---------------------------------------------------------


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


def test_random_numbers_follow_from_seed_and_step() -> None:
    x = torch.randn(1000)
    draws = [encode([x], rounding=torch.tensor([seed, step])) for seed in (1, 2) for step in (1, 2)]
    assert torch.equal(draws[0], encode([x], rounding=torch.tensor([1, 1])))
    assert not any(torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


# ---- what PyTorch asks of operators --------------------------------------------------------------

FORMAT = {"bits": 8, "block_size": 64, "symmetric": True}


def _samples() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    tensors = [torch.randn(5, 30), torch.randn(70)]
    message = torch.zeros(blockwise(block_size=64).nbytes(220), dtype=torch.uint8)
    more = {"error": torch.zeros(220), "rounding": torch.tensor([1, 2]), **FORMAT}
    stacked = torch.stack([message, message])
    return {
        "encode": (commhook.blockwise_encode.default, (tensors, message), more),
        "decode": (commhook.blockwise_decode.default, (message, tensors), FORMAT),
        "reduce": (commhook.blockwise_reduce.default, (stacked, message, 220), more),
    }


@pytest.mark.parametrize("name", ["encode", "decode", "reduce"])
def test_opcheck(name: str) -> None:
    op, arguments, keywords = _samples()[name]
    torch.library.opcheck(op, arguments, keywords)


def test_versions_move() -> None:
    x, message, error = torch.randn(64), torch.zeros(80, dtype=torch.uint8), torch.zeros(64)
    before = [tensor._version for tensor in (x, message, error)]
    commhook.blockwise_encode([x], message, error=error, **FORMAT)
    assert [tensor._version for tensor in (x, message, error)] == [
        before[0],
        before[1] + 1,
        before[2] + 1,
    ]
    commhook.blockwise_decode(message, [x], **FORMAT)
    assert x._version == before[0] + 1


MESSAGE = torch.zeros(80, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "match"),
    [
        (([], MESSAGE), {}, ValueError, "tensors must hold at least one tensor"),
        (([torch.ones(64).long()], MESSAGE), {}, TypeError, r"tensors\[0\] must be of dtype"),
        (([torch.ones(64)], MESSAGE), {"bits": 5}, ValueError, "bits must be 2, 4 or 8, got 5"),
        (([torch.ones(64)], MESSAGE), {"block_size": 12}, ValueError, "block_size must be a mult"),
        (([torch.ones(64)], MESSAGE), {"bits": 2, "block_size": 24}, ValueError, "multiple of 16"),
        (([torch.ones(64)], MESSAGE), {"block_size": 0}, ValueError, "block_size must be a mult"),
        (([torch.ones(64)], MESSAGE), {"shards": 0}, ValueError, "shards must be at least 1"),
        (([torch.ones(65)], MESSAGE), {}, ValueError, "message must hold 96 bytes, got 80"),
        (([torch.ones(64)], MESSAGE.float()), {}, TypeError, "message must be of dtype uint8"),
        (
            ([torch.ones(64)], torch.zeros(160, dtype=torch.uint8)[::2]),
            {},
            ValueError,
            "message must be contiguous",
        ),
        (
            ([torch.ones(64)], torch.zeros(81, dtype=torch.uint8)[1:]),
            {},
            ValueError,
            "multiple of 4",
        ),
        (
            ([torch.ones(64)], MESSAGE),
            {"error": torch.ones(63)},
            ValueError,
            "error must be contiguous and hold 64",
        ),
        (([torch.ones(64)], MESSAGE), {"error": torch.ones(64).half()}, TypeError, "error must be"),
        (
            ([torch.ones(64)], MESSAGE),
            {"rounding": torch.ones(3).long()},
            ValueError,
            "rounding must hold two numbers",
        ),
        (
            ([torch.ones(64)], MESSAGE),
            {"rounding": torch.ones(2)},
            TypeError,
            "rounding must be a dense tensor of dtype int64",
        ),
        (
            ([torch.ones(64, requires_grad=True)], MESSAGE),
            {},
            RuntimeError,
            r"tensors\[0\] must not require grad",
        ),
    ],
)
def test_encode_refuses(
    arguments: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=rf"blockwise_encode: .*{match}"):
        commhook.blockwise_encode(*arguments, **{**FORMAT, **keywords})


def test_memory_must_be_apart() -> None:
    memory = torch.zeros(100)
    message = memory.view(torch.uint8)[:80]
    with pytest.raises(ValueError, match=r"message must share no memory with tensors\[0\]"):
        commhook.blockwise_encode([memory[10:74]], message, **FORMAT)
    with pytest.raises(ValueError, match=r"tensors\[0\] must share no memory with message"):
        commhook.blockwise_decode(message, [memory[10:74]], **FORMAT)
    with pytest.raises(ValueError, match=r"error must share no memory with tensors\[0\]"):
        commhook.blockwise_encode([memory[:64]], MESSAGE.clone(), error=memory[36:], **FORMAT)
    with pytest.raises(ValueError, match="must reach each of its elements once"):
        commhook.blockwise_decode(MESSAGE, [torch.ones(1).expand(64)], **FORMAT)
    with pytest.raises(ValueError, match="messages must have two dimensions"):
        commhook.blockwise_reduce(MESSAGE, MESSAGE.clone(), 64, **FORMAT)


def test_rows_without_bytes_are_refused() -> None:
    """Of these there may be so many that all their bytes are a multiple of 2^64."""
    rows = torch.empty(2**60, 0, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"messages must hold 80 bytes in each row, got sizes"):
        commhook.blockwise_reduce(rows, MESSAGE.clone(), 64, **FORMAT)
    with pytest.raises(ValueError, match=r"messages must hold 80 bytes in each row, got sizes"):
        commhook.blockwise_decode_sum(rows, [torch.zeros(64)], **FORMAT)
    with pytest.raises(ValueError, match=r"numel must be at least 0 and at most 2\^60, got"):
        commhook.blockwise_reduce(MESSAGE[None], MESSAGE.clone(), 2**63 - 1, **FORMAT)
