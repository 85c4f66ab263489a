"""The agreement of a group's ranks at the end of a step, over Gloo.

Each rank tells all others that its part succeeded. Each has requested these messages when the step
began, so they take half a round trip. Many ranks send in rounds; in each round a rank hears from
four times as many (dissemination). A failed rank closes its connections, which ends the others'
wait. The maps of used parameters follow only if each rank left some unused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.collectives.exchange import (
    Place,
    exchange,
    exchanges,
    has_places,
    place_in,
)
from torch_commhook.collectives.gloo_backend import rounds_among_many
from torch_commhook.collectives.gloo_groups import finish_messages

#: With more ranks, a message to each of the others takes longer than several round trips.
_MOST_AT_ONCE = 16
# The tags of exchanges begin above.
_TAG = (1 << 30) - 16


class StepEnd:
    """The end of one step, at which each rank sends a flag to all others.

    All ranks make theirs at the same point, after the end of the previous step.

    Args:
        group: a Gloo group, or one around such a group, without other messages of the same tag.

    Raises:
        RuntimeError: a connection was closed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._rank: int = group.rank()
        self._place: Place | None = None
        self._works: list[list[dist.Work]] = []
        self._sends: list[tuple[int, dist.Work]] = []
        if has_places(group) and exchanges(group):
            self._place = place_in(group)
            self._flags = [torch.zeros((group.size(), 1), dtype=torch.uint8, device="cpu")]
            self._place.expect(0, list(self._flags[0]))
            return
        self._rounds = rounds_of(group.size())
        self._flags = [
            torch.zeros((len(distances), 1), dtype=torch.uint8, device="cpu")
            for distances in self._rounds
        ]
        try:
            for distances, flags in zip(self._rounds, self._flags, strict=True):
                self._works.append([])
                for distance, flag in zip(distances, flags, strict=True):
                    self._works[-1].append(_C.ask_early(group, flag, self._at(-distance), _TAG))
        except RuntimeError:
            self.forget()
            raise

    def _at(self, distance: int) -> int:
        return (self._rank + distance) % self.group.size()

    def any_rank(self, flag: bool = True) -> bool:
        """Wait until all ranks call this. Returns whether the flag is set on any of them.

        Raises:
            RuntimeError: a connection was closed, or the group's timeout is over.
        """
        own = torch.tensor([flag], dtype=torch.uint8, device="cpu")
        if self._place is not None:
            (flags,) = self._flags
            every = [own] * self.group.size()
            return bool(self._place.exchange(0, every, list(flags), flags).wait().any())
        try:
            for distances, flags, works in zip(self._rounds, self._flags, self._works, strict=True):
                own.fill_(flag)
                receivers = [self._at(distance) for distance in distances]
                for rank in receivers:
                    send = partial(self.group.send, [own], rank, _TAG)
                    self._sends.append((rank, _C.unseen(send)))
                while works:
                    works.pop(0).wait()
                finish_messages(self.group, self._sends)
                flag = flag or bool(flags.any())
        finally:
            self.forget()
        return flag

    def forget(self) -> None:
        """Abandon messages that have not arrived: a Work in use keeps its connection open."""
        for works in self._works:
            works.clear()
        self._sends.clear()


def agree_on_used(step_end: StepEnd, used: Tensor) -> None:
    """Wait until all ranks call this, and combine the parameters that they have used.

    Args:
        step_end: the step's end.
        used: uint8, flat, with the same shape on all ranks: not 0 for each parameter that this rank
            has used. Becomes the maximum over the ranks.

    Raises:
        RuntimeError: a connection was closed, or the group's timeout is over.
    """
    group = step_end.group
    if step_end.any_rank(bool(used.all())):
        used.fill_(1)
    else:
        used.copy_(begin_maximum(group, used)())


def begin_maximum(group: dist.ProcessGroup, own: Tensor) -> Callable[[], Tensor]:
    """Start to take the maximum over the ranks, element by element.

    All ranks call this at the same point of a step.

    Args:
        group: the group of the ranks.
        own: this rank's numbers: uint8, flat, on the CPU, with the same size on all ranks.

    Returns:
        A function that waits for the maximum and returns it. It raises a RuntimeError if a
        connection was closed or the group's timeout is over.
    """
    if exchanges(group):
        rows = own.new_empty((group.size(), own.numel()))
        exchanged = exchange([own] * group.size(), list(rows), rows, group)
        return lambda: torch.amax(exchanged.wait(), dim=0)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    maximum = own.clone()
    work = group.allreduce([maximum], options)

    def wait() -> Tensor:
        work.wait()
        return maximum

    return wait


def rounds_of(size: int) -> list[list[int]]:
    """The ranks that a rank sends to in each round, by their distance from it."""
    if size <= _MOST_AT_ONCE:
        return [list(range(1, size))]
    return rounds_among_many(size)
