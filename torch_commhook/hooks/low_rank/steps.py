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
    """Gather the matrices M, and write what all ranks are to add up: vectors, and P = M Q.

    Args:
        sources: the gradients, or the bucket's buffer.
        work: written: the matrices. Of ``numel`` elements, in float32 or float64, as all others.
            It may be the bucket's buffer, where nothing is added: that is left as it is.
        q: the right factors.
        wire: written: ``vector_numel`` elements, and ``left_numel`` ones.
        scale: factor of all that is on the wire.
        adds: whether gradients are added to what is in ``work``. Vectors are, too, and leave zeros
            there.
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
    """Make P orthonormal, and write what all ranks are to add up then: Q = M' P.

    Args:
        work: the matrices; where errors are kept, what the product leaves of them is written there.
        wire: what :func:`left_factors` has written, added up.
        left: written: P, orthonormal. Of ``left_numel`` elements. Zeros for directions that the
            matrix does not have; NaN for a matrix that is not finite.
        right: written; of ``right_numel`` elements. Where errors are kept, NaN for elements so
            large that what the product leaves may be infinite.
        scale: factor of what is on the wire.
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
        q: written: the right factors, each of length 1. Those that have none, or are not finite,
            stay as they are where the whole matrix is so, and begin anew where others are.
        work: where errors are kept: emptied for matrices that are not finite.
        wire: what all ranks' :func:`left_factors` add up to; its vectors are the result's.
        left: P, orthonormal.
        right: what all ranks' :func:`right_factors` add up to.
        result: written; of ``numel`` elements.
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
    """Zeros in some of the matrices."""
    if has_streams(stack.device):
        stack.masked_fill_(which, 0.0)  # asking whether there are some would wait for the device
    elif which.any():
        stack[which.view(-1)] = 0.0
