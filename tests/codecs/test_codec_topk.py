"""topk, chunk_topk and randomk: exact values against NumPy, statistics, bounds, errors.

What topk loses is at most ``(1 - k / d) |x|^2``, since it sends the largest values exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import codec_examples
import numpy as np
import pytest
import sparse_codecs
import torch
from codec_examples import restore
from ops_reference import limited_cpu, threads
from sparse_codecs import each_level  # noqa: F401
from torch import Tensor

from torch_commhook.codecs.sparse_codec import chunk_topk, randomk, topk

commhook = torch.ops.commhook


def encode(tensors: list[Tensor], count: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Indices and values of a message of so many entries."""
    message = torch.full((8 * count,), 77, dtype=torch.uint8)
    commhook.topk_encode(tensors, message, **options)
    return message[: 4 * count].view(torch.int32), message[4 * count :].view(torch.float32)


def right_indices(p: np.ndarray, count: int) -> np.ndarray:
    """By a full sort: NaN, infinities and numbers by magnitude, each from the lowest index on."""
    magnitudes = np.abs(p.astype(np.float64))
    magnitudes[np.isinf(p)] = 1e300
    magnitudes[np.isnan(p)] = np.inf
    return np.sort(np.argsort(-magnitudes, kind="stable")[:count])


def check(x: Tensor, count: int, scale: float = 1.0, error: Tensor | None = None) -> None:
    p = x.float() * scale if error is None else x.float() * scale + error
    p = p.numpy().copy()
    right = right_indices(p, count)
    indices, values = encode([x], count, scale=scale, error=error)
    np.testing.assert_array_equal(indices.numpy(), right)
    np.testing.assert_array_equal(values.numpy(), p[right])
    message, out = torch.cat([indices.view(torch.uint8), values.view(torch.uint8)]), x.clone()
    commhook.topk_decode(message, [out])
    restored = np.zeros_like(p)
    restored[right] = p[right]
    np.testing.assert_array_equal(out.numpy(), restored)
    if error is not None:
        left = np.where(np.isfinite(p), p, 0)
        left[right] = 0
        np.testing.assert_array_equal(error.numpy(), left)


# ---- which values are sent -----------------------------------------------------------------------

D = 50_000  # from a little less on, the kernels guess before they look


