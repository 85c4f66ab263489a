"""Messages of chunks of given sizes: what each codec owes to those who ask for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from codec_examples import EXAMPLES, of_each_codec, rounding_for, same, some_tensors
from ops_reference import LEVELS, limited_cpu
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


def encode_chunks(codec: Codec, tensors: list[Tensor], sizes: list[int], **options: Any) -> Tensor:
    """A message over bytes of no meaning."""
    nbytes = sum(part.nbytes for part in codec.chunks(sizes))
    message = torch.full((nbytes,), 0x55, dtype=torch.uint8)
    codec.encode_chunks(tensors, message, sizes, **{"rounding": rounding_for(codec), **options})
    return message


@of_each_codec
@of_each_sizes
def test_each_chunk_has_the_bytes_of_its_message(codec: Codec, sizes: list[int]) -> None:
    parts = codec.chunks(sizes)
    assert [part.numel for part in parts] == sizes
    assert [part.nbytes for part in parts] == [codec.nbytes(size) for size in sizes]


@of_each_codec
@of_each_sizes
def test_each_chunk_is_a_message(codec: Codec, sizes: list[int]) -> None:
    """The bits of a call for each chunk, and each is decoded by itself."""
    x, error = torch.randn(sum(sizes)), torch.randn(sum(sizes)) * 0.1
    lost = error.clone() if codec.takes_error else None
    rounding = rounding_for(codec)
    message = encode_chunks(codec, [x], sizes, scale=0.5, error=lost)
    out = torch.full_like(x, 7)
    codec.decode_chunks(message, [out], sizes, rounding=rounding)
    parts = message.split([part.nbytes for part in codec.chunks(sizes)])
    draws_on = codec.is_random and isinstance(codec, BlockCodec)  # other numbers for each chunk
    chunks = zip(parts, *(each.split(sizes) for each in (x, error, out)), strict=True)
    for place, (part, own, before, got) in enumerate(chunks):
        if not own.numel():
            continue
        if not draws_on or place == 0:
            again = torch.empty_like(part)
            memory = before.clone() if codec.takes_error else None
            codec.encode([own], again, scale=0.5, error=memory, rounding=rounding)
            assert torch.equal(part, again)
            if lost is not None and memory is not None:
                assert torch.equal(lost.split(sizes)[place], memory)
        alone = torch.empty_like(own)
        codec.decode(part.clone(), [alone], rounding=rounding)
        assert torch.equal(got, alone)
    if lost is not None:
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


@of_each_block_codec
@of_each_sizes
def test_one_call_for_all_chunks(codec: BlockCodec, sizes: list[int]) -> None:
    """The operators give what the calls for each chunk do, which serve codecs without any."""
    x = torch.randn(sum(sizes))
    message = encode_chunks(codec, [x], sizes)
    out, right = torch.empty_like(x), torch.empty_like(x)
    codec.decode_chunks(message, [out], sizes)
    Codec.decode_chunks(codec, message, [right], sizes)
    assert torch.equal(out, right)
    if not codec.is_random:
        again = torch.full_like(message, 0xAA)
        Codec.encode_chunks(codec, [x], again, sizes)
        assert torch.equal(again, message)


def some_chunks(rng: random.Random) -> tuple[list[Tensor], list[int]]:
    """Tensors, and sizes of chunks that end anywhere in them."""
    tensors = some_tensors(rng)
    numel = sum(tensor.numel() for tensor in tensors)
    ends = sorted(rng.randint(0, numel) for _ in range(rng.randint(0, 4)))
    return tensors, [b - a for a, b in zip([0, *ends], [*ends, numel], strict=True)]


@of_each_codec
def test_tensors_of_any_form(codec: Codec) -> None:
    """Chunks end anywhere in tensors of any dtypes and strides."""
    rng = random.Random(repr(codec))
    torch.manual_seed(0)
    for _ in range(20):
        tensors, sizes = some_chunks(rng)
        flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
        message = encode_chunks(codec, tensors, sizes)
        assert torch.equal(message, encode_chunks(codec, [flat], sizes))
        right = torch.empty_like(flat)
        codec.decode_chunks(message, [right], sizes, rounding=rounding_for(codec))
        out = [torch.full_like(tensor, 7.0) for tensor in tensors]
        codec.decode_chunks(message, out, sizes, rounding=rounding_for(codec))
        pieces = right.split([tensor.numel() for tensor in tensors])
        for got, piece in zip(out, pieces, strict=True):
            assert same(got, piece.view(got.shape).to(got.dtype))


@of_each_block_codec
def test_all_kernels_give_the_same_bits(codec: BlockCodec) -> None:
    rng = random.Random(repr(codec))
    torch.manual_seed(0)
    for _ in range(20):
        tensors, sizes = some_chunks(rng)
        before = torch.randn(sum(sizes)) * 1e-3 if rng.random() < 0.5 else None
        found = []
        for level in LEVELS:
            with limited_cpu(level):
                error = None if before is None else before.clone()
                message = encode_chunks(codec, tensors, sizes, scale=0.5, error=error)
                out = [torch.empty_like(tensor) for tensor in tensors]
                codec.decode_chunks(message, out, sizes)
            found.append([message, *out, *([] if error is None else [error])])
        for other in found[1:]:
            assert all(map(same, other, found[0])), sizes


@of_each_block_codec
def test_threads_do_not_matter(codec: BlockCodec) -> None:
    x, sizes, found = torch.randn(386_999), [100_000, 0, 999, 200_000, 86_000], []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            error, out = torch.full_like(x, 0.01), torch.empty_like(x)
            message = encode_chunks(codec, [x], sizes, error=error)
            codec.decode_chunks(message, [out], sizes)
            found.append([message, error, out])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


# ---- errors --------------------------------------------------------------------------------------

BLOCKWISE, TOPK = CODECS["blockwise"](), CODECS["topk"]()
X = torch.ones(600)
BYTES = torch.zeros(1248, dtype=torch.uint8)


def message_of(codec: Codec, sizes: list[int]) -> Tensor:
    return torch.empty(sum(part.nbytes for part in codec.chunks(sizes)), dtype=torch.uint8)


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "too few": (
        lambda: BLOCKWISE.encode_chunks([X], message_of(BLOCKWISE, [300, 300]), [300, 299]),
        ValueError,
        r"blockwise_encode: sizes must add up to 600 elements, got \[300, 299\]",
    ),
    "too many": (
        lambda: BLOCKWISE.decode_chunks(message_of(BLOCKWISE, [600]), [X], [600, 1]),
        ValueError,
        r"blockwise_decode: sizes must add up to 600 elements, got \[600, 1\]",
    ),
    "more than there are numbers": (
        lambda: BLOCKWISE.encode_chunks([X], message_of(BLOCKWISE, [600]), [2**63 - 1, 601]),
        ValueError,
        "sizes must add up to 600 elements",
    ),
    "below 0": (
        lambda: BLOCKWISE.encode_chunks([X], message_of(BLOCKWISE, [600]), [601, -1]),
        ValueError,
        r"sizes must add up to 600 elements, got \[601, -1\]",
    ),
    "below 0 at first": (
        lambda: BLOCKWISE.encode_chunks([X], message_of(BLOCKWISE, [600]), [-1, 601]),
        ValueError,
        r"blockwise_encode: sizes must be at least 0, got \[-1, 601\]",
    ),
    "none": (
        lambda: BLOCKWISE.encode_chunks([X], message_of(BLOCKWISE, [600]), []),
        ValueError,
        r"blockwise_encode: sizes must be at least 1 number and at most 2\^20, got 0",
    ),
    "a short message": (
        lambda: BLOCKWISE.encode_chunks([X], message_of(BLOCKWISE, [600]), [300, 300]),
        ValueError,
        "blockwise_encode: message must hold 640 bytes, got 624",
    ),
    "a sum of messages of other values": (
        lambda: BLOCKWISE.decode_sum(message_of(BLOCKWISE, [300, 300]).view(2, 320), [X]),
        ValueError,
        "blockwise_decode_sum: messages must hold 1248 bytes, got 640",
    ),
    "a sum of one message that is no row": (
        lambda: BLOCKWISE.decode_sum(message_of(BLOCKWISE, [600]), [X]),
        ValueError,
        r"blockwise_decode_sum: messages must have two dimensions, one row for each message, got "
        r"sizes \[624\]",
    ),
    "a sum into memory of its messages": (
        lambda: BLOCKWISE.decode_sum(BYTES.view(2, 624), [BYTES[:1200].view(torch.float16)]),
        ValueError,
        r"blockwise_decode_sum: tensors\[0\] must share no memory with messages",
    ),
    "shards as well": (
        lambda: torch.ops.commhook.blockwise_encode(
            [X],
            message_of(BLOCKWISE, [600]),
            bits=8,
            block_size=256,
            symmetric=True,
            shards=2,
            sizes=[600],
        ),
        ValueError,
        "blockwise_encode: shards must be 1 if sizes are given, got 2",
    ),
    "too few of a codec without an operator": (
        lambda: TOPK.encode_chunks([X], message_of(TOPK, [300, 299]), [300, 299]),
        ValueError,
        r"topk\(\)\.encode_chunks: sizes must be numbers of at least 0 that add up to the tensors' "
        r"600 values, got \[300, 299\]",
    ),
    "a short message of a codec without an operator": (
        lambda: TOPK.decode_chunks(message_of(TOPK, [300]), [X], [300, 300]),
        ValueError,
        r"topk\(\)\.decode_chunks: message must be flat and hold 48 bytes, got sizes \[24\]",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call()


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


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
@of_each_codec
def test_compiled(codec: Codec, dynamic: bool) -> None:
    def run(x: Tensor, error: Tensor, rounding: Tensor) -> Tensor:
        numel = x.numel()
        sizes = [numel // 3, 0, numel - numel // 3]
        nbytes = sum(part.nbytes for part in codec.chunks(sizes))
        message = torch.empty(nbytes, dtype=torch.uint8)
        lost = error if codec.takes_error else None
        codec.encode_chunks([x * 2], message, sizes, error=lost, rounding=rounding)
        out = torch.empty_like(x)
        codec.decode_chunks(message, [out], sizes, rounding=rounding)
        return out + 1

    results = []
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)):
        torch.manual_seed(0)
        x, error, rounding = torch.randn(1300), torch.randn(1300) * 0.1, torch.tensor([1, 2])
        results.append([call(x, error, rounding), error])
    assert all(map(torch.equal, *results))
