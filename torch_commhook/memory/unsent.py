"""Results that go into no gradient, because no rank has used a parameter in a step.

Their messages contained errors of earlier steps, which must then still be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_commhook.memory.bucket_memory import BucketMemory

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
    """The arguments of :func:`add_unsent_to_errors`.

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


def without_unused(
    result: Tensor, used: Tensor, members: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Copy a bucket's result, with zeros for the parameters that no rank has used.

    Args:
        result: flat.
        used: for each parameter of the model, whether any rank has used it.
        members: the numbers of the bucket's parameters.
        lengths: the number of elements of each.
    """
    is_used = used.tolist()
    copied = result.clone()
    for number, piece in zip(members, copied.split(list(lengths)), strict=True):
        if not is_used[number]:
            piece.zero_()
    return copied
