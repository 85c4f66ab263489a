"""A parameter that is cut into shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of which each rank has a shard.

    Attributes:
        name: in the model.
        shape: of the whole parameter.
        dim: along which it is cut.
        shards: into how many.
        dtype: of its gradient.
        device: of its gradient.
    """

    name: str
    shape: torch.Size
    dim: int
    shards: int
    dtype: torch.dtype
    device: torch.device

    @property
    def shard_shape(self) -> torch.Size:
        """Of each shard, with its padding."""
        shape = list(self.shape)
        shape[self.dim] = -(-shape[self.dim] // self.shards)
        return torch.Size(shape)

    def rows_of(self, rank: int) -> int:
        """How many of a shard's rows are the parameter's: the rest is padding."""
        rows = self.shard_shape[self.dim]
        return max(min(self.shape[self.dim] - rank * rows, rows), 0)

    def stand_ins(self) -> list[Tensor]:
        """For each rank a tensor of its shard's form, which takes no memory."""
        one = torch.empty((), dtype=self.dtype, device=self.device)
        return [one.expand(self.shard_shape) for _ in range(self.shards)]

    def whole(self, pieces: Sequence[Tensor]) -> Tensor:
        """The parameter's form of what is remembered of its shards."""
        return torch.cat(list(pieces), dim=self.dim).narrow(self.dim, 0, self.shape[self.dim])

    def pieces(self, whole: Tensor) -> list[Tensor]:
        """What :meth:`whole` was made of, zeros in the padding."""
        rows = self.shard_shape[self.dim]
        missing = rows * self.shards - self.shape[self.dim]
        shape = list(self.shape)
        shape[self.dim] = missing
        padded = torch.cat([whole, whole.new_zeros(shape)], dim=self.dim)
        return [piece.contiguous() for piece in padded.split(rows, dim=self.dim)]
