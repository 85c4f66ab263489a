"""What every codec owes to those who use it, for each codec of the table in all its examples."""

from __future__ import annotations

import itertools
import random
from abc import abstractmethod
from functools import partial
from typing import Any

import pytest
import torch
from codec_examples import (
    EXAMPLES,
    LARGEST,
    encode,
    encode_chunks,
    everything,
    of_each_codec,
    restore,
    rounding_for,
    same,
    some_chunks,
)
from ops_reference import LEVELS, cpu_level, limited_cpu, threads
from torch import Tensor

from torch_commhook.codecs import CODECS, Codec, register_codec

#: Those whose messages are exchanged in segments. Others have one, and ranks add up messages.
SEGMENTED = [codec for codec in EXAMPLES if codec.exchange == "all_to_all"]
WHOLE = [codec for codec in EXAMPLES if codec.exchange != "all_to_all"]
of_each_segmented = pytest.mark.parametrize("codec", SEGMENTED, ids=repr)
of_each_whole = pytest.mark.parametrize("codec", WHOLE, ids=repr)
WITH_ERROR = [codec for codec in EXAMPLES if codec.takes_error]
of_each_with_error = pytest.mark.parametrize("codec", WITH_ERROR, ids=repr)
#: All formats of ``blockwise`` with random rounding.
STOCHASTIC = [
    CODECS["blockwise"](bits, symmetric=symmetric, rounding="stochastic")  # type: ignore[call-arg]
    for bits in (2, 4, 8)
    for symmetric in (True, False)
]


def test_there_are_codecs() -> None:
    assert "blockwise" in CODECS
    assert all(issubclass(cls, Codec) for cls in CODECS.values())
    assert {codec.exchange for codec in WHOLE} <= {"all_gather", "all_reduce"}


@of_each_codec
def test_it_prints_as_it_is_written(codec: Codec) -> None:
    again = eval(repr(codec), dict(CODECS))
    assert repr(again) == repr(codec)
    x = torch.randn(1000)
    assert torch.equal(encode(again, [x]), encode(codec, [x]))


@pytest.mark.parametrize("numel", [0, 1, 255, 5000])
@pytest.mark.parametrize(
    ("codec", "segments"),
    [*((codec, 1) for codec in EXAMPLES), *((codec, 3) for codec in SEGMENTED)],
    ids=repr,
)
def test_segments_follow_from_the_number_of_values(codec: Codec, numel: int, segments: int) -> None:
    parts = codec.segments(numel, segments)
    assert len(parts) == segments
    assert sum(part.numel for part in parts) == numel
    assert codec.nbytes(numel, segments) == sum(part.nbytes for part in parts)
    assert all(part.nbytes == 0 for part in parts if part.numel == 0)


@of_each_whole
def test_one_segment_is_all(codec: Codec) -> None:
    message, x = encode(codec, [torch.randn(600)]), torch.randn(600)
    rounding = rounding_for(codec)
    for call in (
        lambda: codec.segments(600, 2),
        lambda: codec.nbytes(600, 2),
        lambda: codec.encode([x], message, segments=2, rounding=rounding),
        lambda: codec.decode(message, [x], segments=2, rounding=rounding),
    ):
        with pytest.raises(ValueError, match="segments must be 1"):
            call()
    with pytest.raises(ValueError, match=r"\.reduce: exchange must be 'all_to_all', got"):
        codec.reduce(message[None], message.clone(), 600, rounding=rounding)


@of_each_segmented
def test_each_segment_is_a_message(codec: Codec) -> None:
    x = torch.randn(5000)
    message = encode(codec, [x], segments=3)
    parts = codec.segments(5000, 3)
    pieces = []
    for part, own in zip(parts, message.split([part.nbytes for part in parts]), strict=True):
        pieces.append(torch.empty(part.numel))
        codec.decode(own.clone(), [pieces[-1]])
    assert torch.equal(torch.cat(pieces), restore(codec, x, segments=3))


