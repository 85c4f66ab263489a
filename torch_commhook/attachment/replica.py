"""A model of which ranks have copies that a hook keeps apart."""

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
    """This rank's copy of a model, or its part of one.

    All ranks that take part in an exchange begin it, and end it, at the same point.

    Attributes:
        counts_writes: whether a parameter's ``_version`` differs after somebody has written to it.
    """

    counts_writes: bool

    @property
    def group(self) -> StepGroup:
        """The ranks that have other copies of the same."""

    def references(self) -> list[Callable[[], Tensor | None]]:
        """What gives each parameter as optimizers have it, as long as it lives."""

    def find(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Those parameters of these names that there still are, as the hook's memory has them."""

    def drop_copies(self) -> None:
        """Drop what was made of the parameters, which are about to be written."""

    def begin(self) -> None:
        """Begin an exchange.

        Raises:
            RuntimeError, PeerError: as :meth:`StepGroup.begin`.
        """

    def end(self) -> None:
        """End an exchange that went well on this rank, together with all ranks.

        Raises:
            PeerError: it failed on another rank.
        """

    def fail_with(self, error: BaseException) -> BaseException:
        """Let all ranks leave an exchange; gives what to raise, as :meth:`StepGroup.fail_with`."""

    def on_any_rank(self, value: bool) -> bool:
        """Whether it is so on some rank. All ranks ask at the same point of an exchange."""

    def share_failure(self, failure: BaseException | None) -> BaseException | None:
        """Tell the ranks that have the rest of this copy how an exchange in background has ended.

        Args:
            failure: of this rank's part; None where that went well.

        Returns:
            What this rank is to raise: ``failure``, or a PeerError where another rank's part has
            failed.

        Raises:
            BaseException: a rank left before all ranks knew the outcome. Ask again.
        """


class WholeReplica:
    """A copy that has whole parameters.

    Args:
        model: gives it, as long as it lives.
        buckets: gives the parameters of each bucket.
        group: the ranks.
    """

    counts_writes = True

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
        """Nothing: there are none."""

    def begin(self) -> None:
        self._group.begin()

    def end(self) -> None:
        self._group.end()

    def fail_with(self, error: BaseException) -> BaseException:
        return self._group.fail_with(error)

    def on_any_rank(self, value: bool) -> bool:
        return is_on_any_rank(value, [self._group], self._buckets()[0][0].device)

    def share_failure(self, failure: BaseException | None) -> BaseException | None:
        """The failure: this rank has the whole copy."""
        return failure


def is_on_any_rank(value: bool, groups: Sequence[StepGroup], device: torch.device) -> bool:
    """Whether it is so on some rank of groups along the axes of a mesh.

    Args:
        value: on this rank.
        groups: all their ranks come here at the same point.
        device: through whose groups the ranks tell each other.
    """
    for group in groups:
        own = torch.tensor([float(value)], dtype=torch.float32, device=device)
        total = collectives.all_reduce(own, group=group.group_for(device)).wait()
        value = bool(total.item())
    return value
