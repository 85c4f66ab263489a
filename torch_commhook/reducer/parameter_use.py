"""Records the parameters whose gradients the ranks have not averaged yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.reducer.buckets import BucketState
from torch_commhook.reducer.parameters import ReducerParameters
from torch_commhook.step.step_group import NoAgreement, StepGroup


class ParameterUse:
    """The parameters that got a gradient in a backward, or in earlier ones under no_sync().

    A failed step, or a backward that an exception ends, changes nothing here: the gradients that it
    has written differ among ranks until a step averages them.

    Args:
        parameters: the reducer's parameters.
        touched: for each parameter, whether a backward may have written to its gradient since the
            last step: uint8, on the CPU. The counter of gradients sets it.

    Attributes:
        touched: as given.
    """

    def __init__(self, parameters: ReducerParameters, touched: Tensor) -> None:
        self._parameters = parameters
        self.touched = touched
        self.all_are_own()

    def all_are_own(self) -> None:
        """Treat all existing gradients as this rank's own."""
        self.touched.fill_(1)

    def set_before(self, used: Sequence[bool]) -> None:
        """Mark parameters as used in a backward that did not synchronise.

        Args:
            used: for each parameter, whether it was used.
        """
        self.touched.copy_(torch.tensor(used, dtype=torch.uint8, device="cpu"))

    def forget(self) -> None:
        """Note that the gradients of earlier backward passes have been averaged."""
        self.touched.zero_()

    def locally_used(
        self, buckets: Sequence[BucketState], agreement: StepGroup | NoAgreement
    ) -> Tensor:
        """Whether this rank has used each parameter: uint8, on the CPU.

        Raises:
            RuntimeError: it has not used all of them, and cannot tell the other ranks.
        """
        used = torch.ones(len(self._parameters), dtype=torch.uint8, device="cpu")
        missing = missing_in(buckets)
        if missing:
            self.leave_out(used, self.touched, missing, needs_all=needs_all(agreement))
        return used

    def leave_out(
        self, used: Tensor, touched: Tensor, missing: Sequence[int], *, needs_all: bool
    ) -> None:
        """Clear the flags of parameters without a gradient.

        Args:
            used: one flag for each parameter: uint8, on the CPU. Written.
            touched: as :attr:`touched`.
            missing: the numbers of the parameters without a gradient in this backward.
            needs_all: whether this rank cannot tell the other ranks.

        Raises:
            RuntimeError: there are such parameters, and the rank cannot tell.
        """
        is_touched = touched.tolist()
        unused = [
            number
            for number in missing
            if not is_touched[number] or self._parameters.tensors[number].grad is None
        ]
        if unused and needs_all:
            names = [self._parameters.names[number] for number in sorted(unused)]
            raise RuntimeError(
                f"torch_commhook: parameters {names} got no gradient, and over this process group "
                "ranks do not tell each other which they used; freeze them "
                "(requires_grad_(False)) before the hook is attached, or let the loss depend on "
                "them"
            )
        used[unused] = 0


def missing_in(buckets: Sequence[BucketState]) -> list[int]:
    """The numbers of the parameters without a gradient in a backward."""
    return [
        number
        for bucket in buckets
        if bucket.pending
        for number, arrived in zip(bucket.members, bucket.arrived, strict=True)
        if arrived is None
    ]


def needs_all(agreement: StepGroup | NoAgreement) -> bool:
    """Whether all ranks must use all parameters, because they cannot tell each other."""
    return agreement.size > 1 and not agreement.shares_used
