"""How the ranks of a group agree at the end of a step, over Gloo.

Each rank tells all others that its part went well, in one round trip; many ranks do so in as many
as their number has bits (dissemination). A rank that failed has closed its connections, which ends
the wait of the others. The maps of used parameters follow only if each rank left some unused.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.exchange import exchange, exchanges, has_places

#: Among more ranks, a message to each of the others takes longer than several round trips.
_MOST_AT_ONCE = 16
# The tags of exchanges begin above.
_TAG = (1 << 30) - 16


def agree_on_used(group: dist.ProcessGroup, used: Tensor) -> None:
    """Wait until all ranks have come here, and share which parameters they used.

    Args:
        group: a group of Gloo's, with no other messages of these tags.
        used: uint8, flat, not 0 for each parameter that this rank has used; of the same shape on
            all ranks. Becomes the maximum over the ranks.

    Raises:
        RuntimeError: a connection was closed, or the group's timeout is over.
    """
    if _any_rank(group, bool(used.all())):
        used.fill_(1)
    elif exchanges(group):
        rows = used.new_empty((group.size(), used.numel()))
        exchange([used] * group.size(), list(rows), rows, group).wait()
        torch.amax(rows, dim=0, out=used)
    else:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        group.allreduce([used], options).wait()


def wait_for_all(group: dist.ProcessGroup) -> None:
    """Wait until all ranks have come here.

    Raises:
        RuntimeError: as :func:`agree_on_used`.
    """
    _any_rank(group, True)


def _any_rank(group: dist.ProcessGroup, flag: bool) -> bool:
    """Whether a flag is set on any rank."""
    rank, size = group.rank(), group.size()
    if has_places(group) and exchanges(group):
        own = torch.tensor([flag], dtype=torch.uint8, device="cpu")
        flags = own.new_empty((size, 1))
        return bool(exchange([own] * size, list(flags), flags, group).wait().any())
    for distances in rounds_of(size):
        own = torch.tensor([flag], dtype=torch.uint8, device="cpu")
        others = own.new_zeros((len(distances), 1))
        works = [
            group.recv([other], (rank - distance) % size, _TAG)
            for distance, other in zip(distances, others, strict=True)
        ]
        works += [group.send([own], (rank + distance) % size, _TAG) for distance in distances]
        for work in works:
            work.wait()
        flag = flag or bool(others.any())
    return flag


def rounds_of(size: int) -> list[list[int]]:
    """The ranks that a rank tells in each round, by their distance from it."""
    if size <= _MOST_AT_ONCE:
        return [list(range(1, size))]
    return [[1 << bit] for bit in range((size - 1).bit_length())]
