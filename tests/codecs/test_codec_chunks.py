"""Messages of chunks of given sizes: what each codec owes to those who ask for them."""

from __future__ import annotations

import pytest
import torch
from codec_examples import EXAMPLES, encode_chunks, of_each_codec, rounding_for
from torch import Tensor

from torch_commhook.codecs import CODECS, Codec
from torch_commhook.codecs.block_codec import BlockCodec

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
    shards = codec.chunks(sizes)
    assert [each.numel for each in shards] == sizes
    assert [each.nbytes for each in shards] == [codec.nbytes(size) for size in sizes]
    for dtype in codec.error_dtypes if codec.takes_error else [None]:
        x, rounding = torch.randn(sum(sizes)), rounding_for(codec)
        error = None if dtype is None else (torch.randn(sum(sizes)) * 0.1).to(dtype)
        lost = None if error is None else error.clone()
        message = encode_chunks(codec, [x], sizes, scale=0.5, error=lost)
        out = torch.full_like(x, 7)
        codec.decode_chunks(message, [out], sizes, rounding=rounding)
        parts = message.split([each.nbytes for each in shards])
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
        if dtype is torch.float32:
            assert torch.equal(lost, x * 0.5 + error - out)


@of_each_block_codec
@pytest.mark.parametrize("numel", [0, 5000, 3 * 4096])
def test_chunks_where_shards_end_are_shards(codec: BlockCodec, numel: int) -> None:
    """Random numbers, too."""
    x, rounding = torch.randn(numel), rounding_for(codec)
    sizes = [shard.numel for shard in codec.shards(numel, 3)]
    message = torch.empty(codec.nbytes(numel, 3), dtype=torch.uint8)
    codec.encode([x], message, shards=3, rounding=rounding)
    assert torch.equal(encode_chunks(codec, [x], sizes), message)


# ---- errors --------------------------------------------------------------------------------------

BLOCKWISE, TOPK = CODECS["blockwise"](), CODECS["topk"]()
X = torch.ones(600)
BYTES = torch.zeros(1248, dtype=torch.uint8)


def message_of(codec: Codec, sizes: list[int]) -> Tensor:
    return torch.empty(sum(part.nbytes for part in codec.chunks(sizes)), dtype=torch.uint8)


ADD_UP = "sizes must add up to 600 elements"
NUMBERS = "sizes must be numbers of at least 0 that add up to the tensors' 600 values"
LENGTH = "message must be flat and hold 48 bytes"


@pytest.mark.parametrize(
    ("method", "codec", "encoded", "sizes", "error"),
    [
        ("encode", BLOCKWISE, [300, 300], [300, 299], rf"{ADD_UP}, got \[300, 299\]"),
        ("decode", BLOCKWISE, [600], [600, 1], rf"{ADD_UP}, got \[600, 1\]"),
        ("encode", BLOCKWISE, [600], [2**63 - 1, 601], ADD_UP),
        ("encode", BLOCKWISE, [600], [601, -1], rf"{ADD_UP}, got \[601, -1\]"),
        ("encode", BLOCKWISE, [600], [-1, 601], r"sizes must be at least 0, got \[-1, 601\]"),
        (
            "encode",
            BLOCKWISE,
            [600],
            [],
            r"sizes must be at least 1 number and at most 2\^20, got 0",
        ),
        ("encode", BLOCKWISE, [600], [300, 300], "message must hold 640 bytes, got 624"),
        ("encode", TOPK, [300, 299], [300, 299], rf"{NUMBERS}, got \[300, 299\]"),
        ("decode", TOPK, [300], [300, 300], rf"{LENGTH}, got sizes \[24\]"),
    ],
)
def test_sizes_that_do_not_fit(
    method: str, codec: Codec, encoded: list[int], sizes: list[int], error: str
) -> None:
    message = message_of(codec, encoded)
    operator = f"blockwise_{method}" if codec is BLOCKWISE else rf"topk\(\)\.{method}_chunks"
    with pytest.raises(ValueError, match=f"{operator}: {error}"):
        if method == "encode":
            codec.encode_chunks([X], message, sizes)
        else:
            codec.decode_chunks(message, [X], sizes)


def test_sums_that_do_not_fit() -> None:
    for messages, out, error in (
        (
            message_of(BLOCKWISE, [300, 300]).view(2, 320),
            X,
            "messages must hold 1248 bytes, got 640",
        ),
        (
            message_of(BLOCKWISE, [600]),
            X,
            r"messages must have two dimensions, one row for each message, got sizes \[624\]",
        ),
        (
            BYTES.view(2, 624),
            BYTES[:1200].view(torch.float16),
            r"tensors\[0\] must share no memory with messages",
        ),
    ):
        with pytest.raises(ValueError, match=f"blockwise_decode_sum: {error}"):
            BLOCKWISE.decode_sum(messages, [out])


def test_sizes_and_shards() -> None:
    message, settings = message_of(BLOCKWISE, [600]), BLOCKWISE._settings
    error = "blockwise_encode: shards must be 1 if sizes are given, got 2"
    with pytest.raises(ValueError, match=error):
        torch.ops.commhook.blockwise_encode([X], message, **settings, shards=2, sizes=[600])


# ---- compilers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["encode", "decode", "decode_sum"])
@pytest.mark.parametrize(
    "codec", [cls.examples()[0] for cls in CODECS.values() if issubclass(cls, BlockCodec)], ids=repr
)
@pytest.mark.parametrize("sizes", [[1000, 0, 300], [0]], ids=str)
def test_opcheck(codec: BlockCodec, which: str, sizes: list[int]) -> None:
    x, message = torch.randn(sum(sizes)), message_of(codec, sizes)
    codec.encode_chunks([x], message, sizes)
    operator = getattr(torch.ops.commhook, f"{codec._name}_{which}").default
    if which == "decode_sum":
        messages = torch.zeros(2, codec.nbytes(sum(sizes)), dtype=torch.uint8)
        torch.library.opcheck(operator, (messages, [x]), {"scale": 0.5, **codec._settings})
        return
    arguments = ([x], message) if which == "encode" else (message, [x])
    torch.library.opcheck(operator, arguments, {"sizes": sizes, **codec._settings})
