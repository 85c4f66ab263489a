"""Which gradients of a bucket become products of thin factors, and the layout of all parts."""

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
        rows, columns: the shape of each.
        numbers: the numbers of their parameters in the bucket.
        offset: the first matrix's offset in the bucket.
        distance: the distance from one matrix to the next there.
        matrices: the number of matrices in all earlier groups.
        left, right: the first element of their factors in the tensors of all groups.
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
        """The slice of this group's matrices among those of all groups."""
        return slice(self.matrices, self.matrices + len(self))


class Plan:
    """Which gradients of a bucket become products, and the layout of all parts.

    A matrix is a gradient in its memory order: its outermost dimension by all others. This is the
    parameter's first dimension, whether it is row-major or channels_last; for a transposed weight
    it is the second. Matrices of one shape at equal distances form a group, which is a view with
    three dimensions.

    A plan has a text form, which compilers treat as a constant.

    Attributes:
        rank: the number of columns of each factor.
        seed: the seed of the factors' first values.
        numel: the number of elements of the bucket.
        parameters: the number of parameters of the bucket.
        groups: the matrices that are compressed.
        vectors: number, offset and length of the other gradients.
        matrices: the number of matrices in all groups.
        vector_numel, left_numel, right_numel: the number of elements of all vectors and factors.
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
        """Make the plan of a bucket.

        Args:
            layout: the bucket's layout.
            rank: the rank of the products.
            seed: the seed of the factors' first values.
            min_compression_rate: a gradient is compressed if its factors have at least this many
                times fewer elements.
        """
        groups: list[list[Any]] = []
        latest: dict[tuple[int, int], list[Any]] = {}  # for each shape, the group that may grow
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
        """Whether all parts are inside the bucket, and each parameter is one matrix or vector."""
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
        """The compressed parameters' numbers, in the order of the groups."""
        return [number for group in self.groups for number in group.numbers]

    def first_right(self, columns: int) -> Tensor:
        """The initial right factors: float32, ``(rank, columns)``.

        They depend on the seed and the number of columns only.
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
    """The plan of a text."""
    return Plan(text)


def flat_source(sources: Sequence[Tensor]) -> Tensor | None:
    """The bucket's buffer, if ``GradBucket.sources`` returned it; else None."""
    return sources[0] if len(sources) == 1 and sources[0].dim() == 1 else None


def memory_order(size: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions of a dense tensor, the outermost in memory first."""
    return sorted(range(len(size)), key=lambda d: (strides[d], size[d]), reverse=True)
