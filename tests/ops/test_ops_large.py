"""More elements than 32 bits can count.

Needs 6 GiB of free memory and takes seconds, most of them to get 4 GiB from the system.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torch_commhook.native.bucket_ops as ops
from torch_commhook import _C

PIECE = 1 << 20
PIECES = 2049  # 2^31 elements and one piece
COUNT = PIECES * PIECE
NEEDED = 6 << 30


def available_memory() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


@pytest.fixture(scope="module")
def buffer():
    if available_memory() < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of available memory")
    return torch.empty(COUNT, dtype=torch.bfloat16)


VALUES = torch.arange(PIECE, dtype=torch.float32).remainder_(251)


def test_flatten(buffer):
    ops.flatten([VALUES] * PIECES, out=buffer)  # one tensor many times over needs no memory
    for piece in (0, 1, 2046, 2047, 2048):  # the last lies beyond 2^31
        actual = buffer[piece * PIECE : (piece + 1) * PIECE]
        assert torch.equal(actual, VALUES.bfloat16()), piece


def test_flatten_of_one_strided_tensor(buffer):
    strided = VALUES[::2].expand(2 * PIECES, PIECE // 2)
    assert strided.numel() == COUNT
    ops.flatten([strided], scale=2.0, out=buffer)
    for row in (0, 2047, 4095, 4096, 4097):
        actual = buffer[row * PIECE // 2 : (row + 1) * PIECE // 2]
        assert torch.equal(actual, 2 * VALUES[::2].bfloat16()), row


def test_unflatten_into(buffer):
    # Pages of zeros that are never written take no memory.
    source = torch.from_numpy(np.zeros(COUNT, dtype=np.int16)).view(torch.bfloat16)
    tensors = [buffer[: (1 << 31) + 5].view(1, -1, 1), buffer[(1 << 31) + 5 :]]
    marks = (0, 12_345, (1 << 31) - 1, 1 << 31, (1 << 31) + 4, (1 << 31) + 5, COUNT - 1)
    for mark in marks:
        source[mark] = 1 + mark % 7
    ops.unflatten_into(source, tensors, scale=2.0)
    for mark in marks:
        assert buffer[mark] == 2 * (1 + mark % 7), mark
        assert mark - 1 in (-1, *marks) or buffer[mark - 1] == 0, mark
    assert not buffer[PIECE : 2 * PIECE].any() and not buffer[-PIECE // 2 : -1].any()


# ---- a hint to the system, which must change no value --------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 1000, 1 << 19, (1 << 21) + 7])
@pytest.mark.parametrize("offset", [0, 3])
def test_contents_stay(numel: int, offset: int) -> None:
    whole = torch.arange(float(numel + offset))
    tensor = whole[offset:]
    before = tensor.clone()
    _C.prefer_huge_pages(tensor)
    _C.prefer_huge_pages(tensor)
    assert torch.equal(tensor, before)
    tensor += 1
    assert torch.equal(tensor, before + 1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1 << 20, device="meta"),
        torch.ones(1 << 20)[::2],
        torch.ones(3).to_sparse(),
        torch.frombuffer(bytearray(1 << 22), dtype=torch.uint8),
    ],
    ids=["meta", "strided", "sparse", "foreign"],
)
def test_anything_may_be_given(tensor: torch.Tensor) -> None:
    _C.prefer_huge_pages(tensor)
