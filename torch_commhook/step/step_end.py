"""How the ranks of a group agree at the end of a step, over Gloo.

Each rank tells all others that its part went well. Each has asked for that when the step began, so
that it takes half a round trip; many ranks tell each other in as many rounds as their number has
bits (dissemination). A rank that failed has closed its connections, which ends
the wait of the others. The maps of used parameters follow only if each rank left some unused.
"""

from __future__ import annotations

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

#: Among more ranks, a message to each of the others takes longer than several round trips.
_MOST_AT_ONCE = 16
# The tags of exchanges begin above.
_TAG = (1 << 30) - 16
_COMPARISON_TAG = _TAG + 1


class StepEnd:
    """The end of one step, at which each rank tells a flag to all others.

    All ranks make theirs at the same point, and none before the one of the last step is over.

    Args:
        group: of Gloo, or one that stands around such a group. It has no other messages of the
            same tag.

    Raises:
        RuntimeError: a connection was closed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._rank: int = group.rank()
        self._place: Place | None = None
        self._works: list[list[dist.Work]] = []
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
        """Wait until all ranks have come here; whether a flag is set on any of them.

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
                for distance in distances:
                    works.append(self.group.send([own], self._at(distance), _TAG))
                while works:
                    works.pop(0).wait()
                flag = flag or bool(flags.any())
        finally:
            self.forget()
        return flag

    def forget(self) -> None:
        """Give up what has not come: a Work that somebody has keeps its connection open."""
        for works in self._works:
            works.clear()


def agree_on_used(step_end: StepEnd, used: Tensor) -> None:
    """Wait until all ranks have come here, and share which parameters they used.

    Args:
        step_end: of the step.
        used: uint8, flat, not 0 for each parameter that this rank has used; of the same shape on
            all ranks. Becomes the maximum over the ranks.

    Raises:
        RuntimeError: a connection was closed, or the group's timeout is over.
    """
    group = step_end.group
    if step_end.any_rank(bool(used.all())):
        used.fill_(1)
    elif exchanges(group):
        rows = used.new_empty((group.size(), used.numel()))
        exchange([used] * group.size(), list(rows), rows, group).wait()
        torch.amax(rows, dim=0, out=used)
    else:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        group.allreduce([used], options).wait()


def all_alike(group: dist.ProcessGroup, own: bytes) -> bool:
    """Whether all ranks give the same. All call this between the same two steps, and find the same.

    It has messages of its own, since an exchange in the background may be under way.

    Args:
        group: of Gloo.
        own: what this rank gives, as long as what the others give.

    Raises:
        RuntimeError: a connection was closed, or the group's timeout is over.
    """
    size, rank = group.size(), group.rank()
    are_alike = True
    for distances in rounds_of(size):
        flag = b"\1" if are_alike else b"\0"
        sent = torch.frombuffer(bytearray(own + flag), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in distances]
        works = []
        for distance, output in zip(distances, received, strict=True):
            works.append(group.recv([output], (rank - distance) % size, _COMPARISON_TAG))
            works.append(group.send([sent], (rank + distance) % size, _COMPARISON_TAG))
        for work in works:
            work.wait()
        # A flag that is not set says that the ranks before it differ.
        are_alike = are_alike and all(torch.equal(output, sent) for output in received)
    return are_alike


def rounds_of(size: int) -> list[list[int]]:
    """The ranks that a rank tells in each round, by their distance from it."""
    if size <= _MOST_AT_ONCE:
        return [list(range(1, size))]
    return [[1 << bit] for bit in range((size - 1).bit_length())]