@of_each_codec
def test_tensors_of_any_form(codec: Codec) -> None:
    """As one flat tensor of their values, with the same errors; chunks end anywhere in them."""
    rng = random.Random(repr(codec))
    torch.manual_seed(0)
    rounding = torch.tensor([1, 0])
    dtypes = [None, *(codec.error_dtypes if codec.takes_error else [])]
    # Users' codecs may scale float64 before they round it.
    scales = [1.0, 0.25, *([1 / 3] if type(codec).__module__.startswith("torch_commhook") else [])]
    for number in range(40):
        tensors, sizes = some_chunks(rng)
        tensors += [torch.randn(()), torch.randn(40)[::2]]
        sizes.append(21)
        flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
        dtype, scale = dtypes[number % len(dtypes)], rng.choice(scales)
        noise = torch.randn(flat.numel()) * 0.01
        found = []
        for given in (tensors, [flat]):
            errors = [None if dtype is None else noise.to(dtype, copy=True) for _ in range(2)]
            options = {"scale": scale, "rounding": rounding}
            message = encode(codec, given, error=errors[0], **options)
            chunks = encode_chunks(codec, given, sizes, error=errors[1], **options)
            out, of_chunks = ([torch.full_like(tensor, 7) for tensor in given] for _ in range(2))
            codec.decode(message, out, rounding=rounding)
            codec.decode_chunks(chunks, of_chunks, sizes, rounding=rounding)
            found.append((out, of_chunks, [message, chunks, *errors]))
        *own, written = found[0]
        *right, all_right = found[1]
        assert all(a is b is None or same(a, b) for a, b in zip(written, all_right, strict=True))
        for got, (values,) in zip(own, right, strict=True):
            pieces = values.split([tensor.numel() for tensor in tensors])
            for tensor, piece in zip(got, pieces, strict=True):
                assert same(tensor, piece.view(tensor.shape).to(tensor.dtype))


@pytest.mark.parametrize("codec", [*WITH_ERROR, *STOCHASTIC], ids=repr)
def test_the_error_is_what_is_lost(codec: Codec) -> None:
    x, error = torch.randn(3000), torch.randn(3000) * 0.01
    sent = x * 0.5 + error
    got = restore(codec, x, scale=0.5, error=error)
    assert torch.equal(error, sent - got)
    assert torch.equal(got, restore(codec, sent))


@of_each_with_error
def test_error_feedback_loses_nothing_in_the_long_run(codec: Codec) -> None:
    """What was sent, and what is still held back, add up to what was to be sent."""
    error, sent, total = torch.zeros(700), torch.zeros(700), torch.zeros(700)
    for step in range(50):
        x = torch.randn(700)
        sent += restore(codec, x, error=error, rounding=rounding_for(codec, step))
        total += x
    torch.testing.assert_close(sent + error, total, rtol=1e-4, atol=1e-4)
    assert error.norm() < 10 * 700**0.5


@of_each_codec
@pytest.mark.parametrize("level", LEVELS)
def test_a_sum_is_that_of_what_is_decoded(codec: Codec, level: str) -> None:
    """In float32, in the order of the messages, then scaled and rounded."""
    rounding, numel = rounding_for(codec), 50_000
    for count in (1, 3):
        messages = torch.stack([encode(codec, [torch.randn(numel)]) for _ in range(count)])
        pieces = [torch.empty(numel) for _ in messages]
        for message, piece in zip(messages, pieces, strict=True):
            codec.decode(message, [piece], rounding=rounding)
        total = sum(pieces[1:], pieces[0]) * 0.3
        for sum_up in (codec.decode_sum, partial(Codec.decode_sum, codec)):
            out = [torch.empty(700), torch.empty(200, 10).bfloat16().t(), torch.empty(300).double()]
            out.append(torch.empty(47_000))
            with cpu_level(level):
                sum_up(messages, out, scale=0.3, rounding=rounding)
            for got, right in zip(out, total.split([700, 2000, 300, 47_000]), strict=True):
                assert torch.equal(got, right.view(got.shape).to(got.dtype))