def concentrated(d: int) -> Tensor:
    """All that is sent comes from one place, which a sample sees little of."""
    x = torch.randn(d) * 1e-6
    x[d // 2 : d // 2 + d // 50] = torch.randn(d // 50)
    return x


INPUTS: dict[str, Callable[[int], Tensor]] = {
    **sparse_codecs.INPUTS,
    "uniform": lambda d: torch.rand(d) - 0.5,
    # fewer that are not zero than are sent
    "embedding": lambda d: torch.randn(d) * (torch.rand(d) < 0.001),
    "concentrated": concentrated,
}


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("d", [1, 100, 5000, D])
@pytest.mark.parametrize("name", INPUTS)
def test_the_largest_are_sent(name: str, d: int) -> None:
    x = INPUTS[name](d)
    for count in sorted({1, -(-d // 100), -(-d // 2), d}):
        check(x, count)
        error = torch.where(x.isfinite(), x, 0).roll(1) * 0.5
        check(x, count, 0.5, error)


@pytest.mark.usefixtures("each_level")
def test_every_nan_is_the_same() -> None:
    """Whatever its sign and payload are, which depend on the instructions that made it."""
    bits = torch.tensor([0x7F800001, -1, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF], dtype=torch.int32)
    for d in (100, D):
        x = torch.randn(d)
        x[10:60] = bits.repeat(10).view(torch.float32)
        for count, last in ((20, 30), (50, 60)):
            indices, values = encode([x], count)
            assert torch.equal(indices, torch.arange(10, last, dtype=torch.int32))
            assert (values.view(torch.int32) == 0x7FC00000).all()


def test_a_guess_may_be_wrong() -> None:
    """What is large comes in runs, so that a sample often sees too many of them."""
    for _ in range(60):
        x = torch.randn(D) * 0.01
        x.view(-1, 16)[torch.randperm(D // 16)[: D // 1600]] += 10
        check(x, D // 100)


@pytest.mark.parametrize("name", INPUTS)
def test_threads_do_not_matter(name: str) -> None:
    x, found = INPUTS[name](300_001), []
    for count in (1, 2, 3, 7):
        error = torch.where(x.isfinite(), x, 0).roll(1)
        with threads(count):
            found.append((*encode([x], 3001), *encode([x], 3001, scale=0.5, error=error), error))
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            assert torch.equal(one.view(torch.int32), another.view(torch.int32))


def test_how_many_are_sent() -> None:
    assert topk().entries(0) == 0
    assert topk().entries(1) == 1
    assert [topk(0.07).entries(d) for d in (100, 101, 700)] == [7, 8, 49]
    assert topk(1 / 3).entries(3000) == 1000
    assert topk(1.0).entries(1234) == 1234
    assert topk(1e-12).entries(1 << 30) == 1
    for density in (0.3, 0.011, 1e-5):
        exact = Fraction(str(density))
        assert all(topk(density).entries(d) == max(1, -(-d * exact // 1)) for d in range(1, 2000))
    assert topk().nbytes(1 << 20) == 8 * 10486


# ---- errors; more in test_codec_operators.py -----------------------------------------------------


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("indices", [[5, 5], [6, 5], [-1, 5], [5, 64], [-(2**31), 2**31 - 1]])
def test_indices_are_checked(indices: list[int]) -> None:
    """A message comes from another process: what it says must not be written anywhere."""
    good = torch.tensor([0, 63], dtype=torch.int32).view(torch.uint8)
    bad = torch.tensor(indices, dtype=torch.int32).view(torch.uint8)
    values = torch.ones(2).view(torch.uint8)
    out = torch.zeros(64)
    commhook.topk_decode(torch.cat([good, values]), [out])
    messages = torch.stack([torch.cat([good, values]), torch.cat([bad, values])])
    with pytest.raises(ValueError, match="topk_decode: a message's indices must be ascending, at"):
        commhook.topk_decode(messages[1].clone(), [out])
    with pytest.raises(ValueError, match=r"topk_decode_sum: .*at least 0 and less than 64"):
        commhook.topk_decode_sum(messages, [out])


def test_too_many_values() -> None:
    with pytest.raises(ValueError, match=r"topk: numel must be at least 0 and less than 2\^31"):
        topk().nbytes(1 << 31)


# ---- randomk: places that all ranks draw alike ---------------------------------------------------

WORD = 0xFFFFFFFF


def random_values(tensors: list[Tensor], count: int, rounding: Tensor, **options: Any) -> Tensor:
    """The values of a message of so many entries."""
    message = torch.full((4 * count,), 77, dtype=torch.uint8)
    commhook.randomk_encode(tensors, message, rounding, **options)
    return message.view(torch.float32)


def drawn(numel: int, count: int, rounding: Tensor) -> Tensor:
    """The indices of a message's entries, as the operator says them."""
    return random_values([torch.arange(numel, dtype=torch.float64)], count, rounding).long()


# ---- randomk: which values are sent --------------------------------------------------------------


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10, written down from the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & WORD, first >> 32 ^ c[3] ^ k[1], first & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


def drawn_indices(numel: int, count: int, seed: int, step: int) -> list[int]:
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
        assert got.tolist() == drawn_indices(numel, count, seed, step)


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


# ---- randomk: what is sent -----------------------------------------------------------------------


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("density", [1e-9, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("name", sparse_codecs.INPUTS)
def test_values_and_error(name: str, density: float) -> None:
    """All of a message is NaN where any value is not finite.

    Each value is as likely as any other, so that a message loses ``(1 - k / d) |x|^2`` on average.
    An unbiased codec scales values by d / k, and loses ``(d / k - 1) |x|^2``.
    """
    codec, rounding = randomk(density), torch.tensor([7, 5])
    for numel in (1, 500):
        x, count = sparse_codecs.INPUTS[name](numel), codec.entries(numel)
        error = torch.where(x.isfinite(), x, 0).roll(1) * 0.5
        values = x * 0.25 + error
        indices = torch.tensor(drawn_indices(numel, count, 7, 5))
        is_good = bool(values.isfinite().all())
        right = values[indices] if is_good else torch.full((count,), torch.nan)
        left = torch.where(values.isfinite(), values, 0)
        left[indices if is_good else indices[:0]] = 0
        message = random_values([x], count, rounding, scale=0.25, error=error)
        out = torch.ones(numel)
        np.testing.assert_array_equal(message.numpy(), right.numpy())
        np.testing.assert_array_equal(error.numpy(), left.numpy())
        codec.decode(message.view(torch.uint8), [out], rounding=rounding)
        restored = torch.zeros(numel).index_copy(0, indices, right)
        np.testing.assert_array_equal(out.numpy(), restored.numpy())
        unbiased = restore(randomk(density, unbiased=True), x, scale=0.25, rounding=rounding)
        right = (x.double() * 0.25 * numel / count).float()
        if right.isfinite().all():
            restored = torch.zeros(numel).index_copy(0, indices, right[indices])
            torch.testing.assert_close(unbiased, restored, rtol=1e-6, atol=2.0**-148)
        else:
            assert unbiased[indices].isnan().all()


def test_messages_add_up() -> None:
    codec, rounding, out = randomk(0.1), torch.tensor([1, 2]), torch.empty(3000)
    xs = [torch.randn(3000) for _ in range(3)]
    total = sum(random_values([x], codec.entries(3000), rounding) for x in xs)
    assert isinstance(total, Tensor)
    codec.decode(total.view(torch.uint8), [out], rounding=rounding)
    assert torch.equal(out, restore(codec, xs[0] + xs[1] + xs[2], rounding=rounding))


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_told_wherever_it_is(value: float) -> None:
    rounding = torch.tensor([1, 2])
    for place in (0, 70_000, 99_999):
        x, error = torch.randn(100_000), torch.randn(100_000)
        x[place] = value
        assert random_values([x], 1, rounding).isnan().all()
        right = x + error
        right[place] = 0
        assert random_values([x], 10, rounding, error=error).isnan().all()
        assert torch.equal(error, right)
    huge = torch.full((100,), 3e38)
    assert random_values([huge], 3, rounding).isfinite().all()
    assert random_values([huge], 3, rounding, scale=2.0).isnan().all()


def test_settings_of_randomk() -> None:
    assert randomk().nbytes(1 << 20) == 4 * 10486
    assert randomk().takes_error and not randomk(unbiased=True).takes_error
    with pytest.raises(ValueError, match=r"randomk\(unbiased=True\)\.encode: error must be None"):
        restore(randomk(unbiased=True), torch.ones(64), error=torch.zeros(64))
    with pytest.raises(ValueError, match=r"randomk\(\)\.decode: rounding must be given"):
        randomk().decode(torch.zeros(4, dtype=torch.uint8), [torch.ones(64)])


# ---- chunk_topk ----------------------------------------------------------------------------------

INFINITY = 0x7F800000
NO_LEVELS = 0x7FC07FC0


# ---- a reference ---------------------------------------------------------------------------------


def bits_of(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.int64)


def half_of(value: np.float32) -> int:
    """The bits of a bfloat16, to which a number that is not negative is rounded."""
    bits = int(bits_of(np.array([value]))[0])
    return min(bits + 0x7FFF + (bits >> 16 & 1), 0x7F7FFFFF) >> 16


def two_levels(ranks: np.ndarray) -> tuple[int, int]:
    exponents = np.maximum(ranks >> 23, 1)
    exponent = int(exponents.max())
    significands = (ranks & 0x7FFFFF) | np.where(ranks >> 23 > 0, 0x800000, 0)
    fixed = (significands << 16) >> np.minimum(exponent - exponents, 63)
    split = int(fixed.min()) + (int(fixed.max() - fixed.min()) >> 3) * 3
    low = high = np.float32(0)
    for _ in range(2):
        large = fixed[fixed > split]
        small = fixed[fixed <= split]
        parts = (small, large) if len(large) and len(small) else (fixed, fixed)
        low, high = (np.float32(part.sum()) / np.float32(len(part)) for part in parts)
        split = int((low + high) * np.float32(0.5))
    unit = np.array([exponent << 23], dtype=np.uint32).view(np.float32)[0]
    scale = np.float32(2.0**-39)
    return half_of(low * scale * unit), half_of(high * scale * unit)


class Encoded:
    """What a chunk sends: ascending places, the word of its levels, codes, and their values."""

    def __init__(self, p: np.ndarray, k: int, bits: int) -> None:
        ranks = np.minimum(bits_of(p) & 0x7FFFFFFF, INFINITY + 1)
        order = np.argsort(-ranks, kind="stable")[:k]
        self.places = np.sort(order[ranks[order] > 0])
        ranks = ranks[self.places]
        self.word, steps = 0, 2 ** (bits - 1) - 1
        self.codes = np.zeros(len(self.places), dtype=np.int64)
        self.values = np.zeros(len(self.places), dtype=np.float32)
        if len(ranks) == 0:
            return
        if ranks.max() >= INFINITY:
            self.word = NO_LEVELS
            self.values[:] = np.nan
            return
        if bits == 2:
            low, high = two_levels(ranks)
        else:
            low = int(ranks.min()) >> 16
            high = min(int(ranks.max()) + 0xFFFF >> 16, 0x7F7F)
        self.word = low | high << 16
        span = (high - low) << 8
        levels = (low << 16) + ((span * np.arange(steps + 1) + steps // 2) // steps << 8)
        values = levels.astype(np.uint32).view(np.float32)
        if bits == 2:
            middle = np.float32(0.5) * values[0] + np.float32(0.5) * values[1]
            numbers = (np.abs(p[self.places]) > middle).astype(np.int64)
        elif span == 0:
            numbers = np.zeros(len(ranks), dtype=np.int64)
        else:
            above = np.maximum(ranks - (low << 16), 0) >> 8
            numbers = np.minimum((above * steps + span // 2) // span, steps)
        signs = bits_of(p[self.places]) >> 31
        self.codes = numbers | signs << (bits - 1)
        self.values = np.where(signs > 0, -values[numbers], values[numbers]).astype(np.float32)

    def message(self, k: int, place_bits: int, bits: int) -> bytes:
        if k == 0:
            return b""
        last = self.places[-1] if len(self.places) else 0
        places = [*self.places, *[last] * (k - len(self.places))]
        codes = [*self.codes, *[0] * (k - len(self.codes))]
        found = self.word.to_bytes(4, "little")
        for fields, width in ((places, place_bits), (codes, bits)):
            number = sum(int(field) << (i * width) for i, field in enumerate(fields))
            found += number.to_bytes(4 * -(-len(fields) * width // 32), "little")
        return found


def reference(p: np.ndarray, codec: chunk_topk) -> tuple[bytes, np.ndarray, np.ndarray]:
    """The message of values, what it restores, and the error."""
    k, chunk, bits = (codec._settings[name] for name in ("k", "chunk", "bits"))
    message, restored, lost = b"", np.zeros_like(p), p.copy()
    for first in range(0, len(p), chunk):
        own = p[first : first + chunk]
        found = Encoded(own, k, bits)
        message += found.message(min(k, len(own)), chunk.bit_length() - 1, bits)
        restored[first + found.places] = found.values
        if found.word == NO_LEVELS:
            lost[first : first + chunk][~np.isfinite(own)] = 0
        else:
            lost[first + found.places] -= found.values
    return message, restored, lost


# ---- the bits ------------------------------------------------------------------------------------

CHUNK_INPUTS: dict[str, Callable[[int], Tensor]] = {
    **sparse_codecs.INPUTS,
    "two far magnitudes": lambda d: torch.where(torch.rand(d) < 0.5, 1e-20, torch.randn(d)),
    "few that are not zero": lambda d: torch.randn(d) * (torch.rand(d) < 0.003),
    "in one group": lambda d: torch.randn(d) * (1.0 + 1000 * (torch.arange(d) % 256 == 7)),
    "least": lambda d: torch.randn(d).sign() * 2.0**-149,
    "largest": lambda d: torch.randn(d).sign() * torch.finfo(torch.float32).max,
    "a NaN": lambda d: torch.randn(d).index_fill(0, torch.tensor([d // 2]), torch.nan),
}
FORMS = [(64, 4096, 2), (100, 4096, 4), (1, 4096, 2), (4096, 4096, 8), (20, 64, 4), (7, 256, 2)]
FORMS += [(64, 64, 2), (33, 1024, 8), (600, 2048, 2)]


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", CHUNK_INPUTS)
def test_message_error_and_values(name: str, form: tuple[int, int, int]) -> None:
    """Those of the reference, bit for bit."""
    codec, d = chunk_topk(*form), 2 * form[1] + 77
    x = CHUNK_INPUTS[name](d)
    before = torch.where(x.isfinite(), x, 0).roll(1) * 0.25
    for error in (None, before.clone()):
        scale = 1.0 if error is None else 0.5
        p = x * scale if error is None else x * scale + before
        message, restored, lost = reference(p.numpy().copy(), codec)
        got = codec_examples.encode(codec, [x], scale=scale, error=error)
        assert got.numpy().tobytes() == message
        out = torch.full((d,), 9.0)
        codec.decode(got, [out])
        np.testing.assert_array_equal(out.numpy(), restored)
        if error is not None:
            np.testing.assert_array_equal(error.numpy(), lost)


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("d", [1, 63, 64, 65, 4095, 4096, 4097])
def test_ends(d: int) -> None:
    """The last chunk has as many entries as it has values, if these are fewer than k."""
    for form in ((64, 4096, 2), (64, 64, 8)):
        codec, x = chunk_topk(*form), torch.randn(d)
        assert codec_examples.encode(codec, [x]).numpy().tobytes() == reference(x.numpy(), codec)[0]


@pytest.mark.parametrize("name", CHUNK_INPUTS)
def test_threads_do_not_matter_to_chunks(name: str) -> None:
    codec, x, found = chunk_topk(), CHUNK_INPUTS[name](300_001), []
    for count in (1, 2, 3, 7):
        error = torch.where(x.isfinite(), x, 0).roll(1)
        out = torch.empty_like(x)
        with threads(count):
            message = codec_examples.encode(codec, [x], error=error)
            codec.decode(message, [out])
        found.append((message, error, out.view(torch.int32)))
    assert all(map(torch.equal, found[0], each) for each in found[1:])


# ---- wire bytes and bounds -----------------------------------------------------------------------


def test_bytes() -> None:
    """12 bits and 2 for each entry, and 32 for each chunk: 0.0283 bytes for each element."""
    codec = chunk_topk()
    assert codec.nbytes(4096) == 64 * 12 // 8 + 64 * 2 // 8 + 4 == 116
    assert codec.nbytes(1 << 20) / (1 << 20) == pytest.approx(0.0283, abs=5e-5)
    assert codec.nbytes(4096 + 10) == 116 + 4 + 16 + 4  # 120 bits and 20, in whole words
    assert codec.nbytes(0) == 0
    assert chunk_topk(20, 64, 4).nbytes(64) == 4 + 16 + 12
    assert chunk_topk(64, 4096, 8).nbytes(4096) == 96 + 64 + 4
    assert [codec.entries(d) for d in (0, 10, 4096, 5000, 4096 + 10)] == [0, 10, 64, 128, 74]


def lost_of(codec: chunk_topk, x: Tensor) -> tuple[float, float]:
    """The squares of what is lost, and of what the largest values of each chunk leave."""
    left = 0.0
    for chunk in x.double().split(codec._settings["chunk"]):
        largest = chunk.abs().topk(min(codec._settings["k"], len(chunk))).values
        left += float(chunk.square().sum() - largest.square().sum())
    return float((x - restore(codec, x)).double().square().sum()), left


def student(d: int) -> Tensor:
    return torch.distributions.StudentT(torch.tensor(3.0)).sample((d,))


#: What rounding to levels loses of the square of the values that are sent, a tenth more.
ROUNDED = {
    ("gaussian", 2): 0.0042,
    ("gaussian", 4): 0.00048,
    ("gaussian", 8): 1.5e-6,
    ("student", 2): 0.058,
    ("student", 4): 0.0043,
    ("student", 8): 1.6e-5,
}


@pytest.mark.parametrize(("name", "bits"), ROUNDED)
def test_what_rounding_loses(name: str, bits: int) -> None:
    torch.manual_seed(0)
    x = {"gaussian": torch.randn, "student": student}[name](400 * 4096)
    codec = chunk_topk(bits=bits)
    square, left = lost_of(codec, x)
    sent = float(x.double().square().sum()) - left
    assert 0 < square - left < ROUNDED[name, bits] * sent
    assert left <= (1 - 64 / 4096) * float(x.double().square().sum())


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ["gaussian", "heavy tail", "two far magnitudes", "denormal"])
def test_the_bounds(name: str, form: tuple[int, int, int]) -> None:
    """No more is lost than there is; what is not sent is at most its part of it."""
    x = CHUNK_INPUTS[name](5 * form[1])
    square, left = lost_of(chunk_topk(*form), x)
    whole = float(x.double().square().sum())
    assert left <= square + 1e-6 * whole
    assert left <= (1 - form[0] / form[1] + 1e-12) * whole
    assert square <= whole


def test_one_magnitude_leaves_exactly_its_part() -> None:
    """Levels that are exact, so that the bound holds with equality."""
    for bits in (2, 4, 8):
        square, left = lost_of(chunk_topk(bits=bits), torch.randn(8192).sign() * 3)
        assert square == left == (1 - 64 / 4096) * 9 * 8192


# ---- errors; more in test_codec_operators.py -----------------------------------------------------

FORM: dict[str, Any] = {"k": 5, "chunk": 64, "bits": 2}


def message_of(numel: int) -> Tensor:
    return torch.zeros(chunk_topk(**FORM).nbytes(numel), dtype=torch.uint8)


def with_places(places: list[int]) -> Tensor:
    """A message of 5 entries of a chunk of 50 values."""
    packed = sum(place << (6 * i) for i, place in enumerate(places))
    found = bytearray(message_of(50).numpy().tobytes())
    found[:4], found[4:8] = b"\x80\x3f\x80\x3f", packed.to_bytes(4, "little")
    return torch.frombuffer(found, dtype=torch.uint8).clone()


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("places", [[1, 5, 4, 6, 7], [63, 0, 1, 2, 3], [1, 2, 3, 4, 50]])
def test_places_are_checked(places: list[int]) -> None:
    """A message comes from another process: what it says must not be written anywhere."""
    good, out = with_places([0, 1, 2, 3, 49]), torch.zeros(50)
    commhook.chunk_topk_decode(good, [out], **FORM)
    assert out[[0, 1, 2, 3, 49]].eq(1).all()
    assert out.sum() == 5
    messages = torch.stack([good, with_places(places)])
    message = "a message's positions must ascend within each chunk, and be less than the"
    with pytest.raises(ValueError, match=f"chunk_topk_decode: {message}"):
        commhook.chunk_topk_decode(messages[1].clone(), [out], **FORM)
    with pytest.raises(ValueError, match=f"chunk_topk_decode_sum: {message}"):
        commhook.chunk_topk_decode_sum(messages, [out], **FORM)


@pytest.mark.usefixtures("each_level")
def test_any_message_of_good_places_is_decoded() -> None:
    """Levels and codes may be any: all kernels make the same of them."""
    generator = torch.Generator().manual_seed(0)
    for bits in (2, 4, 8):
        codec = chunk_topk(64, 64, bits)
        x = torch.randn(64 * 50, generator=generator)
        message = codec_examples.encode(codec, [x])
        rows = message.view(50, -1)
        rows[:, :4] = torch.randint(256, (50, 4), generator=generator)
        rows[:, 4 + 48 :] = torch.randint(256, rows[:, 52:].shape, generator=generator)
        out, right = torch.empty_like(x), torch.empty_like(x)
        codec.decode(message, [out])
        with limited_cpu("reference"):
            codec.decode(message, [right])
        assert torch.equal(out.view(torch.int32), right.view(torch.int32))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k must be at least 1 and at most chunk, 4096, got 0"),
        ({"k": 65, "chunk": 64}, "k must be at least 1 and at most chunk, 64, got 65"),
        ({"chunk": 32}, "chunk must be a power of two from 64 to 4096, got 32"),
        ({"chunk": 100}, "chunk must be a power of two from 64 to 4096, got 100"),
        ({"chunk": 8192}, "chunk must be a power of two from 64 to 4096, got 8192"),
        ({"bits": 3}, "bits must be 2, 4 or 8, got 3"),
    ],
)
def test_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^chunk_topk: {message}$"):
        chunk_topk(**settings)
    form = {"k": 8, "chunk": 64, "bits": 2, **settings}
    if settings == {"k": 0}:
        message = message.replace("4096", "64")
    with pytest.raises(ValueError, match=f"chunk_topk_encode: {message}"):
        commhook.chunk_topk_encode([torch.ones(64)], torch.zeros(64, dtype=torch.uint8), **form)


@pytest.mark.parametrize("numel", [-1, 1 << 31])
def test_other_numbers_of_values_are_refused(numel: int) -> None:
    for method in (chunk_topk().nbytes, chunk_topk().entries, chunk_topk().segments):
        with pytest.raises(ValueError, match=f"chunk_topk: numel must be .* 2.31, got {numel}"):
            method(numel)


def test_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"message must hold 12 bytes for 64 values, got 116 byt"):
        commhook.chunk_topk_encode([torch.ones(64)], torch.zeros(116, dtype=torch.uint8), **FORM)
