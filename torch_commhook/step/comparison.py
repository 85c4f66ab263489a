"""Checks whether all ranks have the same bytes, such as a digest of their settings."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import finish_messages
from torch_commhook.step.step_end import rounds_of

# The tag of a step's end is one below, those of exchanges are above.
_TAG = (1 << 30) - 15


class Comparison:
    """Checks whether all ranks have the same bytes. All ranks make and call it at the same points.

    It sends its own messages, because an exchange in the background may be running. Each rank
    requests all messages when it makes its comparison. So all rounds' messages take half a round
    trip; so do the first round's, if the ranks call it that much later.

    Args:
        group: a Gloo group, or its backend, without another running comparison.
        nbytes: the number of bytes of each rank.
        first: whether the first round's ranks have the same bytes, if they found out when they
            connected.

    Raises:
        RuntimeError: a connection was closed.
    """

    def __init__(self, group: Any, nbytes: int, first: bool | None = None) -> None:
        self._group = group
        self._nbytes = nbytes
        self._are_alike = first is not False
        self._rounds = rounds_of(group.size())[0 if first is None else 1 :]
        self._received = [
            [torch.empty(nbytes + 1, dtype=torch.uint8, device="cpu") for _ in each]
            for each in self._rounds
        ]
        self._works: list[list[dist.Work]] = []
        self._sends: list[tuple[int, dist.Work]] = []
        try:
            for distances, outputs in zip(self._rounds, self._received, strict=True):
                self._works.append([])
                for distance, output in zip(distances, outputs, strict=True):
                    self._works[-1].append(_C.ask_early(group, output, self._at(-distance), _TAG))
        except BaseException:
            self.forget()
            raise

    def _at(self, distance: int) -> int:
        rank: int = self._group.rank()
        return (rank + distance) % int(self._group.size())

    def all_alike(self, own: bytes) -> bool:
        """Whether all ranks have the same bytes.

        Raises:
            RuntimeError: a connection was closed, or the group's timeout is over.
        """
        assert len(own) == self._nbytes
        try:
            for distances, outputs, works in zip(
                self._rounds, self._received, self._works, strict=True
            ):
                flag = b"\1" if self._are_alike else b"\0"
                sent = torch.frombuffer(bytearray(own + flag), dtype=torch.uint8)
                receivers = [self._at(distance) for distance in distances]
                for rank in receivers:
                    send = partial(self._group.send, [sent], rank, _TAG)
                    self._sends.append((rank, _C.unseen(send)))
                while works:
                    works.pop(0).wait()
                finish_messages(self._group, self._sends)
                # A rank clears its flag if a rank that it has heard of differs.
                self._are_alike = self._are_alike and all(
                    torch.equal(output, sent) for output in outputs
                )
        finally:
            self.forget()
        return self._are_alike

    def forget(self) -> None:
        """Abandon messages that have not arrived: a Work in use keeps its connection open."""
        for works in self._works:
            works.clear()
        self._sends.clear()


def all_alike_by_maximum(group: dist.ProcessGroup, own: bytes) -> bool:
    """As :class:`Comparison`, by one all-reduce of the maximum over a group of any backend."""
    device = distributed_c10d._get_object_coll_device(group)
    digest = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    both = torch.cat([digest, 255 - digest])  # the maximum of the second half is the minimum
    maximum = both.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    return torch.equal(maximum, both)
