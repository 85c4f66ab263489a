"""Which gradients of a bucket become products of thin factors, and where everything lies."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_commhook.buckets.layout import BucketLayout


@dataclass(frozen=True)
class MatrixGroup:
    """Matrices of one shape, at equal distances in their bucket.

    Attributes:
        rows, columns: of each.
        numbers: of their parameters in the bucket.
        offset: of the first in the bucket.
        distance: from one to the next there.
        matrices: before the first of them, in all groups before.
        left, right: the first element of their factors among those of all groups.
    """

    rows: int
    columns: int
    numbers: tuple[int, ...]
    offset: int
    distance: int
    matrices: int
    left: int
    right: int

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def slice(self) -> slice:
        """The matrices among those of all groups."""
        return slice(self.matrices, self.matrices + len(self))


class Plan:
    """Which gradients of a bucket become products, and where everything lies.

    A matrix is what a gradient is in memory: its outermost dimension by all others. That is the
    first dimension of the parameter, whether it is row-major or channels_last; of a transposed
    weight it is the second. Matrices of one shape at equal distances make a group, which is one
    tensor of three dimensions without a copy.

    A plan has a text form, since compilers pass on text as it is.

    Attributes:
        rank: columns of each factor.
        seed: of the factors' first values.
        numel: of the bucket.
        parameters: in the bucket.
        groups: matrices that are compressed.
        vectors: number, offset and length of the other gradients.
        matrices: in all groups.
        vector_numel, left_numel, right_numel: elements of all vectors and factors.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.rank, self.seed, self.numel, groups, vectors = json.loads(text)
        self.vectors: list[tuple[int, int, int]] = [tuple(vector) for vector in vectors]
        self.vector_numel = sum(length for _, _, length in self.vectors)
        self.groups: list[MatrixGroup] = []
        self.matrices = self.left_numel = self.right_numel = 0
        for rows, columns, offset, distance, numbers in groups:
            group = MatrixGroup(
                rows,
                columns,
                tuple(numbers),
                offset,
                distance,
                self.matrices,
                self.left_numel,
                self.right_numel,
            )
            self.groups.append(group)
            self.matrices += len(group)
            self.left_numel += len(group) * self.rank * rows
            self.right_numel += len(group) * self.rank * columns
        self.parameters = self.matrices + len(self.vectors)
        self._fresh: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    @classmethod
    def of(cls, layout: BucketLayout, rank: int, seed: int, min_compression_rate: float) -> Plan:
        """The plan for a bucket.

        Args:
            layout: of the bucket.
            rank: of the products.
            seed: of the factors' first values.
            min_compression_rate: a gradient is compressed where its factors have so many times
                fewer elements.
        """
        groups: list[list[Any]] = []
        latest: dict[tuple[int, int], list[Any]] = {}  # of each shape, the group that may grow
        vectors = []
        for number, (offset, length, size, strides) in enumerate(
            zip(layout.offsets, layout.lengths, layout.sizes, layout.strides, strict=True)
        ):
            rows = size[memory_order(size, strides)[0]] if len(size) > 1 and length else 1
            columns = length // rows
            if not 0 < rank * (rows + columns) * min_compression_rate <= length or len(size) < 2:
                vectors.append((number, offset, length))
                continue
            group = latest.get((rows, columns))
            if group is not None:
                first, distance, numbers = group[2:]
                if distance in (0, offset - first - distance * (len(numbers) - 1)):
                    group[3] = distance or offset - first
                    numbers.append(number)
                    continue
            group = latest[rows, columns] = [rows, columns, offset, 0, [number]]
            groups.append(group)
        return plan_of(json.dumps([rank, seed, layout.numel, groups, vectors]))

    @functools.cached_property
    def fits(self) -> bool:
        """Whether all lies in the bucket, and each parameter is one matrix or vector."""
        ends = [offset + length for _, offset, length in self.vectors]
        starts = [offset for _, offset, length in self.vectors if length >= 0]
        for group in self.groups:
            if min(group.rows, group.columns, len(group)) < 1:
                return False
            starts.append(group.offset)
            last = group.offset + group.distance * (len(group) - 1)
            starts.append(last)
            ends += [end + group.rows * group.columns for end in (group.offset, last)]
        numbers = sorted([*self.numbers, *(number for number, _, _ in self.vectors)])
        return (
            self.rank >= 1
            and len(starts) == len(ends)
            and min(starts, default=0) >= 0
            and max(ends, default=0) <= self.numel
            and numbers == list(range(self.parameters))
        )

    @property
    def numbers(self) -> list[int]:
        """The parameters that are compressed, in the order of the groups."""
        return [number for group in self.groups for number in group.numbers]

    def first_right(self, columns: int) -> Tensor:
        """What right factors of so many columns begin with: float32, ``(rank, columns)``.

        It follows from the seed and the columns alone.
        """
        generator = torch.Generator("cpu").manual_seed((self.seed * 1_000_003 + columns) % 2**63)
        return torch.randn(
            self.rank, columns, generator=generator, dtype=torch.float32, device="cpu"
        )

    def fresh(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """:meth:`first_right` for each group."""
        found = self._fresh.get((dtype, device))
        if found is None:
            found = self._fresh[dtype, device] = [
                self.first_right(group.columns).to(device, dtype) for group in self.groups
            ]
        return found

    # ---- views -----------------------------------------------------------------------------------

    def stack(self, bucket: Tensor, group: MatrixGroup) -> Tensor:
        """A group's matrices in a tensor like the bucket, ``(matrices, rows, columns)``."""
        return bucket.as_strided(
            (len(group), group.rows, group.columns),
            (group.distance, group.columns, 1),
            bucket.storage_offset() + group.offset,
        )

    def left(self, flat: Tensor, group: MatrixGroup) -> Tensor:
        """A group's left factors, of shape ``(matrices, rank, rows)``."""
        length = len(group) * self.rank * group.rows
        return flat.narrow(0, group.left, length).view(len(group), self.rank, group.rows)

    def right(self, flat: Tensor, group: MatrixGroup) -> Tensor:
        """A group's right factors, of shape ``(matrices, rank, columns)``."""
        length = len(group) * self.rank * group.columns
        return flat.narrow(0, group.right, length).view(len(group), self.rank, group.columns)

    def split_vectors(self, bucket: Tensor) -> list[Tensor]:
        """The vectors in a tensor like the bucket."""
        return [bucket.narrow(0, offset, length) for _, offset, length in self.vectors]


@functools.lru_cache(maxsize=1024)
def plan_of(text: str) -> Plan:
    """The plan with a text."""
    return Plan(text)


def flat_source(sources: Sequence[Tensor]) -> Tensor | None:
    """The bucket's buffer, where that is what ``GradBucket.sources`` has given."""
    return sources[0] if len(sources) == 1 and sources[0].dim() == 1 else None


def memory_order(size: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions of a dense tensor, the outermost in memory first."""
    return sorted(range(len(size)), key=lambda d: (strides[d], size[d]), reverse=True)
