"""Results that go into no gradient, since no rank has used a parameter in a step.

Their messages have held what was lost of it in earlier steps, which is then still to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.memory import BucketMemory

_ROW = 6


def unsent_table(
    late: Sequence[tuple[Sequence[int], BucketMemory | None, Tensor]],
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """What :func:`keep_unsent` takes.

    Args:
        late: for each bucket the numbers of its parameters, what the hook remembers of it, and the
            result.

    Returns:
        Flat tensors of errors, results, and rows of ``_ROW`` numbers: of a parameter, of its error
        and where that begins, of its result and where that begins, and how many elements it has.
    """
    errors: list[Tensor] = []
    results: list[Tensor] = []
    table: list[int] = []
    for members, memory, result in late:
        places = [] if memory is None else map(memory.place_of_error, range(len(members)))
        found = [
            (place, number, *where)
            for place, (number, where) in enumerate(zip(members, places, strict=False))
            if where is not None
        ]
        if memory is None or not found:
            continue
        results.append(result.view(-1))
        offsets, lengths = memory.layout.offsets, memory.layout.lengths
        for place, number, error, begin in found:
            if all(error is not other for other in errors):
                errors.append(error)
            which = next(i for i, other in enumerate(errors) if other is error)
            table += [number, which, begin, len(results) - 1, offsets[place], lengths[place]]
    return errors, results, table


@torch.library.custom_op("commhook::keep_unsent", mutates_args=("errors",))
def keep_unsent(
    errors: list[Tensor], results: list[Tensor], used: Tensor, table: list[int]
) -> None:
    """Add results to what is remembered as lost, of parameters that no rank has used.

    Their gradients are left alone, so that nothing else knows of what the messages have held for
    them: errors of earlier steps. On each rank, since these are shares of a mean.

    Args:
        errors: flat, float32; written.
        results: flat.
        used: for each parameter, whether any rank has used it.
        table: as :func:`unsent_table` gives it.
    """
    is_used = used.tolist()
    for start in range(0, len(table), _ROW):
        number, which, begin, source, offset, length = table[start : start + _ROW]
        if not is_used[number]:
            result = results[source][offset : offset + length].float()
            errors[which][begin : begin + length] += result.nan_to_num(0.0, 0.0, 0.0)


@keep_unsent.register_fake
def _keep_unsent_fake(
    errors: list[Tensor], results: list[Tensor], used: Tensor, table: list[int]
) -> None:
    return None
