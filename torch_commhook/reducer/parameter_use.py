"""Keeps track of the parameters whose gradients the ranks have not averaged yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.reducer.buckets import BucketState
from torch_commhook.reducer.parameters import ReducerParameters
from torch_commhook.step.step_group import NoAgreement, StepGroup


class ParameterUse:
    """Which parameters have got a gradient, in a backward and in those before it under no_sync().

    A step that fails, or a backward that an exception ends, changes nothing here: the gradients
    that it has written differ from rank to rank until a step averages them.

    Args:
        parameters: the reducer's.
        touched: for each parameter, whether a backward may have written to its gradient since the
            last step: uint8, on the CPU. What counts the gradients sets it.

    Attributes:
        touched: as there.
    """

    def __init__(self, parameters: ReducerParameters, touched: Tensor) -> None:
        self._parameters = parameters
        self.touched = touched
        self.all_are_own()

    def all_are_own(self) -> None:
        """Take all gradients that are there for this rank's own."""
        self.touched.fill_(1)

    def set_before(self, used: Sequence[bool]) -> None:
        """Take parameters for used in a backward that did not synchronise.

        Args:
            used: for each parameter, whether it was.
        """
        self.touched.copy_(torch.tensor(used, dtype=torch.uint8, device="cpu"))

    def forget(self) -> None:
        """The gradients of earlier backward passes have been averaged."""
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
        """Clear the flags of parameters that have got no gradient.

        Args:
            used: one flag for each parameter: uint8, on the CPU; written.
            touched: as :attr:`touched`.
            missing: the numbers of the parameters that this backward has given no gradient.
            needs_all: whether this rank cannot tell the other ranks.

        Raises:
            RuntimeError: there are such, and the rank cannot tell.
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
    """The numbers of the parameters that a backward has given no gradient."""
    return [
        number
        for bucket in buckets
        if bucket.pending
        for number, arrived in zip(bucket.members, bucket.arrived, strict=True)
        if arrived is None
    ]


def needs_all(agreement: StepGroup | NoAgreement) -> bool:
    """Whether all ranks have to use all parameters, since they cannot tell which they used."""
    return agreement.size > 1 and not agreement.shares_used