@pytest.mark.parametrize("codec", [*SEGMENTED, *STOCHASTIC], ids=repr)
@pytest.mark.parametrize("count", [1, 3])
def test_reduce_is_decode_sum_encode(codec: Codec, count: int) -> None:
    messages = torch.stack([encode(codec, [torch.randn(3000)]) for _ in range(count)])
    results = []
    for reduce in (codec.reduce, partial(Codec.reduce, codec)):
        error, message = torch.full((3000,), 0.01), torch.empty_like(messages[0])
        reduce(messages, message, 3000, scale=1 / 3, error=error, rounding=rounding_for(codec))
        results.append((message, error))
    assert all(map(torch.equal, *results))


@of_each_codec
def test_zeros_are_exact(codec: Codec) -> None:
    assert torch.equal(restore(codec, torch.zeros(600)), torch.zeros(600))
    if codec.takes_error:
        got = restore(codec, torch.zeros(600), error=torch.zeros(600))
        assert torch.equal(got, torch.zeros(600))


@of_each_codec
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_become_a_number(codec: Codec, value: float) -> None:
    x = torch.randn(600)
    x[300] = value
    dtypes = codec.error_dtypes if codec.takes_error else []
    for error in (None, *(torch.randn(600).to(dtype) for dtype in dtypes)):
        got = restore(codec, x, error=error, rounding=torch.tensor([1, 0]))
        if codec.exchange == "all_reduce":  # that value itself need not have been sent
            assert not got.isfinite().all()
        else:
            assert not got[300].isfinite()
        assert error is None or error.isfinite().all()  # or it would stay so


def largest_numbers(draw: random.Random, numel: int) -> Tensor:
    """Some values at or a little below the end of float32, among others, often of one sign."""
    x = torch.randn(numel) * 10.0 ** draw.choice([0, 30, 37])
    for _ in range(draw.choice([1, 2, numel])):
        value = LARGEST * (1 - draw.choice([0, 1, 2, 100, 10**6]) * 2.0**-24)
        x[draw.randrange(numel)] = value * draw.choice([1, 1, 0.99, 0.5, 0.25, -1])
    return x.abs() * draw.choice([1, -1]) if draw.random() < 0.5 else x


@of_each_with_error
@pytest.mark.parametrize("level", LEVELS)
def test_the_largest_numbers_leave_a_finite_error(codec: Codec, level: str) -> None:
    draw = random.Random(repr(codec))
    torch.manual_seed(0)
    with cpu_level(level):
        for step, dtype in itertools.product(range(60), codec.error_dtypes):
            error = torch.zeros(600, dtype=dtype)
            x, rounding = largest_numbers(draw, 600), torch.tensor([1, step])
            got = restore(codec, x, error=error, rounding=rounding)
            assert error.isfinite().all(), step
            assert not got.isinf().any(), step


@pytest.mark.parametrize("codec", [codec for codec in EXAMPLES if codec.is_random], ids=repr)
def test_random_numbers_are_asked_for(codec: Codec) -> None:
    """They follow from seed and step."""
    x = torch.randn(600)
    seeds_and_steps = ((1, 1), (1, 2), (2, 1), (2, 2))
    draws = [encode(codec, [x], rounding=torch.tensor(each)) for each in seeds_and_steps]
    assert torch.equal(draws[0], encode(codec, [x], rounding=torch.tensor([1, 1])))
    assert not any(itertools.starmap(torch.equal, itertools.combinations(draws, 2)))
    with pytest.raises(ValueError, match="rounding must be given"):
        encode(codec, [x], rounding=None)


# ---- one arithmetic ------------------------------------------------------------------------------


@of_each_codec
def test_all_kernels_give_the_same_bits(codec: Codec) -> None:
    """Of whole messages and of chunks, with errors of all dtypes."""
    is_own = type(codec).__module__.startswith("torch_commhook.")
    rng = random.Random(0)
    torch.manual_seed(0)
    for number in range(75):
        tensors, sizes = some_chunks(rng)
        segments, scale = rng.choice([1, 2, 3, 8]), rng.choice([1.0, 0.5, 1 / 3])
        dtype = [None, *codec.error_dtypes][number % (1 + len(codec.error_dtypes))]
        error = None if dtype is None else (torch.randn(sum(sizes)) * 1e-3).to(dtype)
        # Codecs from elsewhere may send a NaN's payload, which differs between kernels.
        exact = is_own or all(tensor.isfinite().all() for tensor in tensors)
        found = []
        for level in LEVELS:
            with limited_cpu(level):
                found.append(everything(codec, tensors, segments, scale, error, sizes))
        for other in found[1:]:
            pairs = zip(other, found[0], strict=True)
            wrong = [a for a, b in pairs if (exact or a.is_floating_point()) and not same(a, b)]
            assert not wrong, (segments, scale, sizes)


