"""The interface between an attached hook and the reducer that runs it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from torch_commhook.attachment.replica import Replica
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.step_group import StepGroup


class Road(Protocol):
    """Hands a model's gradients to the hook that is attached at the moment.

    Attributes:
        attached: the hook; None where there is none.
    """

    attached: Attached | None

    @property
    def model(self) -> Callable[[], nn.Module | None]:
        """Gives the model, as long as it lives."""

    @property
    def successor(self) -> Road | None:
        """The road that has taken this one's place."""

    @property
    def group(self) -> StepGroup:
        """The group through which the hook communicates."""

    @property
    def parents(self) -> Sequence[dist.ProcessGroup]:
        """A user's groups through which all of the model's ranks are reached, one after another."""

    @property
    def is_alive(self) -> bool:
        """Whether the model still exists, and may have a hook on this road."""

    @property
    def is_closing(self) -> bool:
        """Whether the hook was taken off in a backward that is still under way."""

    def check_fits(self, attached: Attached) -> None:
        """Refuse another hook that cannot do what this road asks of it, with a TypeError."""

    def agree(self, what: str, error: Exception | None, settings: dict[str, object]) -> None:
        """Go on together with all ranks, or not at all; see :func:`agree`."""

    def parameter_buckets(self) -> list[list[Tensor]]:
        """The parameters of each bucket, in order, as the hook's memory has them."""

    @property
    def replica(self) -> Replica:
        """This rank's copy of the model, for a hook that keeps ranks apart."""

    def memory_loaded(self, buckets: list[list[str]]) -> None:
        """The hook's memory has been read from elsewhere, where these were the buckets."""

    def after_backward(self, then: Callable[[], None]) -> None:
        """Call ``then`` once no backward of the last hook is under way."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Let gradients add up on each rank, without communication."""

    def join(self) -> AbstractContextManager[Any]:
        """Let ranks run out of inputs at different times."""


#: The first road of each model that a hook was attached to.
roads: weakref.WeakKeyDictionary[nn.Module, Road] = weakref.WeakKeyDictionary()


def road_in_use(first: Road) -> Road:
    """The road that a model's hook is on at the moment, which may have taken the first one's place.

    Args:
        first: of the model.
    """
    return first if first.successor is None else first.successor
