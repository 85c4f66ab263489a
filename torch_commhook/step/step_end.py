"""The agreement of a group's ranks at the end of a step.

Each rank tells all others that its part succeeded, which takes half a round trip. A failed rank
leaves the group, which ends the others' wait. The maps of used parameters follow only if each rank
left some unused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_commhook.collectives.exchange import STEP_END, Place, exchanges, place_in


class StepEnd:
    """The end of one step, at which each rank sends a flag to all others.

    All ranks make theirs at the same point, after the end of the previous step.

    Args:
        group: one of the library's own groups, or one around it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._place = place_in(group, STEP_END) if exchanges(group) else None

    def any_rank(self, flag: bool = True) -> bool:
        """Wait until all ranks call this. Returns whether the flag is set on any of them.

        Raises:
            RuntimeError: a rank has left, or the group's timeout is over.
        """
        own = torch.tensor([flag], dtype=torch.uint8, device="cpu")
        return bool(begin_maximum(self.group, own, self._place)().any())


def all_alike(group: dist.ProcessGroup, own: bytes, place: Place | None = None) -> bool:
    """Whether all ranks have the same bytes. All call this at the same point.

    Args:
        group: the group of the ranks, of any backend.
        own: this rank's bytes, equally many on all ranks.
        place: as for :func:`begin_maximum`.

    Raises:
        RuntimeError: as for :func:`begin_maximum`.
    """
    device = "cpu" if exchanges(group) else distributed_c10d._get_object_coll_device(group)
    digest = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    both = torch.cat([digest, 255 - digest])  # the maximum of the second half is the minimum
    return torch.equal(begin_maximum(group, both, place)(), both)


def agree_on_used(step_end: StepEnd, used: Tensor) -> None:
    """Wait until all ranks call this, and combine the parameters that they have used.

    Args:
        step_end: the step's end.
        used: uint8, flat, with the same shape on all ranks: not 0 for each parameter that this rank
            has used. Becomes the maximum over the ranks.

    Raises:
        RuntimeError: a rank has left, or the group's timeout is over.
    """
    group = step_end.group
    if step_end.any_rank(bool(used.all())):
        used.fill_(1)
    else:
        used.copy_(begin_maximum(group, used)())


def begin_maximum(
    group: dist.ProcessGroup, own: Tensor, place: Place | None = None
) -> Callable[[], Tensor]:
    """Start to take the maximum over the ranks, element by element.

    All ranks call this at the same point of a step.

    Args:
        group: the group of the ranks.
        own: this rank's numbers: uint8, flat, with the same size on all ranks; on the CPU if
            :func:`exchanges` holds for the group.
        place: its place, if one was taken.

    Returns:
        A function that waits for the maximum and returns it. It raises a RuntimeError if a rank has
        left, or the group's timeout is over.
    """
    if exchanges(group):
        return (place or place_in(group)).reduce(own.clone(), takes_maximum=True).wait
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    maximum = own.clone()
    work = group.allreduce([maximum], options)

    def wait() -> Tensor:
        work.wait()
        return maximum

    return wait
