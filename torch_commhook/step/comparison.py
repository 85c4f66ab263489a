"""Whether all ranks give the same bytes, such as a digest of their settings."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_commhook.step.step_end import rounds_of

# The tag of a step's end is one below, those of exchanges are above.
_TAG = (1 << 30) - 15


def all_alike(group: Any, own: bytes, first: bool | None = None) -> bool:
    """Returns whether all ranks give the same bytes. All call this between the same two steps.

    It sends messages of its own, because an exchange in the background may be under way. Each rank
    asks for all messages at once, so that those of later rounds take half a round trip.

    Args:
        group: of Gloo, or a backend of such a group.
        own: this rank's bytes, equally many on all ranks.
        first: whether the first round's ranks have given the same bytes, where they were told when
            ranks connected.

    Raises:
        RuntimeError: a connection was closed, or the group's timeout is over.
    """
    size, rank = group.size(), group.rank()
    are_alike = first is not False
    rounds = rounds_of(size)[0 if first is None else 1 :]
    received = [
        [torch.empty(len(own) + 1, dtype=torch.uint8, device="cpu") for _ in each]
        for each in rounds
    ]
    works: list[list[dist.Work]] = []
    try:
        for distances, outputs in zip(rounds, received, strict=True):
            works.append([])
            for distance, output in zip(distances, outputs, strict=True):
                works[-1].append(group.recv([output], (rank - distance) % size, _TAG))
        for distances, outputs, under_way in zip(rounds, received, works, strict=True):
            flag = b"\1" if are_alike else b"\0"
            sent = torch.frombuffer(bytearray(own + flag), dtype=torch.uint8)
            for distance in distances:
                under_way.append(group.send([sent], (rank + distance) % size, _TAG))
            while under_way:
                under_way.pop(0).wait()
            # A rank clears its flag if a rank that it has heard of differs.
            are_alike = are_alike and all(torch.equal(output, sent) for output in outputs)
    finally:
        for under_way in works:  # a Work that somebody has keeps its connection open
            under_way.clear()
    return are_alike


def all_alike_by_maximum(group: dist.ProcessGroup, own: bytes) -> bool:
    """As :func:`all_alike`, by one all-reduce over a group of any backend that has the maximum."""
    device = distributed_c10d._get_object_coll_device(group)
    digest = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    both = torch.cat([digest, 255 - digest])  # the maximum of the second half is the minimum
    maximum = both.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    return torch.equal(maximum, both)
