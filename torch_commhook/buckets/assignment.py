"""Which parameters share a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

#: As in DDP: a small first bucket, so that communication begins early in backward.
FIRST_BUCKET_BYTES = 1 << 20


def assign_buckets(
    parameters: Sequence[Tensor], sparse: Sequence[bool], capacity_bytes: int
) -> list[list[int]]:
    """Indices of the parameters in each bucket, as DDP fills its own.

    Parameters come in the order given, those of one dtype and device together; a bucket is full
    once it has reached its capacity, which for the first is at most 1 MiB. A parameter whose
    gradient is sparse has a bucket of its own.
    """
    limits = [min(FIRST_BUCKET_BYTES, capacity_bytes), capacity_bytes]
    return dist._compute_bucket_assignment_by_size(list(parameters), limits, list(sparse))[0]


def split_by_kind(
    parameters: Sequence[Tensor], sparse: Sequence[bool] | None = None
) -> list[list[int]]:
    """Indices of the parameters that may share a bucket: of one dtype and device each.

    In the order given. A parameter whose gradient is sparse is alone.
    """
    kinds: dict[object, list[int]] = {}
    for i, parameter in enumerate(parameters):
        alone = sparse is not None and sparse[i]
        kinds.setdefault(i if alone else (parameter.dtype, parameter.device), []).append(i)
    return list(kinds.values())
