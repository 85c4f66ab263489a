"""The order in which gradients arrive, by which a reducer forms its buckets anew."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_commhook import _C, collectives
from torch_commhook.step.step_group import StepGroup


class BucketOrder:
    """In which order the parameters are to go into buckets, once that is known.

    Args:
        arrivals: notes the order in which gradients come.
        parameter_count: of the reducer.

    Attributes:
        is_final: whether the buckets are not to be formed anew any more.
    """

    def __init__(self, arrivals: _C.Arrivals, parameter_count: int) -> None:
        self._arrivals = arrivals
        # The last parameters have the first gradients.
        self.expected: Sequence[int] = range(parameter_count - 1, -1, -1)
        self.is_final = False
        self._agreed: list[int] | None = None

    def agree(self, group: StepGroup, device: torch.device) -> None:
        """Take the order in which rank 0's gradients have arrived, on all ranks.

        Args:
            group: the ranks.
            device: of the gradients.
        """
        # Once each, and those that have not come at the end.
        order = list(dict.fromkeys([*self._arrivals.take_order(), *self.expected]))
        if group.size > 1:
            at = "cpu" if group.recovers else device
            agreed = torch.tensor(order, dtype=torch.int64, device=at)
            collectives.broadcast(agreed, group=group.group).wait()
            order = agreed.tolist()
        self._agreed = order

    def take(self) -> list[int] | None:
        """The order that has been agreed on since this was called last, if any."""
        order, self._agreed = self._agreed, None
        return order

    def settle(self) -> None:
        """The buckets have been formed for good."""
        self.is_final = True
        self._arrivals.stop_noting_order()
