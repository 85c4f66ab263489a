"""Whether all ranks give the same bytes, such as a digest of their settings."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_commhook.step.step_end import rounds_of

# The tag of a step's end is one below, those of exchanges are above.
_TAG = (1 << 30) - 15


def all_alike(group: dist.ProcessGroup, own: bytes) -> bool:
    """Returns whether all ranks give the same bytes. All call this between the same two steps.

    It sends messages of its own, because an exchange in the background may be under way.

    Args:
        group: of Gloo.
        own: this rank's bytes, equally many on all ranks.

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
            works.append(group.recv([output], (rank - distance) % size, _TAG))
            works.append(group.send([sent], (rank + distance) % size, _TAG))
        for work in works:
            work.wait()
        # A rank clears its flag if a rank that it has heard of differs.
        are_alike = are_alike and all(torch.equal(output, sent) for output in received)
    return are_alike


def all_alike_by_maximum(group: dist.ProcessGroup, own: bytes) -> bool:
    """As :func:`all_alike`, by one all-reduce over a group of any backend that has the maximum."""
    device = distributed_c10d._get_object_coll_device(group)
    digest = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    both = torch.cat([digest, 255 - digest])  # the maximum of the second half is the minimum
    maximum = both.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    return torch.equal(maximum, both)