@of_each_codec
def test_threads_do_not_matter(codec: Codec) -> None:
    tensors = [torch.randn(300_000), torch.randn(77, 1000).t(), torch.randn(9999)]
    noise, sizes = torch.randn(386_999) * 0.1, [100_000, 0, 999, 200_000, 86_000]
    for dtype in codec.error_dtypes:
        found = []
        for count in (1, 2, 3):
            with threads(count):
                found.append(everything(codec, tensors, 3, 0.5, noise.to(dtype), sizes))
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other))


# ---- compilers -----------------------------------------------------------------------------------

FIRST = [cls.examples()[0] for cls in CODECS.values()]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("backend", "dynamic", "codec"),
    [
        *(("aot_eager", dynamic, codec) for codec in EXAMPLES for dynamic in (False, True)),
        *(("inductor", False, codec) for codec in FIRST),
    ],
    ids=repr,
)
def test_compiled(backend: str, dynamic: bool, codec: Codec) -> None:
    """Segments, sums and chunks."""
    segments = 2 if codec.exchange == "all_to_all" else 1

    def run(tensors: list[Tensor], errors: list[Tensor], rounding: Tensor) -> list[Tensor]:
        made = [tensor * 2 for tensor in tensors]
        numel = sum(tensor.numel() for tensor in tensors)
        message = torch.empty(codec.nbytes(numel, segments), dtype=torch.uint8)
        lost = errors if codec.takes_error else [None, None]
        drawn = rounding.clone()
        codec.encode(made, message, segments=segments, error=lost[0], rounding=rounding)
        rounding[1] += 1
        out, sums, pieces = ([torch.empty_like(tensor) for tensor in tensors] for _ in range(3))
        codec.decode(message, out, segments=segments, rounding=drawn)
        whole = torch.empty(codec.nbytes(numel), dtype=torch.uint8)
        codec.encode(made, whole, rounding=drawn)
        codec.decode_sum(torch.stack([whole, whole]), sums, scale=0.5, rounding=drawn)
        sizes = [numel // 3, 0, numel - numel // 3]
        nbytes = sum(part.nbytes for part in codec.chunks(sizes))
        chunks = torch.empty(nbytes, dtype=torch.uint8)
        codec.encode_chunks(made, chunks, sizes, error=lost[1], rounding=drawn)
        codec.decode_chunks(chunks, pieces, sizes, rounding=drawn)
        return [message, *out, *sums, chunks, *(piece + 1 for piece in pieces)]

    results = []
    for call in (run, torch.compile(run, fullgraph=True, backend=backend, dynamic=dynamic)):
        torch.manual_seed(0)
        tensors = [torch.randn(300), torch.randn(10, 100)]
        errors, rounding = [torch.randn(1300) * 0.1 for _ in range(2)], torch.tensor([1, 2])
        for _ in range(2):
            written = call(tensors, errors, rounding)
        results.append([*written, *errors, rounding])
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("fresh_compiler")
@of_each_codec
def test_compiled_for_any_size(codec: Codec) -> None:
    graphs = 0

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return module

    def run(x: Tensor, rounding: Tensor) -> Tensor:
        message = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8)
        codec.encode([x], message, rounding=rounding)
        out = torch.empty_like(x)
        codec.decode(message, [out], rounding=rounding)
        return out

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    for numel in (1000, 1001, 5000, 777):
        x, rounding = torch.randn(numel), torch.tensor([1, 2])
        assert torch.equal(compiled(x, rounding), run(x, rounding))
    assert graphs == 1


# ---- the table -----------------------------------------------------------------------------------


