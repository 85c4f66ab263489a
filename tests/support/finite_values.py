"""Counts for check_finite, and tensors with infinite and NaN values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")


def new_count() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def spoil(tensor: Tensor) -> Tensor:
    """Sets some elements to NaN and infinity, also in tensors with elements that share memory."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    storage[::5], storage[1::7], storage[3::11] = NAN, INF, -INF
    return tensor


def of(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **{"dtype": torch.int64, **options})
