"""Where the messages of block codecs have what, in C++ and in Python, beside rules written here."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from codec_examples import encode, encode_chunks, rounding_for
from cpp_compiler import NoCompilerError, build_once, cpp_compiler
from repository import ROOT
from torch import Tensor

from torch_commhook import codecs
from torch_commhook.codecs.block_codec import BlockCodec, BlockForm

SEGMENTS = range(1, 18)
BLOCK_SIZES = [8, 16, 24, 32, 64, 72, 128, 200, 256, 1000, 1024, 4096]
BITS = [1, 2, 4, 8]


def filled_up(nbytes: int) -> int:
    """To a multiple of 16 bytes."""
    return -(-nbytes // 16) * 16


class Region(NamedTuple):
    """A segment: its first block and elements, its places in the message, the bytes without use."""

    first_block: int
    first_element: int
    end: int
    offset: int
    parameters: int  # from the offset on
    nbytes: int
    codes_end: int
    parameters_begin: int
    parameters_end: int
    segment_end: int


def regions(form: BlockForm, numel: int, segments: int) -> list[Region]:
    """The rules, one segment after another."""
    size = form.block_size
    blocks = -(-numel // size)
    found, offset = [], 0
    for segment in range(segments):
        first, last = blocks * segment // segments, blocks * (segment + 1) // segments
        begin, end = min(numel, first * size), min(numel, last * size)
        codes = -(-(end - begin) * form.bits // 8)
        parameters = filled_up(codes)
        described = parameters + 4 * form.parameters * (last - first)
        nbytes = filled_up(described)
        places = [offset + each for each in (codes, parameters, described, nbytes)]
        found.append(Region(first, begin, end, offset, parameters, nbytes, *places))
        offset += nbytes
    return found


def numels(size: int) -> list[int]:
    edges = {0, 1, size - 1, size, size + 1, 3 * size, 7 * size - 3, 16 * size, 17 * size + 1}
    return sorted(edges | {7919, 100_003})


def layouts(size: int) -> Iterator[tuple[BlockForm, int, int]]:
    """Forms with blocks of this size, numbers of values, and of segments."""
    for bits, parameters in itertools.product(BITS, [1, 2]):
        if size * bits % 32 == 0:  # a block has whole words of codes
            for numel, segments in itertools.product(numels(size), SEGMENTS):
                yield BlockForm(size, bits, parameters), numel, segments


@pytest.fixture(scope="module")
def kernels() -> Any:
    """The layout of csrc/ops/codecs/block_layout.h."""
    source = Path(__file__).with_suffix(".cpp")
    try:
        compiler = cpp_compiler()
    except NoCompilerError as error:
        pytest.skip(str(error))
    flags = ["-std=c++20", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    headers = [ROOT / "csrc/ops/codecs/block_layout.h", ROOT / "csrc/ops/host_device.h"]
    path = build_once("block_layout.so", [*compiler, *flags, str(source)], [source, *headers])
    library = ctypes.CDLL(str(path))
    for function in (library.shard_fields, library.shards_of, library.shard_of_block):
        function.restype = ctypes.c_int64
    return library


def of_kernels(
    kernels: Any, form: BlockForm, numel: int, segments: int
) -> tuple[list[Region], int]:
    width = kernels.shard_fields()
    fields = (ctypes.c_int64 * (width * segments))()
    settings = (form.block_size, form.bits, form.parameters, numel, segments)
    nbytes = kernels.shards_of(*(ctypes.c_int64(each) for each in settings), fields)
    rows = [fields[width * segment : width * (segment + 1)] for segment in range(segments)]
    return [Region(*row) for row in rows], nbytes


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_the_places_of_the_kernels(kernels: Any, size: int) -> None:
    """Loads of 16 bytes are aligned: in segments, in messages behind each other, and in chunks."""
    for form, numel, segments in layouts(size):
        right = regions(form, numel, segments)
        got, nbytes = of_kernels(kernels, form, numel, segments)
        assert got == right, (form, numel, segments)
        assert nbytes == sum(each.nbytes for each in right), (form, numel, segments)
        for each in got:
            assert each.offset % 16 == each.parameters % 16 == each.nbytes % 16 == 0
            count = each.end - each.first_element
            alone = of_kernels(kernels, form, count, 1)[1]
            assert alone == each.nbytes  # each segment is a message
            unused = each.parameters_begin - each.codes_end + each.segment_end - each.parameters_end
            # At most 15 bytes after codes, and 12 after parameters, which fill up 4 already.
            assert 0 <= unused <= (27 if count else 0)


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_the_bytes_in_python(size: int) -> None:
    for form, numel, segments in layouts(size):
        found = regions(form, numel, segments)
        right = [(each.end - each.first_element, each.nbytes) for each in found]
        assert form.segments("op", numel, segments) == right, (form, numel, segments)
        assert form.nbytes(numel, segments) == sum(nbytes for _, nbytes in right)


def test_the_segment_of_a_block(kernels: Any) -> None:
    for numel, segments in itertools.product(numels(64), SEGMENTS):
        for segment, region in enumerate(regions(BlockForm(64, 8, 1), numel, segments)):
            for block in range(region.first_block, -(-region.end // 64)):
                arguments = [ctypes.c_int64(each) for each in (64, numel, segments, block)]
                assert kernels.shard_of_block(*arguments) == segment, (numel, segments, block)


# ---- messages ------------------------------------------------------------------------------------

EXAMPLES = {
    repr(codec): codec
    for kind in codecs.CODECS.values()
    for codec in kind.examples()
    if isinstance(codec, BlockCodec)
}


def codes_of(codec: BlockCodec, packed: Tensor, count: int) -> Tensor:
    """A block's codes: that of value ``k * width + c`` is in byte c, at bit ``k * bits``."""
    bits = codec._form.bits
    pieces = [packed >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.cat(pieces)[:count].to(torch.int32)


def restored(codec: BlockCodec, codes: Tensor, parameters: Tensor) -> Tensor:
    """A block's values from its codes and parameters, as the codecs' documents say."""
    settings = codec._settings
    if codec._name == "sign":
        return torch.where(codes == 1, -parameters[0], parameters[0])
    if codec._name == "fp8":
        kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[settings["format"]]
        return codes.to(torch.uint8).view(kind).float() * parameters[0]
    if settings["symmetric"]:
        half = 1 << (settings["bits"] - 1)
        return ((codes ^ half) - half).float() * parameters[0]
    return parameters[1] + codes.float() * parameters[0]


def read_message(codec: BlockCodec, message: Tensor, numel: int, segments: int) -> Tensor:
    """The values of a message, read block by block; what fills it up must be zeros."""
    form, values = codec._form, []
    for region in regions(form, numel, segments):
        for begin, end in (region[6:8], region[8:10]):
            assert not message[begin:end].any(), (numel, segments, region)
        floats = (
            message[region.parameters_begin : region.parameters_end].clone().view(torch.float32)
        )
        codes = message[region.offset : region.codes_end]
        width = form.block_size * form.bits // 8
        count = region.end - region.first_element
        for number, packed in enumerate(codes.split(width) if count else []):
            parameters = floats[form.parameters * number : form.parameters * (number + 1)]
            size = min(form.block_size, count - number * form.block_size)
            values.append(restored(codec, codes_of(codec, packed, size), parameters))
    return torch.cat(values) if values else torch.empty(0)


@pytest.mark.parametrize("codec", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("fill", [0x55, 0xAA])
def test_a_message_is_as_the_rules_say(codec: BlockCodec, fill: int) -> None:
    """Decoding gives what the bytes at these places mean, and bytes without use are zeros."""
    size = codec._form.block_size
    for numel, segments in itertools.product(
        [0, 1, size - 1, size, 7919, 25_000], [1, 2, 3, 8, 17]
    ):
        message = torch.full((codec.nbytes(numel, segments),), fill, dtype=torch.uint8)
        codec.encode([torch.randn(numel)], message, segments=segments, rounding=rounding_for(codec))
        right, out = read_message(codec, message, numel, segments), torch.empty(numel)
        codec.decode(message, [out], segments=segments)
        assert torch.equal(out, right), (numel, segments)


@pytest.mark.parametrize("codec", EXAMPLES.values(), ids=EXAMPLES)
def test_sums_and_chunks_are_filled_with_zeros(codec: BlockCodec) -> None:
    rounding = rounding_for(codec)
    for numel in (1, codec._form.block_size + 5, 7919):
        x = torch.randn(numel)
        message = encode(codec, [x])
        total = torch.full_like(message, 0xAA)
        codec.reduce(torch.stack([message, message]), total, numel, rounding=rounding)
        read_message(codec, total, numel, 1)
        sizes = [numel, 0, 1, numel - 1]
        nbytes = [part.nbytes for part in codec.chunks(sizes)]
        chunks = encode_chunks(codec, [torch.cat([x, x])], sizes)
        for own, part in zip(sizes, chunks.split(nbytes), strict=True):
            read_message(codec, part, own, 1)


def test_bytes_without_use_are_not_read() -> None:
    codec = codecs.CODECS["blockwise"](bits=4)
    out, again = torch.empty(2000), torch.empty(2000)
    message = encode(codec, [torch.randn(2000)], segments=3)
    codec.decode(message, [out], segments=3)
    for region in regions(codec._form, 2000, 3):
        message[region.codes_end : region.parameters_begin] = 0xFF
        message[region.parameters_end : region.segment_end] = 0xFF
    codec.decode(message, [again], segments=3)
    assert torch.equal(out, again)
