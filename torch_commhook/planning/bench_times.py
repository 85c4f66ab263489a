"""Derives hooks' computing times from the steps that ``commhook bench`` measured between ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch_commhook.planning.buckets import bucket_sizes
from torch_commhook.planning.cost import step_seconds
from torch_commhook.planning.link_file import LinkFile
from torch_commhook.planning.measured import Measured
from torch_commhook.process_group.simulated.link import Issued

#: The largest share of a step on the wire. Above it the step says too little about computing.
_MOST_WIRE = 0.5
_HALVINGS = 20
#: A smaller model's step is mostly fixed costs, which do not grow with the model.
_LEAST_ELEMENTS = 1 << 20
#: The name of bench's row without a hook, and the key of its model's number of elements.
_ALONE, _ELEMENTS = "no communication", "elements"


def with_bench_times(
    measured: Sequence[Measured], file: LinkFile, *, elements: int, world_size: int
) -> list[Measured]:
    """The hooks with the computing times of a ``commhook bench`` file, if it fits all of them.

    The file fits a hook if it has a step of the hook among the same number of ranks, with less than
    half of the step on the wire. The hook's computing time is the one with which the planned step
    is as long as the measured one. If the file does not fit one of the hooks, all keep their times:
    ranks that share a machine slow each other, so the two kinds of times do not compare. A file of
    a model that is small, and smaller than this one, fits no hook.

    Args:
        measured: the figures of :func:`torch_commhook.planning.measure` for a model.
        file: a file of ``commhook bench``.
        elements: the number of the model's elements.
        world_size: the number of its ranks.
    """
    there = file.machine.get(_ELEMENTS)
    if isinstance(there, bool) or not isinstance(there, (int, float)) or not 1 <= there < math.inf:
        return list(measured)
    if file.link is None or file.ranks != world_size or there < min(elements, _LEAST_ELEMENTS):
        return list(measured)
    seconds = {each.hook: each.seconds for each in file.hooks}
    alone = seconds.get(_ALONE, 0.0)
    scale = there / elements
    found = []
    for each in measured:
        took = seconds.get(each.hook)
        own = None if took is None else _computing(_scaled(each, scale), took, alone, file, there)
        if own is None:
            return list(measured)
        found.append(replace(each, compute_seconds=own / scale))
    return found


def _scaled(measured: Measured, factor: float) -> Measured:
    """The figures of the same hook on a model that is ``factor`` times as large."""

    def of(chain: Sequence[Issued]) -> tuple[Issued, ...]:
        return tuple(each.scaled(factor) for each in chain)

    return replace(
        measured,
        bytes_sent=measured.bytes_sent * factor,
        issued=of(measured.issued),
        beside=tuple(of(chain) for chain in measured.beside),
    )


def _computing(
    measured: Measured, took: float, alone: float, file: LinkFile, elements: float
) -> float | None:
    """Seconds that a hook computes in a step of ``took`` seconds; None if the step cannot tell."""
    assert file.link is not None
    link, buckets = file.link, bucket_sizes(round(elements))

    def planned(seconds: float) -> float:
        return step_seconds(
            replace(measured, compute_seconds=seconds),
            bits_per_second=link.bits_per_second,
            compute_seconds=alone,
            buckets=buckets,
            delay_seconds=link.delay_seconds,
        )

    if planned(0.0) - alone > _MOST_WIRE * took or planned(0.0) > took:
        return None
    least, most = 0.0, took
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (middle, most) if planned(middle) < took else (least, middle)
    return (least + most) / 2
