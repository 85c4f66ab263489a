"""Float tensors that the buckets of a model share."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Tensors for one call each; afterwards the next call of any bucket reuses them.

    There are as many as buckets that were processed at once. Any thread may take and give.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor of at least ``numel`` elements with undefined contents."""
        try:
            kept = self._free.pop()
        except IndexError:
            kept = None
        if kept is not None and kept.numel() >= numel:
            if kept.dtype == dtype and kept.device == device:
                return kept
        with torch.inference_mode(False):  # otherwise no other call could write to it
            return torch.empty(numel, dtype=dtype, device=device)

    def give(self, tensor: Tensor) -> None:
        """Return a tensor of :meth:`take`, so that others can use it."""
        self._free.append(tensor)
