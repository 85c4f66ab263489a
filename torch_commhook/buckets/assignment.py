"""Assigns parameters to buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

#: As in DDP: a small first bucket, so that communication begins early in backward.
FIRST_BUCKET_BYTES = 1 << 20


def assign_buckets(
    parameters: Sequence[Tensor], sparse: Sequence[bool], capacity_bytes: int
) -> list[list[int]]:
    """Return the indices of the parameters in each bucket, as DDP fills its own.

    Parameters keep the given order, those of one dtype and device together. A bucket is full when
    it reaches its capacity, which for the first is at most 1 MiB. A parameter with a sparse
    gradient has a bucket of its own.
    """
    limits = [min(FIRST_BUCKET_BYTES, capacity_bytes), capacity_bytes]
    return dist._compute_bucket_assignment_by_size(list(parameters), limits, list(sparse))[0]


def split_by_kind(
    parameters: Sequence[Tensor], sparse: Sequence[bool] | None = None
) -> list[list[int]]:
    """Return the indices of parameters that may share a bucket: of one dtype and device each.

    In the given order. A parameter with a sparse gradient is alone.
    """
    kinds: dict[object, list[int]] = {}
    for i, parameter in enumerate(parameters):
        alone = sparse is not None and sparse[i]
        kinds.setdefault(i if alone else (parameter.dtype, parameter.device), []).append(i)
    return list(kinds.values())
