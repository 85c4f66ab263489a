"""Which of a reducer's parameters have got a gradient since the ranks last synchronised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.reducer.buckets import BucketState
from torch_commhook.reducer.parameters import ReducerParameters
from torch_commhook.step.step_group import NoAgreement, StepGroup


class ParameterUse:
    """Which parameters have got a gradient, in a backward and in those before it under no_sync().

    Args:
        parameters: the reducer's.
    """

    def __init__(self, parameters: ReducerParameters) -> None:
        self._parameters = parameters
        # Whether each parameter has got a gradient since the last synchronisation, under no_sync().
        self._used_before = [False] * len(parameters)

    def set_before(self, used: Sequence[bool]) -> None:
        """Take parameters for used in a backward that did not synchronise.

        Args:
            used: for each parameter, whether it was.
        """
        self._used_before = list(used)

    def add_backward(self, buckets: Sequence[BucketState]) -> None:
        """A backward that does not synchronise has ended: its gradients wait for one that does."""
        for bucket in buckets:
            for number, arrived in zip(bucket.members, bucket.arrived, strict=True):
                if bucket.pending == 0 or arrived is not None:
                    self._used_before[number] = True

    def forget(self) -> None:
        """The gradients of earlier backward passes have been sent."""
        self._used_before = [False] * len(self._parameters)

    def locally_used(
        self, buckets: Sequence[BucketState], agreement: StepGroup | NoAgreement
    ) -> Tensor:
        """Whether this rank has used each parameter: uint8, on the CPU.

        Raises:
            RuntimeError: it has not used all of them, and cannot tell the other ranks.
        """
        used = [1] * len(self._parameters)
        for bucket in buckets:
            if bucket.pending == 0:
                continue
            for number, parameter, arrived in zip(
                bucket.members, bucket.parameters, bucket.arrived, strict=True
            ):
                if arrived is None and not (
                    self._used_before[number] and parameter.grad is not None
                ):
                    used[number] = 0
        if not agreement.shares_used and agreement.size > 1 and 0 in used:
            names = [
                name for name, yes in zip(self._parameters.names, used, strict=True) if not yes
            ]
            raise RuntimeError(
                f"torch_commhook: parameters {names} got no gradient, and over this process group "
                "ranks do not tell each other which they used; freeze them "
                "(requires_grad_(False)) before the hook is attached, or let the loss depend on "
                "them"
            )
        return torch.tensor(used, dtype=torch.uint8, device="cpu")
