"""The operators of codecs: chunks of given sizes, ``opcheck``, versions, and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from codec_examples import EXAMPLES, encode_chunks, of_each_codec, rounding_for
from torch import Tensor

from torch_commhook.codecs import CODECS, Codec
from torch_commhook.codecs.block_codec import BlockCodec
from torch_commhook.native.bucket_ops import BUCKET_DTYPES

commhook = torch.ops.commhook
ROUNDING = torch.tensor([1, 2])
X = torch.ones(64)


@dataclass(frozen=True)
class Operators:
    """The operators of a codec, with the arguments that follow tensors and message."""

    codec: Codec
    settings: dict[str, Any] = field(default_factory=dict)
    rounding: tuple[Tensor, ...] = ()

    def __getattr__(self, method: str) -> Any:
        return getattr(commhook, f"{type(self.codec).__name__}_{method}").default

    def message(self, numel: int) -> Tensor:
        return torch.zeros(self.codec.nbytes(numel), dtype=torch.uint8)


BLOCKWISE = CODECS["blockwise"](block_size=64)  # type: ignore[call-arg]
BLOCKS = Operators(BLOCKWISE, {"bits": 8, "block_size": 64, "symmetric": True})
CHUNKS = Operators(CODECS["chunk_topk"](5, 64, 2), {"k": 5, "chunk": 64, "bits": 2})
SPARSE = Operators(CODECS["topk"](0.03))
RANDOMK = Operators(CODECS["randomk"](0.03), rounding=(ROUNDING,))
ALL = [BLOCKS, CHUNKS, SPARSE, RANDOMK]
of_each = pytest.mark.parametrize("own", ALL, ids=lambda own: type(own.codec).__name__)


@of_each
@pytest.mark.parametrize("dtype", BUCKET_DTYPES, ids=str)
def test_opcheck_of_each_dtype(own: Operators, dtype: torch.dtype) -> None:
    tensors = [torch.randn(5, 30).to(dtype), torch.randn(10, 7).to(dtype).t()]
    message = own.message(220)
    own.encode(tensors, message, *own.rounding, **own.settings)
    torch.library.opcheck(own.encode, (tensors, message, *own.rounding), own.settings)
    torch.library.opcheck(own.decode, (message, tensors, *own.rounding), own.settings)


@of_each
@pytest.mark.parametrize("numel", [0, 1, 220])
def test_opcheck(own: Operators, numel: int) -> None:
    """With an error, of nothing and of a scalar; and sums of messages."""
    x, message = [torch.randn(() if numel == 1 else numel)], own.message(numel)
    keywords = {**own.settings, "error": torch.zeros(numel)}
    torch.library.opcheck(own.encode, (x, message, *own.rounding), keywords)
    own.encode(x, message, *own.rounding, **own.settings)
    stacked = torch.stack([message, message])
    if own is not RANDOMK:  # ranks add up its messages
        keywords = {**own.settings, "scale": 0.5}
        torch.library.opcheck(own.decode_sum, (stacked, x), keywords)
    if own is BLOCKS:
        keywords = {**own.settings, "error": torch.zeros(numel), "rounding": ROUNDING}
        torch.library.opcheck(own.encode, (x, message), keywords)
        torch.library.opcheck(own.reduce, (stacked, message, numel), keywords)


@of_each
def test_versions_move(own: Operators) -> None:
    x, message, error = torch.randn(64), own.message(64), torch.zeros(64)
    own.encode([x], message, *own.rounding, **own.settings, error=error)
    assert (x._version, message._version, error._version) == (0, 1, 1)
    own.decode(message, [x], *own.rounding, **own.settings)
    assert x._version == 1


# ---- errors --------------------------------------------------------------------------------------


@of_each
def test_memory_must_be_apart(own: Operators) -> None:
    memory, apart = torch.zeros(100), own.message(64)
    shared = memory.view(torch.uint8)[: len(apart)]

    def encode(x: Tensor, message: Tensor, **more: Tensor) -> None:
        own.encode([x], message, *own.rounding, **own.settings, **more)

    def decode(message: Tensor, x: Tensor) -> None:
        own.decode(message, [x], *own.rounding, **own.settings)

    with pytest.raises(ValueError, match=r"message must share no memory with tensors\[0\]"):
        encode(memory[1:65], shared)
    with pytest.raises(ValueError, match=r"tensors\[0\] must share no memory with message"):
        decode(shared, memory[1:65])
    with pytest.raises(ValueError, match=r"error must share no memory with tensors\[0\]"):
        encode(memory[:64], apart, error=memory[36:])
    with pytest.raises(ValueError, match="must reach each of its elements once"):
        decode(apart, torch.ones(1).expand(64))


@pytest.mark.parametrize(
    "call",
    [
        lambda message: BLOCKS.reduce(message, message.clone(), 64, **BLOCKS.settings),
        lambda message: SPARSE.decode_sum(message, [X.clone()]),
        lambda message: CHUNKS.decode_sum(message, [X.clone()], **CHUNKS.settings),
    ],
    ids=["blockwise", "topk", "chunk_topk"],
)
def test_a_sum_is_of_rows(call: Callable[[Tensor], None]) -> None:
    with pytest.raises(ValueError, match="messages must have two dimensions"):
        call(torch.zeros(80, dtype=torch.uint8))


def test_rows_without_bytes_are_refused() -> None:
    """Of these there may be so many that all their bytes are a multiple of 2^64."""
    rows, message = torch.empty(2**60, 0, dtype=torch.uint8), BLOCKS.message(64)
    with pytest.raises(ValueError, match=r"messages must hold 80 bytes in each row, got sizes"):
        BLOCKS.reduce(rows, message, 64, **BLOCKS.settings)
    with pytest.raises(ValueError, match=r"messages must hold 80 bytes in each row, got sizes"):
        BLOCKS.decode_sum(rows, [torch.zeros(64)], **BLOCKS.settings)
    with pytest.raises(ValueError, match=r"numel must be at least 0 and at most 2\^60, got"):
        BLOCKS.reduce(message[None], message.clone(), 2**63 - 1, **BLOCKS.settings)


Change = tuple[dict[str, Any], type[Exception], str]
#: Arguments of ``encode`` that do not fit, of all codecs and of single ones.
REFUSED: list[Change] = [
    ({"tensors": []}, ValueError, "tensors must hold at least one tensor"),
    ({"tensors": [X.long()]}, TypeError, r"tensors\[0\] must be of dtype"),
    ({"tensors": [X.clone().requires_grad_()]}, RuntimeError, r"tensors\[0\] must not require gr"),
    ({"message": torch.ones(80)}, TypeError, "message must be of dtype uint8"),
    ({"error": torch.ones(63)}, ValueError, "error must be contiguous and hold 64"),
    ({"error": X.half()}, TypeError, "error must be of dtype float"),
    ({"rounding": ROUNDING[:1]}, ValueError, "rounding must hold two numbers"),
    ({"rounding": ROUNDING.float()}, TypeError, "rounding must be a dense tensor of dtype int64"),
]
MEMORY = torch.zeros(160, dtype=torch.uint8)
REFUSED_BY_BLOCKS: list[Change] = [
    ({"bits": 5}, ValueError, "bits must be 2, 4 or 8, got 5"),
    ({"block_size": 12}, ValueError, "block_size must be a mult"),
    ({"bits": 2, "block_size": 24}, ValueError, "multiple of 16"),
    ({"block_size": 0}, ValueError, "block_size must be a mult"),
    ({"shards": 0}, ValueError, "shards must be at least 1"),
    ({"tensors": [torch.ones(65)]}, ValueError, "message must hold 96 bytes, got 80"),
    ({"message": MEMORY[::2]}, ValueError, "message must be contiguous"),
    ({"message": MEMORY[1:81]}, ValueError, "multiple of 4"),
]
REFUSED_BY_RANDOMK: list[Change] = [
    ({"message": MEMORY[:6]}, ValueError, "message must hold 4 bytes .* got 6 bytes"),
    ({"message": MEMORY[:0]}, ValueError, "must hold 4 bytes for each of 1 to"),
    ({"tensors": [X[:1]]}, ValueError, "1 to 1 entries, got 8 bytes"),
    ({"error": X.clone(), "unbiased": True}, ValueError, "error must be None if unbiased is True"),
    ({"tensors": [X.expand(1 << 26, 64)]}, ValueError, r"less than 2\^31 elements"),
]


@pytest.mark.parametrize(
    ("own", "change"),
    [
        *((own, change) for own in ALL for change in REFUSED),
        *((BLOCKS, change) for change in REFUSED_BY_BLOCKS),
        *((RANDOMK, change) for change in REFUSED_BY_RANDOMK),
    ],
    ids=lambda value: value[2] if isinstance(value, tuple) else type(value.codec).__name__,
)
def test_encode_refuses(own: Operators, change: Change) -> None:
    changed, error, match = change
    arguments = {"tensors": [X], "message": own.message(64), **own.settings, "rounding": ROUNDING}
    with pytest.raises(error, match=rf"{type(own.codec).__name__}_encode: .*{match}"):
        own.encode(**{**arguments, **changed})


# ---- messages of chunks of given sizes -----------------------------------------------------------

#: Those that FSDP cuts, others that are unequal or empty, and a single one.
SIZES = [
    [1000] * 4,
    [1000, 1000, 1000, 928],
    [0, 0, 0],
    [1],
    [7, 0, 256, 1, 0, 2049, 255],
    [0, 300],
    [300, 0],
    [4096, 1024, 1024],
]
of_each_sizes = pytest.mark.parametrize("sizes", SIZES, ids=str)

BLOCK_CODECS = [codec for codec in EXAMPLES if isinstance(codec, BlockCodec)]
of_each_block_codec = pytest.mark.parametrize("codec", BLOCK_CODECS, ids=repr)


@of_each_codec
@of_each_sizes
def test_each_chunk_is_a_message(codec: Codec, sizes: list[int]) -> None:
    """Its length, the bits of a call for each chunk, and each is decoded by itself."""
    segments = codec.chunks(sizes)
    assert [each.numel for each in segments] == sizes
    assert [each.nbytes for each in segments] == [codec.nbytes(size) for size in sizes]
    for dtype in codec.error_dtypes if codec.takes_error else [None]:
        x, rounding = torch.randn(sum(sizes)), rounding_for(codec)
        error = None if dtype is None else (torch.randn(sum(sizes)) * 0.1).to(dtype)
        lost = None if error is None else error.clone()
        message = encode_chunks(codec, [x], sizes, scale=0.5, error=lost)
        out = torch.full_like(x, 7)
        codec.decode_chunks(message, [out], sizes, rounding=rounding)
        parts = message.split([each.nbytes for each in segments])
        draws_on = codec.is_random and isinstance(codec, BlockCodec)  # other numbers for each chunk
        for place, (part, own, got) in enumerate(
            zip(parts, x.split(sizes), out.split(sizes), strict=True)
        ):
            if not own.numel():
                continue
            if not draws_on or place == 0:
                again = torch.empty_like(part)
                memory = None if error is None else error.split(sizes)[place].clone()
                codec.encode([own], again, scale=0.5, error=memory, rounding=rounding)
                assert torch.equal(part, again)
                assert lost is memory is None or torch.equal(lost.split(sizes)[place], memory)
            alone = torch.empty_like(own)
            codec.decode(part.clone(), [alone], rounding=rounding)
            assert torch.equal(got, alone)
        if lost is not None:  # rounded once, and not at all in float32
            rtol = 0 if dtype is torch.float32 else 2**-7
            torch.testing.assert_close(lost.float(), x * 0.5 + error - out, rtol=rtol, atol=0)


@of_each_block_codec
@pytest.mark.parametrize("numel", [0, 5000, 3 * 4096])
def test_chunks_where_segments_end_are_segments(codec: BlockCodec, numel: int) -> None:
    """Random numbers, too."""
    x, rounding = torch.randn(numel), rounding_for(codec)
    sizes = [segment.numel for segment in codec.segments(numel, 3)]
    message = torch.empty(codec.nbytes(numel, 3), dtype=torch.uint8)
    codec.encode([x], message, segments=3, rounding=rounding)
    assert torch.equal(encode_chunks(codec, [x], sizes), message)


INT8, TOPK = CODECS["blockwise"](), CODECS["topk"]()
VALUES = torch.ones(600)
BYTES = torch.zeros(1248, dtype=torch.uint8)


def message_of(codec: Codec, sizes: list[int]) -> Tensor:
    return torch.empty(sum(part.nbytes for part in codec.chunks(sizes)), dtype=torch.uint8)


ADD_UP = "sizes must add up to 600 elements"
NUMBERS = "sizes must be numbers of at least 0 that add up to the tensors' 600 values"
LENGTH = "message must be flat and hold 48 bytes"


@pytest.mark.parametrize(
    ("method", "codec", "encoded", "sizes", "error"),
    [
        ("encode", INT8, [300, 300], [300, 299], rf"{ADD_UP}, got \[300, 299\]"),
        ("decode", INT8, [600], [600, 1], rf"{ADD_UP}, got \[600, 1\]"),
        ("encode", INT8, [600], [2**63 - 1, 601], ADD_UP),
        ("encode", INT8, [600], [601, -1], rf"{ADD_UP}, got \[601, -1\]"),
        ("encode", INT8, [600], [-1, 601], r"sizes must be at least 0, got \[-1, 601\]"),
        ("encode", INT8, [600], [], r"sizes must be at least 1 number and at most 2\^20, got 0"),
        ("encode", INT8, [600], [300, 300], "message must hold 640 bytes, got 624"),
        ("encode", TOPK, [300, 299], [300, 299], rf"{NUMBERS}, got \[300, 299\]"),
        ("decode", TOPK, [300], [300, 300], rf"{LENGTH}, got sizes \[24\]"),
    ],
)
def test_sizes_that_do_not_fit(
    method: str, codec: Codec, encoded: list[int], sizes: list[int], error: str
) -> None:
    message = message_of(codec, encoded)
    operator = f"blockwise_{method}" if codec is INT8 else rf"topk\(\)\.{method}_chunks"
    with pytest.raises(ValueError, match=f"{operator}: {error}"):
        if method == "encode":
            codec.encode_chunks([VALUES], message, sizes)
        else:
            codec.decode_chunks(message, [VALUES], sizes)


def test_sums_that_do_not_fit() -> None:
    for messages, out, error in (
        (
            message_of(INT8, [300, 300]).view(2, 320),
            VALUES,
            "messages must hold 1248 bytes, got 640",
        ),
        (
            message_of(INT8, [600]),
            VALUES,
            r"messages must have two dimensions, one row for each message, got sizes \[624\]",
        ),
        (
            BYTES.view(2, 624),
            BYTES[:1200].view(torch.float16),
            r"tensors\[0\] must share no memory with messages",
        ),
    ):
        with pytest.raises(ValueError, match=f"blockwise_decode_sum: {error}"):
            INT8.decode_sum(messages, [out])


def test_sizes_and_segments() -> None:
    message, settings = message_of(INT8, [600]), INT8._settings
    error = "blockwise_encode: shards must be 1 if sizes are given, got 2"
    with pytest.raises(ValueError, match=error):
        torch.ops.commhook.blockwise_encode([VALUES], message, **settings, shards=2, sizes=[600])


@pytest.mark.parametrize("which", ["encode", "decode", "decode_sum"])
@pytest.mark.parametrize(
    "codec", [cls.examples()[0] for cls in CODECS.values() if issubclass(cls, BlockCodec)], ids=repr
)
@pytest.mark.parametrize("sizes", [[1000, 0, 300], [0]], ids=str)
def test_opcheck_of_chunks(codec: BlockCodec, which: str, sizes: list[int]) -> None:
    x, message = torch.randn(sum(sizes)), message_of(codec, sizes)
    codec.encode_chunks([x], message, sizes)
    operator = getattr(torch.ops.commhook, f"{codec._name}_{which}").default
    if which == "decode_sum":
        messages = torch.zeros(2, codec.nbytes(sum(sizes)), dtype=torch.uint8)
        torch.library.opcheck(operator, (messages, [x]), {"scale": 0.5, **codec._settings})
        return
    arguments = ([x], message) if which == "encode" else (message, [x])
    torch.library.opcheck(operator, arguments, {"sizes": sizes, **codec._settings})
