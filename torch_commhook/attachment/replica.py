"""Copies of a model that a hook keeps apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import TensorWeakRef

from torch_commhook import collectives
from torch_commhook.step.step_group import StepGroup


class Replica(Protocol):
    """This rank's copy of a model, or its part of a copy.

    All ranks of an exchange must begin and end it at the same point.

    Attributes:
        is_sharded: whether the copy is divided among ranks.
    """

    is_sharded: bool

    @property
    def group(self) -> StepGroup:
        """The ranks that have other copies of the same part."""

    def references(self) -> list[Callable[[], Tensor | None]]:
        """Functions that return each parameter as optimizers have it, or None once it is freed."""

    def find(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The existing parameters with these names, as the hook's memory has them."""

    def drop_copies(self) -> None:
        """Drop copies that were made of the parameters, which are about to be written."""

    def begin(self) -> None:
        """Begin an exchange.

        Raises:
            RuntimeError, PeerError: as :meth:`StepGroup.begin`.
        """

    def end(self) -> None:
        """End an exchange that succeeded on this rank, together with all ranks.

        Raises:
            PeerError: it failed on another rank.
        """

    def fail_with(self, error: BaseException) -> BaseException:
        """Fail an exchange on all ranks; returns an error as :meth:`StepGroup.fail_with`."""

    def on_any_rank(self, value: bool) -> bool:
        """Whether ``value`` is True on any rank. All ranks must call this at the same point."""

    def share_failure(self, failure: BaseException | None) -> BaseException | None:
        """Share the outcome of a background exchange with the ranks of the same copy.

        Args:
            failure: the error of this rank's part; None if it succeeded.

        Returns:
            The error to raise: ``failure``, or a PeerError if another rank's part failed.

        Raises:
            BaseException: a rank left before all ranks knew the outcome. Call this again.
        """


class WholeReplica:
    """A copy with whole parameters.

    Args:
        model: returns the model, or None once it is freed.
        buckets: returns the parameters of each bucket.
        group: the group of the ranks.
    """

    is_sharded = False

    def __init__(
        self,
        model: Callable[[], nn.Module | None],
        buckets: Callable[[], list[list[Tensor]]],
        group: StepGroup,
    ) -> None:
        self._model = model
        self._buckets = buckets
        self._group = group

    @property
    def group(self) -> StepGroup:
        return self._group

    def references(self) -> list[Callable[[], Tensor | None]]:
        return [TensorWeakRef(parameter) for bucket in self._buckets() for parameter in bucket]

    def find(self, names: Sequence[str]) -> dict[str, Tensor]:
        model = self._model()
        if model is None:
            return {}
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        every = dict(inner.named_parameters())
        return {name: every[name] for name in names if name in every}

    def drop_copies(self) -> None:
        """Do nothing: there are no copies."""

    def begin(self) -> None:
        self._group.begin()

    def end(self) -> None:
        self._group.end()

    def fail_with(self, error: BaseException) -> BaseException:
        return self._group.fail_with(error)

    def on_any_rank(self, value: bool) -> bool:
        return is_on_any_rank(value, [self._group], self._buckets()[0][0].device)

    def share_failure(self, failure: BaseException | None) -> BaseException | None:
        """Return ``failure``: this rank has the whole copy."""
        return failure


def is_on_any_rank(value: bool, groups: Sequence[StepGroup], device: torch.device) -> bool:
    """Whether ``value`` is True on any rank of groups along the axes of a mesh.

    Args:
        value: this rank's value.
        groups: the groups. All their ranks must call this at the same point.
        device: the device of the tensors that the groups send.
    """
    for group in groups:
        own = torch.tensor([float(value)], dtype=torch.float32, device=device)
        total = collectives.all_reduce(own, group=group.group_for(device)).wait()
        value = bool(total.item())
    return value
