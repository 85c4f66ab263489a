"""Sizes from which kernels write past the caches, and memory in tensors of odd lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

#: Lengths that end anywhere in a cache line; some are shorter than one.
ODD_LENGTHS = (1, 7, 70_001, 3, 64, 33, 130_003, 0, 15, 16, 17, 5000)


def cache_bytes() -> int:
    """The size from which on destinations are streamed (csrc/ops/bucket/bucket_cpu.cpp)."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
    except OSError:
        return 32 << 20
    return int(size.removesuffix("K")) << 10


#: Buffers that exceed such a cache take too much time and memory.
not_beyond_a_large_cache = pytest.mark.skipif(
    cache_bytes() > 128 << 20, reason="the last-level cache is larger than 128 MiB"
)


def split(memory: torch.Tensor) -> list[torch.Tensor]:
    """Splits memory into many tensors of odd lengths and one large tensor."""
    rest = memory.numel() - sum(ODD_LENGTHS)
    return list(memory.split([*ODD_LENGTHS[:6], rest, *ODD_LENGTHS[6:]]))
