"""The order in which gradients arrive. A reducer rebuilds its buckets in this order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_commhook import _C, collectives
from torch_commhook.step.step_group import StepGroup


class BucketOrder:
    """The order of parameters for the next buckets, once it is known.

    Args:
        arrivals: records the order in which gradients arrive.
        parameter_count: the number of the reducer's parameters.

    Attributes:
        is_final: whether the buckets will not be rebuilt any more.
    """

    def __init__(self, arrivals: _C.Arrivals, parameter_count: int) -> None:
        self._arrivals = arrivals
        # The last parameters have the first gradients.
        self.expected: Sequence[int] = range(parameter_count - 1, -1, -1)
        self.is_final = False
        self._agreed: list[int] | None = None

    def agree(self, group: StepGroup, device: torch.device) -> None:
        """Use the order in which rank 0's gradients have arrived, on all ranks.

        Args:
            group: the group of the ranks.
            device: the gradients' device.
        """
        # Each parameter once; those without a gradient are last.
        order = list(dict.fromkeys([*self._arrivals.take_order(), *self.expected]))
        if group.size > 1:
            at = "cpu" if group.recovers else device
            agreed = torch.tensor(order, dtype=torch.int64, device=at)
            collectives.broadcast(agreed, group=group.group).wait()
            order = agreed.tolist()
        self._agreed = order

    def take(self) -> list[int] | None:
        """Return the order that was agreed on since the last call, or None."""
        order, self._agreed = self._agreed, None
        return order

    def settle(self) -> None:
        """Note that the buckets have their final form."""
        self.is_final = True
        self._arrivals.stop_noting_order()
