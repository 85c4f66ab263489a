"""The three steps of PowerSGD between its collectives, on the matrices of a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.collectives.streams import has_streams
from torch_commhook.hooks.low_rank.orthonormal import orthonormalize
from torch_commhook.hooks.low_rank.plan import Plan, flat_source
from torch_commhook.native.bucket_ops import flatten, unflatten_into

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
        stack, p, average = (
            plan.stack(result, group),
            plan.left(left, group),
            plan.right(right, group),
        )
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
