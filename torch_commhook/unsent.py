"""Results that go into no gradient, since no rank has used a parameter in a step.

Their messages have held what was lost of it in earlier steps, which is then still to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_commhook.memory import BucketMemory

_ROW = 6
_NOTHING = -1


class Late(NamedTuple):
    """A bucket whose result may have parameters that no rank has used.

    Attributes:
        members: the numbers of its parameters.
        memory: what the hook remembers of it.
        result: flat.
        sent: for each parameter the gradient that this rank has sent although it did not use it:
            one of an earlier backward, which stays where it is. None for zeros.
    """

    members: Sequence[int]
    memory: BucketMemory | None
    result: Tensor
    sent: Sequence[Tensor | None]


def unsent_table(
    late: Sequence[Late],
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int]]:
    """What :func:`keep_unsent` takes.

    Returns:
        Flat tensors of errors; results and gradients, of parameters' shapes; and rows of ``_ROW``
        numbers: of a parameter, of its error, where that begins, how many elements it has, of its
        result, and of its gradient.
    """
    errors: list[Tensor] = []
    results: list[Tensor] = []
    gradients: list[Tensor] = []
    table: list[int] = []
    for bucket in late:
        memory = bucket.memory
        places = [] if memory is None else map(memory.place_of_error, range(len(bucket.members)))
        found = [(place, *where) for place, where in enumerate(places) if where is not None]
        if memory is None or not found:
            continue
        pieces = memory.layout.views(bucket.result.view(-1))
        for place, error, begin in found:
            if all(error is not other for other in errors):
                errors.append(error)
            which = next(i for i, other in enumerate(errors) if other is error)
            gradient, number = bucket.sent[place], _NOTHING
            if gradient is not None:
                number = len(gradients)
                gradients.append(gradient)
            length = memory.layout.lengths[place]
            table += [bucket.members[place], which, begin, length, len(results), number]
            results.append(pieces[place])
    return errors, results, gradients, table


@torch.library.custom_op("commhook::keep_unsent", mutates_args=("errors",))
def keep_unsent(
    errors: list[Tensor],
    results: list[Tensor],
    gradients: list[Tensor],
    used: Tensor,
    table: list[int],
) -> None:
    """Add results to what is remembered as lost, of parameters that no rank has used.

    Their gradients are left alone, so that nothing else knows of what the messages have held for
    them: errors of earlier steps. On each rank, since these are shares of a mean. Gradients of an
    earlier backward, which were sent again, are no part of it.

    Args:
        errors: flat, float32; written.
        results: of parameters' shapes, laid out as in the buckets.
        gradients: of parameters' shapes.
        used: for each parameter, whether any rank has used it.
        table: as :func:`unsent_table` gives it.
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


@keep_unsent.register_fake
def _keep_unsent_fake(
    errors: list[Tensor],
    results: list[Tensor],
    gradients: list[Tensor],
    used: Tensor,
    table: list[int],
) -> None:
    return None


@torch.library.custom_op("commhook::without_unused", mutates_args=())
def without_unused(
    result: Tensor, used: Tensor, members: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """A copy of a bucket's result, with zeros for the parameters that no rank has used.

    Args:
        result: flat.
        used: for each parameter of the model, whether any rank has used it.
        members: the numbers of the bucket's.
        lengths: how many elements each has.
    """
    is_used = used.tolist()
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
