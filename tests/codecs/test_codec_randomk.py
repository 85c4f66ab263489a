"""Values at places that all ranks draw alike: exact values, statistics, operators, errors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from ops_reference import limited_cpu
from settings import threads
from sparse_codecs import SparseCase, each_level, sparse_cases  # noqa: F401
from torch import Tensor

from torch_commhook.codecs import CODECS
from torch_commhook.codecs.randomk import randomk

commhook = torch.ops.commhook
WORD = 0xFFFFFFFF


def encode(tensors: list[Tensor], count: int, rounding: Tensor, **options: Any) -> Tensor:
    """The values of a message of so many entries."""
    message = torch.full((4 * count,), 77, dtype=torch.uint8)
    commhook.randomk_encode(tensors, message, rounding, **options)
    return message.view(torch.float32)


def drawn(numel: int, count: int, rounding: Tensor) -> Tensor:
    """The indices of a message's entries, as the operator says them."""
    return encode([torch.arange(numel, dtype=torch.float64)], count, rounding).long()


# ---- which values are sent -----------------------------------------------------------------------


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10, written down from the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & WORD, first >> 32 ^ c[3] ^ k[1], first & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


def right_indices(numel: int, count: int, seed: int, step: int) -> list[int]:
    key = [seed & WORD, seed >> 32 & WORD]
    bits = max(8, (numel - 1).bit_length())
    low_bits = bits // 2

    def word(half: int, number: int) -> int:
        return philox([half, number, 0x72646D6B, step & WORD], key)[0]

    def permuted(index: int) -> int:
        low, high = index & ((1 << low_bits) - 1), index >> low_bits
        for number in (0, 2, 4):
            low ^= word(high, number) & ((1 << low_bits) - 1)
            high ^= word(low, number + 1) & ((1 << (bits - low_bits)) - 1)
        return high << low_bits | low

    offset = (word(1, 6) << 32 | word(0, 6)) * numel >> 64
    found = []
    for entry in range(count):
        index = permuted(entry)
        while index >= numel:
            index = permuted(index)
        found.append((index + offset) % numel)
    return found


