"""Results that go into no gradient, because no rank has used a parameter in a step.

Their messages contained errors of earlier steps, which must then still be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.native.bucket_ops import (
    BUCKET_DTYPES,
    GRADIENT_DTYPES,
    check_dense,
    check_flat,
    check_used,
    span_of,
)

_ROW = 6
_NOTHING = -1


class BucketResult(NamedTuple):
    """A bucket whose result may have parameters that no rank has used.

    Attributes:
        members: the numbers of its parameters.
        memory: the hook's memory of it.
        result: flat.
        sent: for each parameter that this rank did not use, the gradient that it sent nevertheless:
            one of an earlier backward, which stays in place. None for zeros.
    """

    members: Sequence[int]
    memory: BucketMemory | None
    result: Tensor
    sent: Sequence[Tensor | None]


def make_unsent_table(
    bucket_results: Sequence[BucketResult],
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int]]:
    """The arguments of :func:`keep_unsent`.

    Returns:
        Flat tensors of errors; results and gradients with parameters' shapes; and rows of ``_ROW``
        numbers: of a parameter, of its error, its offset there, its number of elements, of its
        result, and of its gradient.
    """
    errors: list[Tensor] = []
    results: list[Tensor] = []
    gradients: list[Tensor] = []
    table: list[int] = []
    for bucket in bucket_results:
        memory = bucket.memory
        places = [] if memory is None else map(memory.locate_error, range(len(bucket.members)))
        found = [(place, *where) for place, where in enumerate(places) if where is not None]
        if memory is None or not found:
            continue
        pieces = memory.layout.views(bucket.result.view(-1))
        for place, error, begin, decay in found:
            if all(error is not other for other in errors):
                errors.append(error)
            which = next(i for i, other in enumerate(errors) if other is error)
            gradient, number = bucket.sent[place], _NOTHING
            if gradient is not None:
                number = len(gradients)
                gradients.append(_decayed(gradient, decay))
            length = memory.layout.lengths[place]
            table += [bucket.members[place], which, begin, length, len(results), number]
            results.append(_decayed(pieces[place], decay))
    return errors, results, gradients, table


def _decayed(tensor: Tensor, decay: float) -> Tensor:
    """The addend of an error that has decayed in this step, with the same decay."""
    return tensor if decay == 1.0 else tensor.to(torch.float32).mul(decay)


def add_unsent_to_errors(
    errors: Sequence[Tensor],
    results: Sequence[Tensor],
    gradients: Sequence[Tensor],
    used: Tensor,
    table: Sequence[int],
) -> None:
    """Add results of parameters that no rank has used to the errors.

    Their gradients are not written, so the content of their messages would be lost: errors of
    earlier steps. Each rank adds them, since they are shares of a mean. Gradients of an earlier
    backward, which were sent again, are not part of them.

    Args:
        errors: flat, float32 or bfloat16. Written.
        results: with parameters' shapes, laid out as in the buckets.
        gradients: with parameters' shapes.
        used: for each parameter, whether any rank has used it.
        table: from :func:`make_unsent_table`.
    """
    is_used = used.tolist()
    for start in range(0, len(table), _ROW):
        number, which, begin, length, source, gradient = table[start : start + _ROW]
        if is_used[number]:
            continue
        result = results[source]
        unsent = torch.empty_strided(
            result.shape, result.stride(), dtype=torch.float32, device=result.device
        )
        unsent.copy_(result)
        if gradient != _NOTHING:
            unsent -= gradients[gradient]
        flat = unsent.as_strided((length,), (1,))
        own = errors[which][begin : begin + length]
        own.add_(flat.nan_to_num_(0.0, 0.0, 0.0)).nan_to_num_()  # the sum may overflow


@torch.library.custom_op("commhook::keep_unsent", mutates_args=("errors",))
def keep_unsent(
    errors: list[Tensor],
    results: list[Tensor],
    gradients: list[Tensor],
    used: Tensor,
    table: list[int],
) -> None:
    """Run :func:`add_unsent_to_errors` as an operator, for compilers.

    It checks its arguments, because anyone may call it.

    Raises:
        TypeError, ValueError: a tensor is of another kind, or the table does not fit.
    """
    op = "keep_unsent"
    check_used(op, used, table[::_ROW], "parameters in table")
    for i, error in enumerate(errors):
        check_flat(op, f"errors[{i}]", error, (torch.float32, torch.bfloat16))
    for name, tensors in (("results", results), ("gradients", gradients)):
        for i, tensor in enumerate(tensors):
            check_dense(op, f"{name}[{i}]", tensor, BUCKET_DTYPES)
    if len(table) % _ROW:
        raise ValueError(
            f"{op}: table must hold rows of {_ROW} numbers, got {len(table)} numbers in all"
        )
    for start in range(0, len(table), _ROW):
        _, which, begin, length, source, gradient = row = table[start : start + _ROW]
        if not (
            0 <= which < len(errors)
            and 0 <= begin <= begin + length <= len(errors[which])
            and 0 <= source < len(results)
            and length == results[source].numel() == (span_of(results[source]) if length else 0)
            and (
                gradient == _NOTHING
                or (
                    0 <= gradient < len(gradients)
                    and gradients[gradient].shape == results[source].shape
                )
            )
        ):
            raise ValueError(
                f"{op}: table must hold rows of a parameter, of its error, where that begins, its "
                f"elements, as many as its result has without gaps, its result, and its gradient "
                f"of the same shape or {_NOTHING}, got {list(row)}"
            )
    add_unsent_to_errors(errors, results, gradients, used, table)


@keep_unsent.register_fake
def _keep_unsent_fake(*arguments: object) -> None:
    return None


@torch.library.custom_op("commhook::without_unused", mutates_args=())
def without_unused(
    result: Tensor, used: Tensor, members: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Copy a bucket's result, with zeros for the parameters that no rank has used.

    Args:
        result: flat.
        used: for each parameter of the model, whether any rank has used it.
        members: the numbers of the bucket's parameters.
        lengths: the number of elements of each.

    Raises:
        TypeError, ValueError: a tensor is of another kind, or lengths do not fit.
    """
    op = "without_unused"
    check_flat(op, "result", result, GRADIENT_DTYPES)
    is_used = check_used(op, used, members, "members")
    if (
        len(lengths) != len(members)
        or any(length < 0 for length in lengths)
        or sum(lengths) != len(result)
    ):
        raise ValueError(
            f"{op}: lengths must be a number for each of {len(members)} members, and add up to the "
            f"{len(result)} elements of result, got {list(lengths)}"
        )
    copied = result.clone()
    for number, piece in zip(members, copied.split(list(lengths)), strict=True):
        if not is_used[number]:
            piece.zero_()
    return copied


@without_unused.register_fake
def _without_unused_fake(
    result: Tensor, used: Tensor, members: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    return torch.empty_like(result)
