"""Orthonormal bases of the spaces that thin factors span."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_commhook.hooks.low_rank.plan import Plan

#: Directions whose length beside those before them is less than this (squared, relative) are left
#: out. The threshold is 100 times the float32 rounding residue of a linearly dependent direction;
#: longer directions come out right in float64.
_SMALLEST = 1e-9


def orthonormalize(left: Tensor, plan: Plan, out: Tensor) -> None:
    """Orthonormal bases of what the left factors span.

    By Gram matrices and elimination (Cholesky's method), twice, in float64. What depends on the
    factors before it is left out: zeros stand in its place. No step waits for values, which may be
    on a device.

    Args:
        left: of ``left_numel`` elements.
        plan: what they are.
        out: written; as ``left``. A matrix whose factor is not finite gets NaN.
    """
    exact = left.to(torch.float64)
    if plan.rank > 1:  # as good as the factor's condition allows
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
    """What makes vectors orthonormal: rows that, times the vectors, are the basis.

    Args:
        gram: the vectors' products with each other, ``(matrices, rank, rank)``, each vector of
            length 1 or 0. Overwritten.
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
