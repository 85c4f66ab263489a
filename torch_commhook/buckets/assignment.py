"""Assigns parameters to buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.buckets.layout import gradient_dtype

#: As in DDP: a small first bucket, so that communication begins early in backward.
FIRST_BUCKET_BYTES = 1 << 20


def assign_buckets(
    parameters: Sequence[Tensor], sparse: Sequence[bool], capacity_bytes: int
) -> list[list[int]]:
    """Return the indices of the parameters in each bucket, as DDP fills its own.

    Parameters keep the given order, those with gradients of one dtype and device together. A bucket
    is full when it reaches its capacity, which for the first is at most 1 MiB. A parameter with a
    sparse gradient has a bucket of its own.
    """
    limits = [min(FIRST_BUCKET_BYTES, capacity_bytes), capacity_bytes]
    gradients = [_like_gradient(parameter) for parameter in parameters]
    return dist._compute_bucket_assignment_by_size(gradients, limits, list(sparse))[0]


def _like_gradient(parameter: Tensor) -> Tensor:
    """A tensor with the size and dtype of a parameter's gradient, without memory of its own."""
    dtype = gradient_dtype(parameter)
    if dtype == parameter.dtype:
        return parameter
    return torch.empty((), dtype=dtype, device=parameter.device).expand(parameter.shape)


def split_by_kind(
    parameters: Sequence[Tensor], sparse: Sequence[bool] | None = None
) -> list[list[int]]:
    """Return the indices of parameters whose gradients have one dtype and device each.

    In the given order. A parameter with a sparse gradient is alone.
    """
    kinds: dict[object, list[int]] = {}
    for i, parameter in enumerate(parameters):
        alone = sparse is not None and sparse[i]
        kind = gradient_dtype(parameter), parameter.device
        kinds.setdefault(i if alone else kind, []).append(i)
    return list(kinds.values())