def test_philox_is_that_of_the_paper() -> None:
    """Its known answers (Random123, kat_vectors)."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([WORD] * 4, [WORD] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("numel", [1, 2, 3, 7, 100, 255, 256, 257, 1000, 70_000, 1 << 24])
def test_indices(numel: int) -> None:
    count = min(numel, 60)
    for seed, step in ((0, 0), (1, 2), (-1, 2**32 + 5), (2**40 + 3, 2**31)):
        got = drawn(numel, count, torch.tensor([seed, step]))
        assert got.tolist() == right_indices(numel, count, seed, step)


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("numel", [1, 2, 5, 255, 256, 300, 2049, 5000])
def test_all_entries_are_all_values(numel: int) -> None:
    for step in range(3):
        got = drawn(numel, numel, torch.tensor([random.getrandbits(60), step]))
        assert torch.equal(got.sort().values, torch.arange(numel))


@pytest.mark.parametrize(("numel", "count"), [(2, 1), (5, 2), (10, 3), (16, 5), (60, 20)])
def test_each_value_is_as_likely_as_any_other(numel: int, count: int) -> None:
    """And each pair of values; both within five standard deviations."""
    draws, seed = 10_000, random.getrandbits(60)
    sent = torch.zeros(draws, numel)
    for step in range(draws):
        sent[step, drawn(numel, count, torch.tensor([seed, step]))] = 1
    part = count / numel
    off = (sent.sum(0) - draws * part) / (draws * part * (1 - part)) ** 0.5
    assert off.abs().max() < 5
    part *= (count - 1) / (numel - 1)
    off = (sent.T @ sent - draws * part) / max(1e-9, draws * part * (1 - part)) ** 0.5
    assert off.fill_diagonal_(0).abs().max() < 5


def test_steps_and_seeds_differ() -> None:
    found = [drawn(1000, 100, torch.tensor([a, b])) for a in (1, 2, 2**32) for b in (1, 2)]
    for i, one in enumerate(found):
        assert torch.equal(one, drawn(1000, 100, torch.tensor([(1, 2, 2**32)[i // 2], i % 2 + 1])))
        assert not any(torch.equal(one, other) for other in found[:i])


# ---- what is sent --------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=sparse_cases(most=15, dimensions=2))
def test_any_tensors(case: SparseCase) -> None:
    drawn, codec = case.drawn(special=0.1), randomk(case.density)
    rounding, count = torch.tensor([case.seed, 5]), codec.entries(len(drawn.values))
    with limited_cpu(case.level):
        message = encode(drawn.tensors, count, rounding, scale=drawn.scale, error=drawn.error)
        out = drawn.empty()
        codec.decode(message.view(torch.uint8), out, rounding=rounding)
    indices = right_indices(len(drawn.values), count, case.seed, 5)
    indices = torch.tensor(indices, dtype=torch.int64)
    is_good = bool(drawn.values.isfinite().all())
    right = drawn.values[indices] if is_good else torch.full((count,), float("nan"))
    np.testing.assert_array_equal(message.numpy(), right.numpy())
    drawn.check_error(indices if is_good else indices[:0])
    drawn.check_decoded(out, indices, right)


def test_threads_do_not_matter() -> None:
    tensors = [torch.randn(200_001), torch.randn(300, 400).t()]
    codec, rounding, found = randomk(0.1), torch.tensor([3, 4]), []
    for count in (1, 2, 3, 7):
        error = torch.full((320_001,), 0.01)
        out = [torch.empty_like(x) for x in tensors]
        with threads(count):
            plain = encode(tensors, 32_001, rounding)
            message = encode(tensors, 32_001, rounding, scale=0.5, error=error)
            codec.decode(message.view(torch.uint8), out, rounding=rounding)
        found.append((plain, message, error, *out))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def restore(codec: randomk, x: Tensor, step: int, **options: Any) -> Tensor:
    rounding = torch.tensor([11, step])
    message, out = torch.empty(codec.nbytes(len(x)), dtype=torch.uint8), torch.empty_like(x)
    codec.encode([x], message, rounding=rounding, **options)
    codec.decode(message, [out], rounding=rounding)
    return out


@pytest.mark.parametrize("density", [0.01, 0.1, 0.5])
def test_what_is_lost_on_average(density: float) -> None:
    """``(1 - k / d) |x|^2``, and ``(d / k - 1) |x|^2`` of what is not biased."""
    x, draws = torch.randn(1000), 3000
    square = x.double().square().sum()
    codec = randomk(density)
    lost = torch.stack(
        [(x - restore(codec, x, step)).double().square().sum() for step in range(draws)]
    )
    expected = (1 - codec.entries(1000) / 1000) * square
    assert abs(lost.mean() - expected) < 5 * lost.std() / draws**0.5
    codec = randomk(density, unbiased=True)
    total, lost = torch.zeros(1000, dtype=torch.float64), torch.zeros(draws, dtype=torch.float64)
    for step in range(draws):
        got = restore(codec, x, step + draws).double()
        total += got
        lost[step] = (x - got).square().sum()
    expected = (1000 / codec.entries(1000) - 1) * square
    assert abs(lost.mean() - expected) < 5 * lost.std() / draws**0.5 + 1e-9 * expected
    deviation = x.double().abs() * ((1000 / codec.entries(1000) - 1) / draws) ** 0.5
    assert ((total / draws - x).abs() <= 6 * deviation).all()


def test_messages_add_up() -> None:
    codec, rounding = randomk(0.1), torch.tensor([1, 2])
    xs = [torch.randn(3000) for _ in range(3)]
    messages = torch.empty(3, codec.nbytes(3000), dtype=torch.uint8)
    for x, message in zip(xs, messages, strict=True):
        codec.encode([x], message, rounding=rounding)
    total = messages.view(torch.float32)
    total = (total[0] + total[1] + total[2]).view(torch.uint8)
    out, one = torch.empty(3000), torch.empty(3000)
    codec.decode(total, [out], rounding=rounding)
    codec.encode([xs[0] + xs[1] + xs[2]], message, rounding=rounding)
    codec.decode(message, [one], rounding=rounding)
    assert torch.equal(out, one)


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_told_wherever_it_is(value: float) -> None:
    rounding = torch.tensor([1, 2])
    for place in (0, 70_000, 99_999):
        x, error = torch.randn(100_000), torch.randn(100_000)
        x[place] = value
        assert encode([x], 1, rounding).isnan().all()
        right = x + error
        right[place] = 0
        assert encode([x], 10, rounding, error=error).isnan().all()
        assert torch.equal(error, right)
    huge = torch.full((100,), 3e38)
    assert encode([huge], 3, rounding).isfinite().all()
    assert encode([huge], 3, rounding, scale=2.0).isnan().all()


# ---- operators; more in test_sparse_operators.py -------------------------------------------------

ROUNDING = torch.tensor([1, 2])
MESSAGE = torch.zeros(8, dtype=torch.uint8)
X = torch.ones(64)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "match"),
    [
        (([], MESSAGE, ROUNDING), {}, ValueError, "tensors must hold at least one tensor"),
        (([X.long()], MESSAGE, ROUNDING), {}, TypeError, r"tensors\[0\] must be of dtype"),
        (([X], MESSAGE[:6], ROUNDING), {}, ValueError, "message must hold 4 bytes .* got 6 bytes"),
        (([X], MESSAGE[:0], ROUNDING), {}, ValueError, "must hold 4 bytes for each of 1 to"),
        (([X[:1]], MESSAGE, ROUNDING), {}, ValueError, "1 to 1 entries, got 8 bytes"),
        (([X], MESSAGE.float(), ROUNDING), {}, TypeError, "message must be of dtype uint8"),
        (([X], MESSAGE, ROUNDING.float()), {}, TypeError, "rounding must be a dense tensor of"),
        (([X], MESSAGE, ROUNDING[:1]), {}, ValueError, "rounding must hold two numbers"),
        (([X], MESSAGE, ROUNDING), {"error": torch.ones(63)}, ValueError, "error must be contig"),
        (([X], MESSAGE, ROUNDING), {"error": X.half()}, TypeError, "error must be of dtype float"),
        (
            ([X], MESSAGE, ROUNDING),
            {"error": torch.ones(64), "unbiased": True},
            ValueError,
            "error must be None if unbiased is True",
        ),
        (([X.expand(1 << 26, 64)], MESSAGE, ROUNDING), {}, ValueError, r"less than 2\^31 elements"),
        (
            ([torch.ones(64, requires_grad=True)], MESSAGE, ROUNDING),
            {},
            RuntimeError,
            r"tensors\[0\] must not require grad",
        ),
    ],
)
def test_encode_refuses(
    arguments: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=rf"randomk_encode: .*{match}"):
        commhook.randomk_encode(*arguments, **keywords)


def test_settings() -> None:
    assert repr(CODECS["randomk"](0.25, unbiased=True)) == "randomk(density=0.25, unbiased=True)"
    assert randomk().nbytes(1 << 20) == 4 * 10486
    assert randomk().takes_error and not randomk(unbiased=True).takes_error
    with pytest.raises(ValueError, match="randomk: density must be more than 0 and at most 1"):
        randomk(2.0)
    with pytest.raises(ValueError, match=r"randomk\(unbiased=True\)\.encode: error must be None"):
        restore(randomk(unbiased=True), torch.ones(64), 1, error=torch.zeros(64))
    with pytest.raises(ValueError, match=r"randomk\(\)\.decode: rounding must be given"):
        randomk().decode(torch.zeros(4, dtype=torch.uint8), [torch.ones(64)])
