"""Exchanges over Gloo: a message to each rank and one from each, any number of them at once.

A collective of Gloo has a thread, which waits for its messages; those that have none wait for the
threads of others. An exchange has no thread of its own. So a step with many buckets waits for one
round trip where it would wait for several.

A message waits until its receiver has asked for it. Where the receiver knows early what will come
and where to (:meth:`Place.expect`), it has asked by then, and the message takes half a round trip.

Gloo says that it is ready for a message on the connection on which it sends its own, behind that.
So the two directions of an all-to-all of few large messages take turns, and a link carries half of
what it could. With a second group, messages to higher ranks have connections of their own, and
their receivers ask for them at once. Among many ranks other connections fill the gaps.
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
#: Of a message for which connections in one direction each are faster, among so many ranks.
_LARGE_BYTES = 128 * 1024
MOST_IN_BOTH_DIRECTIONS = 4


def exchanges(group: dist.ProcessGroup) -> bool:
    """Whether a group's ranks exchange messages on the CPU. The same on all of them."""
    return 1 < group.size() <= MOST_RANKS and (is_or_was_gloo(group) or has_places(group))


# Compilers take the result for a constant.
exchanges._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_places(group: dist.ProcessGroup) -> bool:
    """Whether a group stands around one of Gloo's, and has exchanges over that."""
    return getattr(group, "_commhook_has_places", False)


def takes_turns(group: dist.ProcessGroup, longest: int) -> bool:
    """Whether a second group makes exchanges faster.

    Args:
        group: over which they go.
        longest: bytes of the longest message, the same on all ranks.
    """
    return longest > _LARGE_BYTES and has_few_ranks(group)


def has_few_ranks(group: dist.ProcessGroup) -> bool:
    """Whether a connection for each direction makes exchanges of large messages faster."""
    return group.size() <= MOST_IN_BOTH_DIRECTIONS


class Place:
    """A place in the order of a group's exchanges, for two that follow each other.

    All ranks take their places in the same order. What is started in one may be started in any
    order and on any thread, of Gloo's too: a place does not keep the group.

    Args:
        group: the process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._exchanges = exchanges_of(group)
        self._number = self._exchanges.reserve()
        self._rank: int = group.rank()
        #: Where messages are expected, for whoever exchanges them later.
        self.memory: Tensor | None = None

    def expect(self, stage: int, outputs: Sequence[Tensor]) -> None:
        """Ask each rank for its message now, before this rank has its own ones.

        Args:
            stage: of the :meth:`exchange` that follows, unless something fails.
            outputs: as that one will take them, of the same memory. Nobody else uses it from now
                on until that one has ended.
        """
        self._exchanges.expect(list(outputs), self._number, stage)

    def exchange(
        self, stage: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor], result: Tensor
    ) -> torch.futures.Future[Tensor]:
        """Send a message to each rank, and get one from each.

        Args:
            stage: 0 or 1, each once.
            inputs: for each rank what goes there, flat bytes.
            outputs: for each rank where comes what comes from there, flat bytes.
            result: what the Future is to hold.
        """
        own = inputs[self._rank], outputs[self._rank]
        if own[0].data_ptr() != own[1].data_ptr():
            own[1].copy_(own[0])
        return sent(
            lambda: self._exchanges.start(list(inputs), list(outputs), result, self._number, stage)
        )


def place_in(group: dist.ProcessGroup) -> Place:
    """The next place in the order of a group's exchanges."""
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
    """Send a message to each rank, and get one from each: :meth:`Place.exchange`.

    All ranks issue the same exchanges on a group, in the same order, except for those that have a
    place in it already.
    """
    return (place or place_in(group)).exchange(0, inputs, outputs, result)
