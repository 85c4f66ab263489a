"""Collectives with places in an order: any number of them at once, started in any order.

They have no threads. So a step with many buckets waits for one round trip instead of several. A
message that comes before its receiver expects it is kept, up to 32 MiB from each rank. A larger one
waits until its receiver has memory for it; if the receiver knows early what it will receive and
where (:meth:`Place.expect`), that costs no time.

Up to :data:`FEW_RANKS` ranks send each other messages directly. Of more ranks, each passes gathered
messages and sums on to a few others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.gloo_groups import (
    backend_of,
    exchanges,
    group_timeout,
    has_places,
)
from torch_commhook.metrics import tensor_bytes
from torch_commhook.spans import sent

__all__ = [
    "FEW_RANKS",
    "FEW_ROUNDS",
    "FIRST",
    "SECOND",
    "Place",
    "bytes_of_sum",
    "exchanges",
    "has_places",
    "is_gathered",
    "place_in",
    "sum_bytes",
    "sums_in_place",
]

#: As ``kFewRanks`` in ``csrc/runtime/wire/patterns.h``, and so are the numbers below.
FEW_RANKS = 16
#: Among few ranks: the most bytes that a rank receives at once to sum a whole tensor itself. For
#: more, each rank sums a shard and sends it to all.
_ONE_ROUND, _ONE_ROUND_OF_TWO = 64 * 1024, 4 << 20
#: Among many: the most bytes for each rank for which few rounds matter more than few bytes.
FEW_ROUNDS = 16 * 1024
#: From this number of bytes on, sums of a user's group are those of its own backend.
_MOST_SUMMED = 4 << 20
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

#: The orders of a group's places: of first and of second stages, of the ends of steps, and of
#: comparisons of settings. Ranks that run in different modes take the places of one after those of
#: another, or between them.
FIRST, SECOND, STEP_END, COMPARISON = range(4)


class Place:
    """A position in an order of a group's collectives.

    All ranks take their places in the same order. What is in them may start in any order and on any
    thread: a place does not reference the group.

    Args:
        group: the process group.
        order: which order; one of the constants above.

    Attributes:
        form: what its messages are, such as a codec's name. If it is another on some rank, all
            ranks get an error.
    """

    def __init__(self, group: dist.ProcessGroup, order: int = FIRST) -> None:
        self.form = ""
        self._exchanges = backend_of(group).exchanges()
        self._timeout = group_timeout(group)
        self._number = self._exchanges.reserve(order)
        #: This process's, in the group.
        self.rank: int = group.rank()

    def expect(self, stage: int, outputs: Sequence[Tensor]) -> None:
        """Give memory to each rank's message, before this rank has its own messages.

        Args:
            stage: the stage of the :meth:`exchange` that follows, unless something fails.
            outputs: the outputs of that exchange, in the same memory. Nothing else may use it until
                that exchange has ended.
        """
        self._exchanges.expect(list(outputs), self._number, stage, self._timeout, self.form)

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
        self._keep(inputs[self.rank], outputs)
        return sent(
            lambda: self._exchanges.start(
                list(inputs), list(outputs), result, self._number, stage, self._timeout, self.form
            )
        )

    def expect_gather(self, outputs: Sequence[Tensor]) -> None:
        """As :meth:`expect`, for the :meth:`gather` that follows."""
        if len(outputs) <= FEW_RANKS:
            self.expect(0, outputs)

    def gather(
        self, own: Tensor, outputs: Sequence[Tensor], result: Tensor
    ) -> torch.futures.Future[Tensor]:
        """Send every rank this rank's message, and receive those of all; once in a place.

        Args:
            own: flat bytes.
            outputs: memory for the message from each rank, flat bytes.
            result: the Future's value.
        """
        if len(outputs) <= FEW_RANKS:
            return self.exchange(0, [own] * len(outputs), outputs, result)
        self._keep(own, outputs)
        return sent(
            lambda: self._exchanges.gather(
                list(outputs), result, self._number, self._timeout, self.form
            )
        )

    def reduce(
        self, tensor: Tensor, *, takes_maximum: bool = False
    ) -> torch.futures.Future[Tensor]:
        """Sum a tensor over the ranks, or take the maximum of each element; once in a place.

        All ranks have the same bits.

        Args:
            tensor: contiguous, of numbers. Written.
            takes_maximum: whether to take the maximum.

        Returns:
            A Future of the same tensor.
        """
        flat = tensor.detach().view(-1)
        return sent(
            lambda: self._exchanges.reduce(flat, takes_maximum, tensor, self._number, self._timeout)
        )

    def _keep(self, own: Tensor, outputs: Sequence[Tensor]) -> None:
        """Copy this rank's own message."""
        if own.data_ptr() != outputs[self.rank].data_ptr():
            outputs[self.rank].copy_(own)


def place_in(group: dist.ProcessGroup, order: int = FIRST, form: str = "") -> Place:
    """Take the next place in an order of a group's collectives."""
    around: Any = group
    place: Place = around._commhook_place(order) if has_places(group) else Place(group, order)
    place.form = form
    return place


# ---- sums ----------------------------------------------------------------------------------------


def sums_in_place(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether sums of a tensor use :meth:`Place.reduce`; the same on all ranks."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype in _DTYPES
        and 0 < tensor_bytes(tensor) <= _MOST_SUMMED
        and exchanges(group)
    )


def is_gathered(nbytes: float, ranks: int) -> bool:
    """Whether each of few ranks receives the tensors of all, of this size each, to sum them."""
    return (ranks - 1) * nbytes <= _ONE_ROUND or (ranks == 2 and nbytes <= _ONE_ROUND_OF_TWO)


def bytes_of_sum(tensor: Tensor, rank: int, ranks: int) -> int:
    """The bytes that a rank sends, and receives, for :meth:`Place.reduce`."""
    nbytes, numel = tensor_bytes(tensor), tensor.numel()
    if ranks > FEW_RANKS or is_gathered(nbytes, ranks):
        return round(sum_bytes(nbytes, ranks))
    own = ((rank + 1) * numel // ranks - rank * numel // ranks) * tensor.element_size()
    return nbytes - own + own * (ranks - 1)


def sum_bytes(nbytes: float, ranks: int) -> float:
    """The mean of :func:`bytes_of_sum` over the ranks."""
    if ranks <= FEW_RANKS and is_gathered(nbytes, ranks):
        return nbytes * (ranks - 1)
    if ranks > FEW_RANKS and nbytes <= FEW_ROUNDS * ranks:
        return nbytes * math.ceil(math.log2(ranks))
    return 2 * nbytes * (ranks - 1) / ranks
