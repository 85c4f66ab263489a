"""A parameter that is divided into shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of which each rank has a shard.

    Attributes:
        name: its name in the model.
        shape: the shape of the whole parameter.
        dim: the dimension along which it is divided.
        shards: the number of shards.
        dtype: its gradient's dtype.
        device: its gradient's device.
    """

    name: str
    shape: torch.Size
    dim: int
    shards: int
    dtype: torch.dtype
    device: torch.device

    @property
    def shard_shape(self) -> torch.Size:
        """The shape of each shard, with its padding."""
        shape = list(self.shape)
        shape[self.dim] = -(-shape[self.dim] // self.shards)
        return torch.Size(shape)

    def rows_of(self, rank: int) -> int:
        """The number of a shard's rows that belong to the parameter: the rest is padding."""
        rows = self.shard_shape[self.dim]
        return max(min(self.shape[self.dim] - rank * rows, rows), 0)

    def stand_ins(self) -> list[Tensor]:
        """For each rank a placeholder with its shard's form, which takes no memory."""
        one = torch.empty((), dtype=self.dtype, device=self.device)
        return [one.expand(self.shard_shape) for _ in range(self.shards)]

    def whole(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole tensor of its shards' tensors."""
        return torch.cat(list(pieces), dim=self.dim).narrow(self.dim, 0, self.shape[self.dim])

    def pieces(self, whole: Tensor) -> list[Tensor]:
        """The inverse of :meth:`whole`, with zeros in the padding."""
        rows = self.shard_shape[self.dim]
        missing = rows * self.shards - self.shape[self.dim]
        shape = list(self.shape)
        shape[self.dim] = missing
        padded = torch.cat([whole, whole.new_zeros(shape)], dim=self.dim)
        return [piece.contiguous() for piece in padded.split(rows, dim=self.dim)]
