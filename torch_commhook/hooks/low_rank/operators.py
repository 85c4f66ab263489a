"""The steps of PowerSGD as operators: compiled code runs the kernels of eager, with its bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.hooks.low_rank.plan import Plan, flat_source, plan_of
from torch_commhook.hooks.low_rank.steps import left_factors, restore, right_factors
from torch_commhook.native.bucket_ops import BUCKET_DTYPES
from torch_commhook.native.tensor_checks import check_dense, check_flat

# The operators of csrc/ops/low_rank return no values; compilers see only the three steps below.


@torch.library.register_fake("commhook::low_rank_left")
def _left_fake(matrices: Tensor, right: Tensor, left: Tensor) -> None: ...


@torch.library.register_fake("commhook::low_rank_gather_left")
def _gather_left_fake(
    gradients: Sequence[Tensor],
    matrices: Tensor,
    right: Tensor,
    left: Tensor,
    *,
    adds: bool = False,
) -> None: ...


@torch.library.register_fake("commhook::low_rank_right")
def _right_fake(matrices: Tensor, left: Tensor, right: Tensor) -> None: ...


@torch.library.register_fake("commhook::low_rank_right_error")
def _right_error_fake(matrices: Tensor, left: Tensor, right: Tensor) -> None: ...


@torch.library.register_fake("commhook::low_rank_product")
def _product_fake(left: Tensor, right: Tensor, matrices: Tensor) -> None: ...


_DTYPES = (torch.float32, torch.float64)


def _checked_plan(op: str, text: str) -> Plan:
    """The plan of a text.

    Raises:
        ValueError: the text is not a plan, or a part exceeds the bucket.
    """
    try:
        plan = plan_of(text)
        fits = plan.fits
    except (TypeError, ValueError) as error:  # also json's errors
        raise ValueError(f"{op}: plan must be the text of a Plan, got {text[:100]!r}") from error
    if not fits:
        raise ValueError(f"{op}: plan must fit its bucket, got {text[:100]!r}")
    return plan


def _check_factors(op: str, plan: Plan, work: Tensor, **others: tuple[Tensor, int]) -> None:
    """Refuse tensors that are not flat, of a factor's dtype, and of the plan's length."""
    check_flat(op, "work", work, _DTYPES, plan.numel)
    for name, (tensor, numel) in others.items():
        check_flat(op, name, tensor, (work.dtype,), numel)


def _check_sources(op: str, plan: Plan, sources: Sequence[Tensor]) -> None:
    for i, source in enumerate(sources):
        check_dense(op, f"sources[{i}]", source, BUCKET_DTYPES)
    if flat_source(sources) is not None and len(sources[0]) == plan.numel:
        return
    lengths = {number: length for number, _, length in plan.vectors}
    for group in plan.groups:
        lengths |= dict.fromkeys(group.numbers, group.rows * group.columns)
    found = [source.numel() for source in sources]
    if found != [lengths[number] for number in range(plan.parameters)]:
        raise ValueError(
            f"{op}: sources must be the bucket's buffer of {plan.numel} elements or the plan's "
            f"{plan.parameters} gradients, got tensors of {found} elements"
        )


@torch.library.custom_op("commhook::powersgd_left", mutates_args=("work",))
def powersgd_left(
    sources: list[Tensor], work: Tensor, q: Tensor, plan: str, scale: float, adds: bool
) -> Tensor:
    """Run :func:`left_factors`; returns the wire tensor."""
    found = _checked_plan("powersgd_left", plan)
    _check_sources("powersgd_left", found, sources)
    _check_factors("powersgd_left", found, work, q=(q, found.right_numel))
    wire = q.new_empty(found.vector_numel + found.left_numel)
    left_factors(sources, work, q, found, wire, scale=scale, adds=adds)
    return wire


@powersgd_left.register_fake
def _powersgd_left_fake(
    sources: list[Tensor], work: Tensor, q: Tensor, plan: str, scale: float, adds: bool
) -> Tensor:
    found = plan_of(plan)
    return q.new_empty(found.vector_numel + found.left_numel)


@torch.library.custom_op("commhook::powersgd_right", mutates_args=("work",))
def powersgd_right(
    work: Tensor, wire: Tensor, plan: str, scale: float, keeps_error: bool
) -> tuple[Tensor, Tensor]:
    """Run :func:`right_factors`; returns P and the wire tensor."""
    found = _checked_plan("powersgd_right", plan)
    _check_factors(
        "powersgd_right", found, work, wire=(wire, found.vector_numel + found.left_numel)
    )
    left, right = work.new_empty(found.left_numel), work.new_empty(found.right_numel)
    right_factors(work, wire, found, left, right, scale=scale, keeps_error=keeps_error)
    return left, right


@powersgd_right.register_fake
def _powersgd_right_fake(
    work: Tensor, wire: Tensor, plan: str, scale: float, keeps_error: bool
) -> tuple[Tensor, Tensor]:
    found = plan_of(plan)
    return work.new_empty(found.left_numel), work.new_empty(found.right_numel)


@torch.library.custom_op("commhook::powersgd_restore", mutates_args=("q", "work"))
def powersgd_restore(
    q: Tensor,
    work: Tensor,
    wire: Tensor,
    left: Tensor,
    right: Tensor,
    plan: str,
    keeps_error: bool,
) -> Tensor:
    """Run :func:`restore`; returns the bucket's average."""
    found = _checked_plan("powersgd_restore", plan)
    _check_factors(
        "powersgd_restore",
        found,
        work,
        q=(q, found.right_numel),
        wire=(wire, found.vector_numel + found.left_numel),
        left=(left, found.left_numel),
        right=(right, found.right_numel),
    )
    result = q.new_empty(found.numel)
    restore(q, work, wire, left, right, found, result, keeps_error=keeps_error)
    return result


@powersgd_restore.register_fake
def _powersgd_restore_fake(
    q: Tensor,
    work: Tensor,
    wire: Tensor,
    left: Tensor,
    right: Tensor,
    plan: str,
    keeps_error: bool,
) -> Tensor:
    return q.new_empty(plan_of(plan).numel)
