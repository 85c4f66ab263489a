"""The operators of ``blockwise``: ``opcheck``, versions, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_commhook.codecs.blockwise import blockwise

commhook = torch.ops.commhook

FORMAT = {"bits": 8, "block_size": 64, "symmetric": True}


def _samples() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    tensors = [torch.randn(5, 30), torch.randn(70)]
    message = torch.zeros(blockwise(block_size=64).nbytes(220), dtype=torch.uint8)
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


def test_versions_move() -> None:
    x, message, error = torch.randn(64), torch.zeros(80, dtype=torch.uint8), torch.zeros(64)
    before = [tensor._version for tensor in (x, message, error)]
    commhook.blockwise_encode([x], message, error=error, **FORMAT)
    assert [tensor._version for tensor in (x, message, error)] == [
        before[0],
        before[1] + 1,
        before[2] + 1,
    ]
    commhook.blockwise_decode(message, [x], **FORMAT)
    assert x._version == before[0] + 1


MESSAGE = torch.zeros(80, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "match"),
    [
        (([], MESSAGE), {}, ValueError, "tensors must hold at least one tensor"),
        (([torch.ones(64).long()], MESSAGE), {}, TypeError, r"tensors\[0\] must be of dtype"),
        (([torch.ones(64)], MESSAGE), {"bits": 5}, ValueError, "bits must be 2, 4 or 8, got 5"),
        (([torch.ones(64)], MESSAGE), {"block_size": 12}, ValueError, "block_size must be a mult"),
        (([torch.ones(64)], MESSAGE), {"bits": 2, "block_size": 24}, ValueError, "multiple of 16"),
        (([torch.ones(64)], MESSAGE), {"block_size": 0}, ValueError, "block_size must be a mult"),
        (([torch.ones(64)], MESSAGE), {"shards": 0}, ValueError, "shards must be at least 1"),
        (([torch.ones(65)], MESSAGE), {}, ValueError, "message must hold 96 bytes, got 80"),
        (([torch.ones(64)], MESSAGE.float()), {}, TypeError, "message must be of dtype uint8"),
        (
            ([torch.ones(64)], torch.zeros(160, dtype=torch.uint8)[::2]),
            {},
            ValueError,
            "message must be contiguous",
        ),
        (
            ([torch.ones(64)], torch.zeros(81, dtype=torch.uint8)[1:]),
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
        commhook.blockwise_encode(*arguments, **{**FORMAT, **keywords})


def test_memory_must_be_apart() -> None:
    memory = torch.zeros(100)
    message = memory.view(torch.uint8)[:80]
    with pytest.raises(ValueError, match=r"message must share no memory with tensors\[0\]"):
        commhook.blockwise_encode([memory[10:74]], message, **FORMAT)
    with pytest.raises(ValueError, match=r"tensors\[0\] must share no memory with message"):
        commhook.blockwise_decode(message, [memory[10:74]], **FORMAT)
    with pytest.raises(ValueError, match=r"error must share no memory with tensors\[0\]"):
        commhook.blockwise_encode([memory[:64]], MESSAGE.clone(), error=memory[36:], **FORMAT)
    with pytest.raises(ValueError, match="must reach each of its elements once"):
        commhook.blockwise_decode(MESSAGE, [torch.ones(1).expand(64)], **FORMAT)
    with pytest.raises(ValueError, match="messages must have two dimensions"):
        commhook.blockwise_reduce(MESSAGE, MESSAGE.clone(), 64, **FORMAT)


def test_rows_without_bytes_are_refused() -> None:
    """Of these there may be so many that all their bytes are a multiple of 2^64."""
    rows = torch.empty(2**60, 0, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"messages must hold 80 bytes in each row, got sizes"):
        commhook.blockwise_reduce(rows, MESSAGE.clone(), 64, **FORMAT)
    with pytest.raises(ValueError, match=r"messages must hold 80 bytes in each row, got sizes"):
        commhook.blockwise_decode_sum(rows, [torch.zeros(64)], **FORMAT)
    with pytest.raises(ValueError, match=r"numel must be at least 0 and at most 2\^60, got"):
        commhook.blockwise_reduce(MESSAGE[None], MESSAGE.clone(), 2**63 - 1, **FORMAT)