def test_registration_is_checked() -> None:
    with pytest.raises(TypeError, match="must be a subclass of Codec, got 3"):
        register_codec(3)  # type: ignore[type-var]
    other = type("blockwise", (CODECS["sign"],), {})
    with pytest.raises(ValueError, match="there is a codec named blockwise already"):
        register_codec(other)
    assert CODECS["blockwise"] is not other


class _WithSetting(Codec):
    @property
    @abstractmethod
    def density(self) -> float: ...


@pytest.mark.parametrize(
    ("base", "members", "missing"),
    [
        (Codec, {}, "decode, encode, segments"),
        (Codec, {"segments": lambda self, numel, segments=1: []}, "decode, encode"),
        (_WithSetting, dict.fromkeys(("segments", "encode", "decode"), print), "density"),
    ],
    ids=["none", "one", "property"],
)
def test_an_abstract_codec_is_refused(
    base: type[Codec], members: dict[str, Any], missing: str
) -> None:
    with pytest.raises(TypeError) as raised:
        register_codec(type("unfinished", (base,), members))
    assert str(raised.value) == (
        "register_codec: unfinished must define all abstract methods and properties of its base "
        f"classes; missing: {missing}"
    )
    assert "unfinished" not in CODECS


@pytest.mark.parametrize(
    ("text", "bytes_each"),
    [
        ("blockwise()", 1 + 4 / 256),
        ("blockwise(bits=4)", 0.5 + 4 / 256),
        ("blockwise(bits=2)", 0.25 + 4 / 256),
        ("blockwise(symmetric=False)", 1 + 8 / 256),
        ("blockwise(bits=2, symmetric=False)", 0.25 + 8 / 256),
        ("blockwise(bits=4, rounding='stochastic')", 0.5 + 4 / 256),
        ("fp8(format='e5m2')", 1 + 4 / 256),
        ("sign()", 1 / 8 + 4 / 1024),
        ("topk(density=0.25)", 2),
        ("randomk(density=0.25, unbiased=True)", 1),
        ("chunk_topk()", 116 / 4096),
        ("chunk_topk(k=8, chunk=64, bits=4)", 16 / 64),
    ],
)
def test_text_and_bytes(text: str, bytes_each: float) -> None:
    codec = eval(text, dict(CODECS))
    assert repr(codec) == text
    assert codec.nbytes(1 << 20) == (1 << 20) * bytes_each


#: Of each error, codecs, settings, and messages.
SETTINGS: dict[type[Exception], list[tuple[str, dict[str, Any], str]]] = {
    ValueError: [
        ("blockwise", {"bits": 3}, "bits must be 2, 4 or 8, got 3"),
        ("blockwise", {"block_size": 100}, "block_size must be a multiple of 8"),
        ("blockwise", {"rounding": "up"}, "rounding must be 'nearest' or"),
        ("fp8", {"format": "e3m4"}, "format must be 'e4m3' or 'e5m2', got 'e3m4'"),
        ("sign", {"block_size": 48}, "block_size must be a multiple of 32"),
        *(
            (name, {"density": density}, "density must be more than 0 and at most 1")
            for name in ("topk", "randomk")
            for density in (0, -0.1, 1.5, float("nan"))
        ),
    ],
    TypeError: [
        ("blockwise", {"bits": 8.0}, "bits must be an int, got 8.0"),
        ("blockwise", {"bits": "8"}, "bits must be an int, got '8'"),
        ("blockwise", {"block_size": 256.0}, "block_size must be an int"),
        ("chunk_topk", {"bits": 2.0}, "bits must be an int, got 2.0"),
        ("blockwise", {"symmetric": "minmax"}, "symmetric must be a bool"),
        ("fp8", {"format": 3}, "format must be a str"),
        ("sign", {"block_size": "a"}, "block_size must be an int"),
        ("sign", {"block_size": True}, "block_size must be an int"),
        ("topk", {"density": "a"}, "density must be a number"),
        ("randomk", {"unbiased": 1}, "unbiased must be a bool"),
    ],
}


@pytest.mark.parametrize(
    ("error", "name", "settings", "message"),
    [(error, *wrong) for error, every in SETTINGS.items() for wrong in every],
)
def test_wrong_settings(
    error: type[Exception], name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(error, match=f"{name}: {message}"):
        CODECS[name](**settings)
