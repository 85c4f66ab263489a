"""Orthonormal bases of the spaces that thin factors span."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_commhook.hooks.low_rank.plan import Plan

#: A direction is left out if its squared length, relative and after removal of earlier directions,
#: is below this. The threshold is 100 times the float32 rounding residue of a linearly dependent
#: direction. Longer directions are accurate in float64.
_SMALLEST = 1e-9


def orthonormalize(left: Tensor, plan: Plan, out: Tensor) -> None:
    """Write orthonormal bases of the spaces that the left factors span.

    Uses Gram matrices and elimination (Cholesky's method), twice, in float64. A direction that
    depends on earlier ones becomes zeros. No step waits for values on a device.

    Args:
        left: the left factors, ``left_numel`` elements.
        plan: their plan.
        out: as ``left``. Written. A matrix with a factor that is not finite gets NaN.
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

    Args:
        gram: the vectors' inner products, ``(matrices, rank, rank)``; each vector has length 1 or
            0. Overwritten.
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
