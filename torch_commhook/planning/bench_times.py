"""What hooks compute, as ``commhook bench`` has measured it between ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch_commhook.planning.buckets import bucket_sizes
from torch_commhook.planning.cost import step_seconds
from torch_commhook.planning.link_file import LinkFile
from torch_commhook.planning.measured import Measured
from torch_commhook.process_group.simulated.link import Issued

#: A step in which the wire takes more says too little of the computing.
_MOST_WIRE = 0.5
_HALVINGS = 20
#: A step of a smaller model is mostly what a step takes whatever its size, which does not grow.
_LEAST_ELEMENTS = 1 << 20
#: The row of bench without a hook, and the figure that says how large its model was.
_ALONE, _ELEMENTS = "no communication", "elements"


def with_bench_times(
    measured: Sequence[Measured], file: LinkFile, *, elements: int, world_size: int
) -> list[Measured]:
    """The hooks, with the computing that a file of ``commhook bench`` shows where it fits.

    It fits a hook that was measured there among as many ranks, if less than half of its step was
    the wire. Its computing is what makes the planned step as long as the measured one. A file that
    does not fit all of the hooks counts for none: steps of ranks that share a machine are longer
    than a hook that computes alone, and the two are not to be compared. Neither does a file of a
    model that is small and smaller than this one.

    Args:
        measured: what :func:`torch_commhook.planning.measure` gives for a model.
        file: of ``commhook bench``.
        elements: of the model.
        world_size: its ranks.
    """
    there = file.machine.get(_ELEMENTS)
    if isinstance(there, bool) or not isinstance(there, (int, float)) or not 1 <= there < math.inf:
        return list(measured)
    if file.link is None or file.ranks != world_size:
        return list(measured)
    if there < min(elements, _LEAST_ELEMENTS):
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
    """The same hook on a model that is so many times as large."""

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
    """Seconds that a hook computes in a step that took so long; None where that can't be said."""
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
