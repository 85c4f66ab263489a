"""Exchanges: one message to each rank and one from each, any number of them at once.

An exchange has no thread, and starts in any order. So a step with many buckets waits for one round
trip instead of several. A message that comes before its receiver expects it is kept, up to 32 MiB
from each rank. A larger one waits until its receiver has memory for it; if the receiver knows early
what it will receive and where (:meth:`Place.expect`), that costs no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.gloo_groups import (
    MOST_RANKS,
    backend_of,
    exchanges,
    group_timeout,
    has_places,
)
from torch_commhook.spans import sent

__all__ = [
    "FIRST",
    "MOST_RANKS",
    "SECOND",
    "Place",
    "exchange",
    "exchanges",
    "has_places",
    "place_in",
]


#: The orders of a group's exchanges: of first and of second stages, of the ends of steps, and of
#: comparisons of settings. Ranks that run in different modes take the places of one after those of
#: another, or between them.
FIRST, SECOND, STEP_END, COMPARISON = range(4)


class Place:
    """A position in an order of a group's exchanges, for two consecutive ones.

    All ranks take their places in the same order. The exchanges of places may start in any order
    and on any thread: a place does not reference the group.

    Args:
        group: the process group.
        order: which order; one of the constants above.
    """

    def __init__(self, group: dist.ProcessGroup, order: int = FIRST) -> None:
        self._exchanges = backend_of(group).exchanges()
        self._timeout = group_timeout(group)
        self._number = self._exchanges.reserve(order)
        self._rank: int = group.rank()
        #: The expected messages, for the exchange that follows.
        self.memory: Tensor | None = None

    def expect(self, stage: int, outputs: Sequence[Tensor]) -> None:
        """Give memory to each rank's message, before this rank has its own messages.

        Args:
            stage: the stage of the :meth:`exchange` that follows, unless something fails.
            outputs: the outputs of that exchange, in the same memory. Nothing else may use it until
                that exchange has ended.
        """
        self._exchanges.expect(list(outputs), self._number, stage, self._timeout)

    def exchange(
        self, stage: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor], result: Tensor
    ) -> torch.futures.Future[Tensor]:
        """Send a message to each rank, and receive one from each.

        Args:
            stage: 0 or 1, each once.
            inputs: the message to each rank, flat bytes.
            outputs: memory for the message from each rank, flat bytes.
            result: the Future's value.
        """
        own = inputs[self._rank], outputs[self._rank]
        if own[0].data_ptr() != own[1].data_ptr():
            own[1].copy_(own[0])
        return sent(
            lambda: self._exchanges.start(
                list(inputs), list(outputs), result, self._number, stage, self._timeout
            )
        )


def place_in(group: dist.ProcessGroup, order: int = FIRST) -> Place:
    """Take the next place in an order of a group's exchanges."""
    if not has_places(group):
        return Place(group, order)
    around: Any = group
    place: Place = around._commhook_place(order)
    return place


def exchange(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    result: Tensor,
    group: dist.ProcessGroup,
    place: Place | None = None,
) -> torch.futures.Future[Tensor]:
    """Send a message to each rank, and receive one from each: :meth:`Place.exchange`.

    All ranks issue the same exchanges on a group in the same order, except for those that already
    have a place.
    """
    return (place or place_in(group)).exchange(0, inputs, outputs, result)
