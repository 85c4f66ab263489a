"""Failures in exchanges of hooks that train ranks apart: failing hooks, and steps that may fail."""

from __future__ import annotations

from typing import Any

import torch
from local_training import backward, farthest, parameters_of
from mode_cases import OwnError
from torch import nn

from torch_commhook import GradBucket, PeerError, hooks
from torch_commhook.codecs import CODECS


class Flaky(hooks.allreduce):  # type: ignore[name-defined, misc]
    """Averages, but raises an error on the second bucket if :attr:`fails` is set."""

    fails = False

    def average(self, bucket: GradBucket) -> Any:
        if self.fails and bucket.index() == 1:
            raise OwnError("boo")
        return super().average(bucket)


class FlakyTopk(CODECS["topk"]):  # type: ignore[misc, name-defined]
    """Fails once while it adds messages, after all messages were sent."""

    def fail_once(self) -> None:
        """Makes the next sum fail."""
        self.__dict__["fails"] = True

    def fail_no_more(self) -> None:
        """Cancels a failure that has not happened."""
        self.__dict__.pop("fails", None)

    def decode_sum(self, *args: Any, **kwargs: Any) -> None:
        if self.__dict__.pop("fails", False):
            raise OwnError("boo")
        super().decode_sum(*args, **kwargs)


def error_of_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> str:
    """Do a step that may fail, and check that a failure leaves the rank's own update.

    Args:
        optimizer: plain SGD with a learning rate of 0.01.
        rank, step: select the batch.

    Returns:
        The kind of the error and its message; "" after a successful step.
    """
    before = parameters_of(model)
    optimizer.zero_grad()
    backward(model, rank, step)
    gradients = [parameter.grad for parameter in model.parameters()]
    own = [p.add(g, alpha=-0.01) for p, g in zip(before, gradients, strict=True)]
    try:
        optimizer.step()
    except (OwnError, PeerError) as error:
        assert farthest(parameters_of(model), own) == 0
        return f"{type(error).__name__}: {error}"
    return ""
