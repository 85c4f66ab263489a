"""Low-rank approximations of a bucket's matrices: the plan, the steps, and the operators."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_commhook.buckets.layout import BucketLayout
from torch_commhook.collectives.futures import has_streams
from torch_commhook.native.bucket_ops import (
    flatten,
    unflatten_into,
)

# ---- which gradients of a bucket become products of thin factors ---------------------------------


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
        wire_numel: the number of elements of vectors and left factors, which are sent together.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.rank, self.seed, self.numel, groups, vectors = json.loads(text)
        self.vectors: list[tuple[int, int, int]] = [tuple(vector) for vector in vectors]
        self.vector_numel = sum(length for _, _, length in self.vectors)
        self.groups: list[MatrixGroup] = []
        self.matrices = self.left_numel = self.right_numel = 0
        for rows, columns, offset, distance, numbers in groups:
            before = self.matrices, self.left_numel, self.right_numel
            group = MatrixGroup(rows, columns, tuple(numbers), offset, distance, *before)
            self.groups.append(group)
            self.matrices += len(group)
            self.left_numel += len(group) * self.rank * rows
            self.right_numel += len(group) * self.rank * columns
        self.wire_numel = self.vector_numel + self.left_numel
        self.parameters = self.matrices + len(self.vectors)
        self._fresh: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    @classmethod
    def of(cls, layout: BucketLayout, rank: int, seed: int, min_compression_rate: float) -> Plan:
        """Make the plan of a bucket.

        A gradient is compressed if its factors have at least ``min_compression_rate`` times fewer
        elements. The other arguments are the attributes.
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


# ---- orthonormal bases of the spaces that thin factors span --------------------------------------


#: A direction is left out if its squared length, relative and after removal of earlier directions,
#: is below this. The threshold is 100 times the float32 rounding residue of a linearly dependent
#: direction. Longer directions are accurate in float64.
_SMALLEST = 1e-9


def orthonormalize(left: Tensor, plan: Plan, out: Tensor) -> None:
    """Write orthonormal bases of the spaces that the left factors span.

    Uses Gram matrices and elimination (Cholesky's method), twice, in float64. A direction that
    depends on earlier ones becomes zeros. No step waits for values on a device. ``left`` and
    ``out`` have ``left_numel`` elements. A matrix with a factor that is not finite gets NaN.
    """
    exact = left.to(torch.float64)
    if plan.rank > 1:  # the first pass is as good as the factor's condition allows
        exact = _orthonormal(exact, plan)
    out.copy_(_orthonormal(exact, plan))


def _orthonormal(left: Tensor, plan: Plan) -> Tensor:
    gram = left.new_empty(plan.matrices, plan.rank, plan.rank)
    for group in plan.groups:
        p = plan.left(left, group)
        torch.bmm(p, p.transpose(1, 2), out=gram[group.slice])
    squares = gram.diagonal(dim1=1, dim2=2)
    inverse = torch.where(squares > 0, squares.rsqrt(), 0.0)
    is_finite = squares.isfinite().all(1)[:, None, None]
    scaled = gram * inverse[:, :, None] * inverse[:, None, :]
    change = _eliminate(scaled) * inverse[:, None, :]
    change = torch.where(is_finite, change, torch.nan)
    result = torch.empty_like(left)
    for group in plan.groups:
        torch.bmm(change[group.slice], plan.left(left, group), out=plan.left(result, group))
    return result


def _eliminate(gram: Tensor) -> Tensor:
    """Matrices that make vectors orthonormal: their rows times the vectors are the basis.

    ``gram`` has the vectors' inner products, ``(matrices, rank, rank)``; each vector has length 1
    or 0. It is overwritten.
    """
    rank = gram.shape[1]
    change = torch.eye(rank, dtype=gram.dtype, device=gram.device).repeat(len(gram), 1, 1)
    for j in range(rank):
        pivot = gram[:, j, j]
        factor = torch.where(pivot > _SMALLEST, pivot.rsqrt(), 0.0)[:, None]
        change[:, j] *= factor
        if j + 1 < rank:
            row = gram[:, j, j + 1 :] * factor
            gram[:, j + 1 :, j + 1 :] -= row[:, :, None] * row[:, None, :]
            change[:, j + 1 :] -= row[:, :, None] * change[:, None, j]
    return change


# ---- the three steps of PowerSGD between its collectives, on the matrices of a bucket ------------


_ops = torch.ops.commhook


