"""The sizes of a model's buckets."""

from __future__ import annotations

from collections.abc import Sequence

#: DDP's: of the first bucket to be full, and of all that follow.
BUCKET_CAPS_MB = (1.0, 25.0)
_NUMBER_BYTES = 4  # gradients in float32
_MOST_BUCKETS = 10_000  # past which one more makes no difference


def bucket_sizes(elements: int, bucket_cap_mb: Sequence[float] = BUCKET_CAPS_MB) -> list[int]:
    """Elements of each bucket of a model whose gradients are float32, in the order of a backward.

    Args:
        elements: of the model.
        bucket_cap_mb: of each bucket, in MiB; the last is for all that follow.
    """
    caps = _caps(bucket_cap_mb)
    sizes: list[int] = []
    left = elements
    while left > 0:
        size = min(left, caps[min(len(sizes), len(caps) - 1)])
        if len(sizes) >= _MOST_BUCKETS:
            size = left
        sizes.append(size)
        left -= size
    return sizes


def filled_buckets(numels: Sequence[int], bucket_cap_mb: Sequence[float]) -> list[int]:
    """Elements of each bucket, which is full once it has reached its capacity, as DDP's.

    Args:
        numels: elements of each parameter, in the order of a backward.
        bucket_cap_mb: as :func:`bucket_sizes` takes them.
    """
    caps = _caps(bucket_cap_mb)
    sizes: list[int] = []
    size = 0
    for numel in numels:
        size += numel
        is_full = size >= caps[min(len(sizes), len(caps) - 1)]
        if is_full and len(sizes) < _MOST_BUCKETS:
            sizes.append(size)
            size = 0
    return [*sizes, size] if size else sizes


def _caps(bucket_cap_mb: Sequence[float]) -> list[int]:
    """In elements."""
    return [max(1, int(cap * (1 << 20)) // _NUMBER_BYTES) for cap in bucket_cap_mb]
