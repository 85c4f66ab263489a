"""Block codecs at sizes that they write past the caches, as test_ops_streaming.py has them."""

from __future__ import annotations

import pytest
import torch
from ops_reference import LEVELS, cache_bytes, cpu_level, not_beyond_a_large_cache, split, threads

from torch_commhook.codecs import CODECS, Codec

pytestmark = not_beyond_a_large_cache

EXAMPLES = [
    *(c for name in ("blockwise", "sign", "fp8") for c in CODECS[name].examples()),
    CODECS["blockwise"](bits=4, block_size=128),  # type: ignore[call-arg]
    # of which the parameters take more bytes than the codes
    CODECS["blockwise"](bits=4, block_size=8, symmetric=False),  # type: ignore[call-arg]
]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("codec", EXAMPLES, ids=str)
def test_same_bits_at_any_offset(codec: Codec, shards: int) -> None:
    numel = cache_bytes() // 4 + 12_345
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    values[5], values[numel // 2] = float("nan"), float("inf")
    values[5000:20_000] = 0.0
    rounding = torch.tensor([1, 2]) if codec.is_random else None
    nbytes = codec.nbytes(numel, shards)
    expected: tuple[torch.Tensor, torch.Tensor] | None = None
    for level in LEVELS:
        for offset, count in ((0, 2), (5, 1)):
            memory = torch.full((nbytes + 64,), 7, dtype=torch.uint8)
            message = memory[4 * offset : 4 * offset + nbytes]
            out = torch.full((numel + 7,), 7.0)
            with cpu_level(level), threads(count):
                codec.encode(
                    split(values), message, shards=shards, scale=1 / shards, rounding=rounding
                )
                codec.decode(
                    message, split(out[offset : offset + numel]), shards=shards, rounding=rounding
                )
            assert (memory[: 4 * offset] == 7).all()
            assert (memory[4 * offset + nbytes :] == 7).all()
            assert (out[:offset] == 7).all()
            assert (out[offset + numel :] == 7).all()
            bits = out[offset : offset + numel].view(torch.int32)
            if expected is None:
                expected = message.clone(), bits.clone()
            assert torch.equal(message, expected[0]), (level, offset)
            assert torch.equal(bits, expected[1]), (level, offset)
            if level == "reference":
                break  # slow, and streams nothing
