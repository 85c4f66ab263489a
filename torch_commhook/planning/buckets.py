"""The sizes of a model's buckets."""

from __future__ import annotations

from collections.abc import Sequence

#: DDP's capacities, in MiB: of the first bucket to be full, and of all others.
BUCKET_CAPS_MB = (1.0, 25.0)
_NUMBER_BYTES = 4  # gradients in float32
_MOST_BUCKETS = 10_000  # more make no difference to a prediction


def bucket_sizes(elements: int, bucket_cap_mb: Sequence[float] = BUCKET_CAPS_MB) -> list[int]:
    """The elements of each bucket of a model with float32 gradients, in the order of a backward.

    Args:
        elements: the number of the model's elements.
        bucket_cap_mb: the capacity of each bucket, in MiB; the last one counts for all others.
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
    """The elements of each bucket. A bucket is full once it reaches its capacity, as in DDP.

    Args:
        numels: the elements of each parameter, in the order of a backward.
        bucket_cap_mb: as for :func:`bucket_sizes`.
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
    """The capacities in elements."""
    return [max(1, int(cap * (1 << 20)) // _NUMBER_BYTES) for cap in bucket_cap_mb]