def left_factors(
    sources: Sequence[Tensor],
    work: Tensor,
    q: Tensor,
    plan: Plan,
    wire: Tensor,
    *,
    scale: float,
    adds: bool,
) -> None:
    """Gather the matrices M, and write this rank's summands: vectors, and P = M Q.

    Args:
        sources: the gradients, or the bucket's buffer.
        work: the matrices, ``numel`` elements. Written. All tensors are float32 or float64. It may
            be the bucket's buffer if ``adds`` is False; it is then unchanged.
        q: the right factors.
        wire: ``vector_numel`` plus ``left_numel`` elements. Written.
        scale: the factor of all values in ``wire``.
        adds: whether to add the gradients to the contents of ``work``. Vectors are added too, and
            replaced by zeros there.
    """
    flat = flat_source(sources)
    if plan.vectors:
        if flat is None:
            vectors = [sources[number] for number, _, _ in plan.vectors]
        else:
            vectors = plan.split_vectors(flat)
        if adds:
            sums = plan.split_vectors(work)
            shaped = [one.view(vector.shape) for one, vector in zip(sums, vectors, strict=True)]
            torch._foreach_add_(shaped, vectors)
            flatten(sums, scale=scale, out=wire[: plan.vector_numel])
            torch._foreach_zero_(sums)
        else:
            flatten(vectors, scale=scale, out=wire[: plan.vector_numel])
    left = wire[plan.vector_numel :]
    for group in plan.groups:
        stack, p, right = plan.stack(work, group), plan.left(left, group), plan.right(q, group)
        if flat is work:
            _ops.low_rank_left(stack, right, p)
            continue
        if flat is not None:
            matrices = list(plan.stack(flat, group).unbind())
        else:
            shape = (group.rows, group.columns)
            matrices = [sources[i].reshape(shape).contiguous() for i in group.numbers]
        _ops.low_rank_gather_left(matrices, stack, right, p, adds=adds)
    if scale != 1.0:
        left.mul_(scale)


def right_factors(
    work: Tensor,
    wire: Tensor,
    plan: Plan,
    left: Tensor,
    right: Tensor,
    *,
    scale: float,
    keeps_error: bool,
) -> None:
    """Make P orthonormal, and write this rank's next summands: Q = M' P.

    Args:
        work: the matrices. If errors are kept, the product's error is written there.
        wire: the sum over the ranks of :func:`left_factors`.
        left: P, orthonormal, ``left_numel`` elements. Written. Zeros for directions that the matrix
            does not have; NaN for a matrix that is not finite.
        right: ``right_numel`` elements. Written. If errors are kept, NaN for elements so large that
            the product's error may be infinite.
        scale: the factor of the values in ``wire``.
        keeps_error: whether ``work`` is to keep the error.
    """
    orthonormalize(wire[plan.vector_numel :], plan, left)
    for group in plan.groups:
        stack, p, q = plan.stack(work, group), plan.left(left, group), plan.right(right, group)
        (_ops.low_rank_right_error if keeps_error else _ops.low_rank_right)(stack, p, q)
    if keeps_error:
        # Below this, a product changes no value by so much that it overflows.
        limits = torch.finfo(right.dtype)
        right.masked_fill_(right.abs() > limits.max * limits.eps / 8, torch.nan)
    if scale != 1.0:
        right.mul_(scale)


def restore(
    q: Tensor,
    work: Tensor,
    wire: Tensor,
    left: Tensor,
    right: Tensor,
    plan: Plan,
    result: Tensor,
    *,
    keeps_error: bool,
) -> None:
    """Write the bucket's average, and the right factors of the next step.

    Args:
        q: the right factors, each of length 1. Written. A factor without a new direction, or not
            finite, stays if its whole matrix is so; otherwise it restarts.
        work: if errors are kept: matrices that are not finite are set to zero.
        wire: the sum over the ranks of :func:`left_factors`; its vectors are part of the result.
        left: P, orthonormal.
        right: the sum over the ranks of :func:`right_factors`.
        result: ``numel`` elements. Written.
        keeps_error: whether ``work`` keeps the error.
    """
    if plan.vectors:
        unflatten_into(wire[: plan.vector_numel], plan.split_vectors(result))
    for group, first in zip(plan.groups, plan.fresh(q.dtype, q.device), strict=True):
        stack, p = plan.stack(result, group), plan.left(left, group)
        average = plan.right(right, group)
        _ops.low_rank_product(p, average, stack)
        factors = plan.right(q, group)
        lengths = torch.linalg.vector_norm(average, dim=2, keepdim=True, dtype=torch.float64)
        is_finite = lengths.isfinite().all(1, keepdim=True)
        has_any = (lengths > 0).any(1, keepdim=True)
        unit = (average / lengths).to(q.dtype)
        renewed = torch.where(lengths > 0, unit, first)
        factors.copy_(torch.where(is_finite & has_any, renewed, factors))
        if keeps_error:
            _empty(plan.stack(work, group), ~is_finite)


def _empty(stack: Tensor, which: Tensor) -> None:
    """Write zeros to some of the matrices."""
    if has_streams(stack.device):
        stack.masked_fill_(which, 0.0)  # a test whether there are any would wait for the device
    elif which.any():
        stack[which.view(-1)] = 0.0


# The operators of csrc/ops/low_rank return no values.
for _name in ("left", "gather_left", "right", "right_error", "product"):
    torch.library.register_fake(f"commhook::low_rank_{_name}", lambda *_, **__: None)
