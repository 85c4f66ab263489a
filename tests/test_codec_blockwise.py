"""Block quantisation: bounds and exact values, one arithmetic for all kernels, errors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_commhook._ops import cpu_capability
from torch_commhook.codecs.blockwise import (
    blockwise_bytes,
    blockwise_decode,
    blockwise_encode,
    blockwise_reduce,
    blockwise_shards,
)

FORMATS = [(bits, symmetric) for bits in (8, 4) for symmetric in (True, False)]
of_each_format = pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
LEVELS = {(8, True): 127, (4, True): 7, (8, False): 255, (4, False): 15}


@pytest.fixture
def best_capability() -> Iterator[None]:
    before = cpu_capability()
    yield
    cpu_capability(before)


def encode(tensors: list[Tensor], **options: Any) -> Tensor:
    layout = {name: options[name] for name in options if name not in ("scale", "error", "rounding")}
    numel = sum(tensor.numel() for tensor in tensors)
    message = torch.full((blockwise_bytes(numel, **layout),), 77, dtype=torch.uint8)
    blockwise_encode(tensors, message, **options)
    return message


def restore(x: Tensor, **options: Any) -> Tensor:
    message = encode([x], **options)
    out = torch.empty_like(x)
    layout = {name: options[name] for name in options if name not in ("scale", "error", "rounding")}
    blockwise_decode(message, [out], **layout)
    return out


def steps_of(x: Tensor, bits: int, symmetric: bool, block_size: int) -> Tensor:
    blocks = x.view(-1, block_size)
    span = blocks.abs().amax(1) if symmetric else blocks.amax(1) - blocks.amin(1)
    return (span / LEVELS[bits, symmetric])[:, None]


# ---- bounds and exact values ---------------------------------------------------------------------


@of_each_format
@pytest.mark.parametrize("block_size", [8, 64, 256, 1000])
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
    parts = blockwise_shards(numel, shards=shards, **options)
    assert sum(part.numel for part in parts) == numel
    assert sum(part.nbytes for part in parts) == message.numel()
    pieces = []
    for part, own in zip(parts, message.split([part.nbytes for part in parts]), strict=True):
        pieces.append(torch.empty(part.numel))
        blockwise_decode(own.clone(), [pieces[-1]], **options)
    assert torch.equal(torch.cat(pieces), restore(x, shards=shards, **options))


def test_bytes() -> None:
    assert blockwise_bytes(1 << 20) == (1 << 20) * (1 + 4 / 256)
    assert blockwise_bytes(1 << 20, bits=4) == (1 << 20) * (0.5 + 4 / 256)
    assert blockwise_bytes(1 << 20, symmetric=False) == (1 << 20) * (1 + 8 / 256)
    assert [part.numel for part in blockwise_shards(1000, shards=3)] == [256, 256, 488]


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
    blockwise_reduce(stacked, got, 1000, scale=1 / 3, error=error, rounding=rounding, **options)
    right = encode([total], scale=1 / 3, error=own_error, rounding=rounding, **options)
    assert torch.equal(got, right)
    assert torch.equal(error, own_error)


# ---- one arithmetic ------------------------------------------------------------------------------


def _some_tensors(rng: random.Random) -> list[Tensor]:
    tensors = []
    for _ in range(rng.randint(1, 5)):
        shape = [rng.choice([0, 1, 3, 7, 16, 33, 100]) for _ in range(rng.randint(1, 2))]
        x = torch.randn(shape) * 10 ** rng.uniform(-40, 30)
        if rng.random() < 0.1 and x.numel():
            x.view(-1)[rng.randrange(x.numel())] = rng.choice(
                [float("nan"), float("inf"), 1e-42, -0.0]
            )
        if rng.random() < 0.1:
            x = -torch.zeros(shape)
        dtype = rng.choice([torch.float32] * 4 + [torch.float64, torch.float16, torch.bfloat16])
        tensors.append(x.to(dtype).t() if len(shape) == 2 and rng.random() < 0.3 else x.to(dtype))
    return tensors


def _all_of_it(
    tensors: list[Tensor], layout: dict[str, Any], options: dict[str, Any]
) -> list[Tensor]:
    error = options["error"]
    own = {**options, "error": None if error is None else error.clone()}
    message = encode(tensors, **layout, **own)
    out = [torch.empty_like(tensor) for tensor in tensors]
    blockwise_decode(message, out, **layout)
    one = {name: value for name, value in layout.items() if name != "shards"}
    numel = sum(tensor.numel() for tensor in tensors)
    stacked = torch.stack([encode(tensors, **one)] * 3)
    reduced = torch.full_like(stacked[0], 3)
    again = {**options, "error": None if error is None else error.clone()}
    blockwise_reduce(stacked, reduced, numel, **one, **again)
    errors = [each["error"] for each in (own, again) if each["error"] is not None]
    return [message, reduced, *errors, *out]


def _same(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point():  # a NaN is a NaN
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(
            a.nan_to_num(1.0), b.nan_to_num(1.0)
        )
    return torch.equal(a, b)


@pytest.mark.usefixtures("best_capability")
@pytest.mark.parametrize("seed", range(8))
def test_all_kernels_give_the_same_bits(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(25):
        tensors = _some_tensors(rng)
        numel = sum(tensor.numel() for tensor in tensors)
        layout = {
            "bits": rng.choice([4, 8]),
            "block_size": rng.choice([8, 16, 64, 128, 256, 512]),
            "symmetric": rng.random() < 0.5,
            "shards": rng.choice([1, 2, 3, 8]),
        }
        options = {
            "scale": rng.choice([1.0, 0.5, 1 / 3]),
            "error": torch.randn(numel) * 1e-3 if rng.random() < 0.5 else None,
            "rounding": torch.tensor([rng.getrandbits(62), 3]) if rng.random() < 0.5 else None,
        }
        cpu_capability("reference")
        right = _all_of_it(tensors, layout, options)
        for capability in ("default", "avx2", "avx512"):
            cpu_capability(capability)
            got = _all_of_it(tensors, layout, options)
            assert all(map(_same, got, right)), (capability, layout, options)


def test_threads_do_not_matter() -> None:
    tensors = [torch.randn(300_000), torch.randn(77, 1000).t(), torch.randn(9999)]
    numel = sum(tensor.numel() for tensor in tensors)
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            error = torch.full((numel,), 0.01)
            message = encode(tensors, shards=3, error=error, rounding=torch.tensor([1, 2]))
            found.append((message, error))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_random_numbers_follow_from_seed_and_step() -> None:
    x = torch.randn(1000)
    draws = [encode([x], rounding=torch.tensor([seed, step])) for seed in (1, 2) for step in (1, 2)]
    assert torch.equal(draws[0], encode([x], rounding=torch.tensor([1, 1])))
    assert not any(torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])


# ---- what PyTorch asks of operators --------------------------------------------------------------

commhook = torch.ops.commhook
FORMAT = {"bits": 8, "block_size": 64, "symmetric": True}


def _samples() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    tensors = [torch.randn(5, 30), torch.randn(70)]
    message = torch.zeros(blockwise_bytes(220, block_size=64), dtype=torch.uint8)
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


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    def run(tensors: list[Tensor], error: Tensor, rounding: Tensor) -> tuple[Tensor, list[Tensor]]:
        made = [tensor * 2 for tensor in tensors]
        message = torch.empty(blockwise_bytes(1300, shards=2), dtype=torch.uint8)
        blockwise_encode(made, message, shards=2, error=error, rounding=rounding)
        rounding[1] += 1
        out = [torch.empty_like(tensor) for tensor in tensors]
        blockwise_decode(message, out, shards=2)
        return message, out

    results = []
    for call in (run, torch.compile(run, fullgraph=True, backend=backend)):
        torch.manual_seed(0)
        tensors, error = [torch.randn(300), torch.randn(10, 100)], torch.randn(1300) * 0.1
        rounding = torch.tensor([1, 2])
        for _ in range(2):
            message, out = call(tensors, error, rounding)
        results.append([message, *out, error, rounding])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_versions_move() -> None:
    x, message, error = torch.randn(64), torch.zeros(68, dtype=torch.uint8), torch.zeros(64)
    before = [tensor._version for tensor in (x, message, error)]
    blockwise_encode([x], message, block_size=64, error=error)
    assert [tensor._version for tensor in (x, message, error)] == [
        before[0],
        before[1] + 1,
        before[2] + 1,
    ]
    blockwise_decode(message, [x], block_size=64)
    assert x._version == before[0] + 1


MESSAGE = torch.zeros(68, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "match"),
    [
        (([], MESSAGE), {}, ValueError, "tensors must hold at least one tensor"),
        (([torch.ones(64).long()], MESSAGE), {}, TypeError, r"tensors\[0\] must be of dtype"),
        (([torch.ones(64)], MESSAGE), {"bits": 5}, ValueError, "bits must be 4 or 8, got 5"),
        (([torch.ones(64)], MESSAGE), {"block_size": 12}, ValueError, "block_size must be a mult"),
        (([torch.ones(64)], MESSAGE), {"block_size": 0}, ValueError, "block_size must be a mult"),
        (([torch.ones(64)], MESSAGE), {"shards": 0}, ValueError, "shards must be at least 1"),
        (([torch.ones(65)], MESSAGE), {}, ValueError, "message must hold 76 bytes, got 68"),
        (([torch.ones(64)], MESSAGE.float()), {}, TypeError, "message must be of dtype uint8"),
        (
            ([torch.ones(64)], torch.zeros(136, dtype=torch.uint8)[::2]),
            {},
            ValueError,
            "message must be contiguous",
        ),
        (
            ([torch.ones(64)], torch.zeros(69, dtype=torch.uint8)[1:]),
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
        blockwise_encode(*arguments, **{"block_size": 64, **keywords})


def test_memory_must_be_apart() -> None:
    memory = torch.zeros(100)
    message = memory.view(torch.uint8)[:68]
    with pytest.raises(ValueError, match=r"message must share no memory with tensors\[0\]"):
        blockwise_encode([memory[10:74]], message, block_size=64)
    with pytest.raises(ValueError, match=r"tensors\[0\] must share no memory with message"):
        blockwise_decode(message, [memory[10:74]], block_size=64)
    with pytest.raises(ValueError, match=r"error must share no memory with tensors\[0\]"):
        blockwise_encode([memory[:64]], MESSAGE.clone(), block_size=64, error=memory[36:])
    with pytest.raises(ValueError, match="must reach each of its elements once"):
        blockwise_decode(MESSAGE, [torch.ones(1).expand(64)], block_size=64)
    with pytest.raises(ValueError, match="messages must have two dimensions"):
        blockwise_reduce(MESSAGE, MESSAGE.clone(), 64, block_size=64)
