"""The largest values of each chunk in few bits: a NumPy reference, bounds, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sparse_codecs
import torch
from codec_examples import encode, restore
from ops_reference import limited_cpu, threads
from sparse_codecs import each_level  # noqa: F401
from torch import Tensor

from torch_commhook.codecs.chunk_topk import chunk_topk

commhook = torch.ops.commhook
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

INPUTS: dict[str, Callable[[int], Tensor]] = {
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
@pytest.mark.parametrize("name", INPUTS)
def test_message_error_and_values(name: str, form: tuple[int, int, int]) -> None:
    """Those of the reference, bit for bit."""
    codec, d = chunk_topk(*form), 2 * form[1] + 77
    x = INPUTS[name](d)
    before = torch.where(x.isfinite(), x, 0).roll(1) * 0.25
    for error in (None, before.clone()):
        scale = 1.0 if error is None else 0.5
        p = x * scale if error is None else x * scale + before
        message, restored, lost = reference(p.numpy().copy(), codec)
        got = encode(codec, [x], scale=scale, error=error)
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
        assert encode(codec, [x]).numpy().tobytes() == reference(x.numpy(), codec)[0]


@pytest.mark.parametrize("name", INPUTS)
def test_threads_do_not_matter(name: str) -> None:
    codec, x, found = chunk_topk(), INPUTS[name](300_001), []
    for count in (1, 2, 3, 7):
        error = torch.where(x.isfinite(), x, 0).roll(1)
        out = torch.empty_like(x)
        with threads(count):
            message = encode(codec, [x], error=error)
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
    x = INPUTS[name](5 * form[1])
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
        message = encode(codec, [x])
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
    for method in (chunk_topk().nbytes, chunk_topk().entries, chunk_topk().shards):
        with pytest.raises(ValueError, match=f"chunk_topk: numel must be .* 2.31, got {numel}"):
            method(numel)


def test_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"message must hold 12 bytes for 64 values, got 116 byt"):
        commhook.chunk_topk_encode([torch.ones(64)], torch.zeros(116, dtype=torch.uint8), **FORM)
