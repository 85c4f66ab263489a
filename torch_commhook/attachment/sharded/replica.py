"""This rank's part of a copy of a sharded model, for a hook that keeps copies apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_commhook.attachment.replica import is_on_any_rank
from torch_commhook.attachment.sharded import fsdp
from torch_commhook.attachment.sharded.step import ShardedStep
from torch_commhook.attachment.sharded.unit import Unit
from torch_commhook.step.step_group import StepGroup


class ShardedReplica:
    """A rank's shards of a copy of a model. The hook's memory includes their padding.

    Args:
        step: the model's step.
        group: the ranks with the same shards.
        units: the groups of parameters that are trained.
        device: the gradients' device.
    """

    is_sharded = True

    def __init__(
        self, step: ShardedStep, group: StepGroup, units: Sequence[Unit], device: torch.device
    ) -> None:
        self._step = step
        self._group = group
        self._units = units
        self._device = device

    @property
    def group(self) -> StepGroup:
        return self._group

    def references(self) -> list[Callable[[], Tensor | None]]:
        return [reference for unit in self._units for reference in unit.references()]

    def find(self, names: Sequence[str]) -> dict[str, Tensor]:
        living = [unit for unit in self._units if unit.group is not None]
        every = dict(pair for unit in living for pair in unit.named_shards())
        return {name: every[name] for name in names if name in every}

    def drop_copies(self) -> None:
        for unit in self._units:
            fsdp.drop_whole(unit.group)

    def begin(self) -> None:
        self._step.begin_exchange()

    def end(self) -> None:
        self._step.end_exchange()

    def fail_with(self, error: BaseException) -> BaseException:
        return self._step.fail_exchange(error, self._group)

    def on_any_rank(self, value: bool) -> bool:
        return is_on_any_rank(value, self._step.groups, self._device)

    def share_failure(self, failure: BaseException | None) -> BaseException | None:
        self._step.begin_exchange(in_replica=True)
        has_failed, at = failure is not None, self._group
        all_know = False  # that a part has failed
        try:
            # A value: an error of this call must not look like the failure of a part.
            for at in self._step.in_replica:
                has_failed = is_on_any_rank(has_failed, [at], self._device)
            all_know = has_failed
            if failure is not None:
                raise failure
            self._step.end_exchange()  # raises the failed rank's reason
        except BaseException as error:
            raised = self._step.fail_exchange(error, at)
            if all_know:
                return raised
            if raised is error:
                raise
            raise raised from error
        return None
