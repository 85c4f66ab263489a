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
    """Runs the attached hook on a model's gradients.

    Each kind of reducer has a road: DDP's, our own, and ``fully_shard``'s.

    Attributes:
        attached: the hook, or None.
    """

    attached: Attached | None

    @property
    def model(self) -> Callable[[], nn.Module | None]:
        """Returns the model, or None once it is freed."""

    @property
    def successor(self) -> Road | None:
        """The road that has replaced this one, or None."""

    @property
    def group(self) -> StepGroup:
        """The group through which the hook communicates."""

    @property
    def parents(self) -> Sequence[dist.ProcessGroup]:
        """The user's process groups that together reach all ranks of the model."""

    @property
    def is_alive(self) -> bool:
        """Whether the model still exists and this road can run a hook."""

    @property
    def is_closing(self) -> bool:
        """Whether the hook was removed during a backward that is still running."""

    def check_fits(self, attached: Attached) -> None:
        """Raise a TypeError if this road cannot run the hook."""

    def agree(self, what: str, error: Exception | None, settings: dict[str, object]) -> None:
        """Raise on all ranks if one fails or settings differ; see :func:`agree`."""

    def parameter_buckets(self) -> list[list[Tensor]]:
        """The parameters of each bucket, in order, as the hook's memory has them."""

    @property
    def replica(self) -> Replica:
        """This rank's copy of the model, for a hook that keeps ranks apart."""

    def memory_loaded(self, buckets: list[list[str]]) -> None:
        """Note that the hook's memory was loaded, with these names of parameters by bucket."""

    def after_backward(self, then: Callable[[], None]) -> None:
        """Call ``then`` once no backward of the last hook is running."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context manager: gradients accumulate on each rank, without communication."""

    def join(self) -> AbstractContextManager[Any]:
        """Return a context manager in which ranks may have different numbers of inputs."""


#: The first road of each model that has had a hook.
roads: weakref.WeakKeyDictionary[nn.Module, Road] = weakref.WeakKeyDictionary()


def road_in_use(first: Road) -> Road:
    """The road that a model's hook uses at the moment.

    Args:
        first: the model's first road; another may have replaced it.
    """
    return first if first.successor is None else first.successor
