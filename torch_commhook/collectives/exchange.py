"""Exchanges over Gloo: one message to each rank and one from each, any number of them at once.

A Gloo collective occupies a thread, which waits for its messages; with all threads occupied, other
collectives wait. An exchange has no thread of its own. So a step with many buckets waits for one
round trip instead of several.

A message waits until its receiver has requested it. If the receiver knows early what it will
receive and where (:meth:`Place.expect`), it requests it in advance, and the message takes half a
round trip.

Gloo sends its request for a message on the connection of its own messages, behind them. So the two
directions of an all-to-all of few large messages alternate, and a link carries half of its
capacity. With a second group, messages to higher ranks have their own connections, and their
receivers request them at once. Among many ranks other connections fill the gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.gloo_groups import exchanges_of, is_or_was_gloo
from torch_commhook.spans import sent

#: An exchange has a thread for each other rank, and connects all ranks to each other.
MOST_RANKS = 16
#: The message size from which connections for each direction are faster, among so many ranks.
_LARGE_BYTES = 128 * 1024
MOST_IN_BOTH_DIRECTIONS = 4


def exchanges(group: dist.ProcessGroup) -> bool:
    """Whether a group's ranks exchange messages on the CPU. The same on all of them."""
    return 1 < group.size() <= MOST_RANKS and (is_or_was_gloo(group) or has_places(group))


# Compilers treat the result as a constant.
exchanges._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_places(group: dist.ProcessGroup) -> bool:
    """Whether a group is around a Gloo group, and uses that one's exchanges."""
    return getattr(group, "_commhook_has_places", False)


def takes_turns(group: dist.ProcessGroup, longest: int) -> bool:
    """Whether a second group makes exchanges faster.

    Args:
        group: the group of the exchanges.
        longest: the size of the longest message in bytes, the same on all ranks.
    """
    return longest > _LARGE_BYTES and has_few_ranks(group)


def has_few_ranks(group: dist.ProcessGroup) -> bool:
    """Whether a connection for each direction makes exchanges of large messages faster."""
    return group.size() <= MOST_IN_BOTH_DIRECTIONS


class Place:
    """A position in the order of a group's exchanges, for two consecutive ones.

    All ranks take their places in the same order. The exchanges of places may start in any order
    and on any thread, also Gloo's: a place does not reference the group.

    Args:
        group: the process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._exchanges = exchanges_of(group)
        self._number = self._exchanges.reserve()
        self._rank: int = group.rank()
        #: The expected messages, for the exchange that follows.
        self.memory: Tensor | None = None

    def expect(self, stage: int, outputs: Sequence[Tensor]) -> None:
        """Request each rank's message now, before this rank has its own messages.

        Args:
            stage: the stage of the :meth:`exchange` that follows, unless something fails.
            outputs: the outputs of that exchange, in the same memory. Nothing else may use it until
                that exchange has ended.
        """
        self._exchanges.expect(list(outputs), self._number, stage)

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
            lambda: self._exchanges.start(list(inputs), list(outputs), result, self._number, stage)
        )


def place_in(group: dist.ProcessGroup) -> Place:
    """Take the next place in the order of a group's exchanges."""
    if not has_places(group):
        return Place(group)
    around: Any = group
    place: Place = around._commhook_place()
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
