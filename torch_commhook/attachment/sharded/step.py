"""The steps of a sharded model: its groups, its roots, and copies of it.

The process groups of a mesh take a step together. If one fails, its rank also closes the others.
The parameters of the next forward are then gathered through new channels. If ``local_sgd`` keeps
replicas apart, a backward is a step of one replica's groups only, and an exchange is a step of all
groups. An exchange in the background is a step of the group across replicas only; its end is a step
of the replica's groups.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_commhook import _C
from torch_commhook.attachment.road import Replica, is_on_any_rank
from torch_commhook.attachment.sharded import fsdp
from torch_commhook.attachment.sharded.unit import Unit
from torch_commhook.step.attached_hook import DRAIN_SECONDS
from torch_commhook.step.step_group import RunningBackward, StepGroup

# ---- collectives that fully_shard requests; reductions that run while a backward continues ---


def wait_for(
    future: torch.futures.Future[Any], group: StepGroup, where: str = "a collective of fully_shard"
) -> None:
    """Wait for a collective that ``fully_shard`` has requested."""
    _C.wait_for_result(future, where, group.timeout.total_seconds())
    future.wait()


@dataclass
class Reduction:
    """The reduction of one unit's gradients.

    Attributes:
        unit: the unit's number.
        future: completes when the reduction has ended.
        where: names the waiting operation in errors.
        group: the group of the reduction.
        finish: writes the result.
        target: the result's destination. It contains NaN if nothing is written.
    """

    unit: int
    future: torch.futures.Future[Any]
    where: str
    group: StepGroup
    finish: Callable[[], None]
    target: torch.Tensor

    def wait(self) -> None:
        """Wait for it, and write its result."""
        wait_for(self.future, self.group, self.where)
        self.finish()


# ---- the process groups of a sharded model, and the steps that they take together ----------------


#: The failure's reason of a step that was not ended.
LEFT = "forward() or backward() was left by an exception"


def is_in_backward() -> bool:
    """Whether this thread is inside a backward."""
    return torch._C._current_graph_task_id() != -1


class ShardedStep:
    """One step on all process groups of a sharded model.

    If something fails on a rank, it closes the connections of all its groups. Each rank that
    notices does the same, so that all ranks of the mesh raise in the same step. If a hook keeps
    replicas apart, each replica takes the step of a backward on its own, and the whole mesh takes
    the step of an exchange.

    Args:
        parents: the process groups through which the model communicates. All ranks make theirs at
            the same point, in the same order.
        replicas: the one of them with the replicas of this rank's shards, or None.
        on_begin: called when a step begins.
        on_end: called when all ranks have done a step.
        devices: as for :class:`StepGroup`.

    Attributes:
        in_replica: the groups within this rank's replica.
        is_open: whether a backward that reduces gradients is running.
        has_failed: whether the last backward failed, and the model has not run since.
        keeps_apart: whether replicas are apart.
    """

    def __init__(
        self,
        parents: Sequence[dist.ProcessGroup],
        replicas: dist.ProcessGroup | None,
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
        devices: Collection[str] | None = None,
    ) -> None:
        self._groups = {parent: StepGroup(parent, devices=devices) for parent in parents}
        others = set() if replicas is None else set(dist.get_process_group_ranks(replicas))
        self.in_replica = [
            group
            for parent, group in self._groups.items()
            if len(others.intersection(dist.get_process_group_ranks(parent))) <= 1
        ]
        self._taking_part: list[StepGroup] = []  # in the open step
        self._in_exchange = False
        self._on_begin = on_begin
        self._under_way: list[Reduction] = []  # that nobody has waited for yet, in order
        self._on_end = on_end
        self._backward: RunningBackward | None = None
        self.is_open = False
        self.has_failed = False
        self.keeps_apart = False

    @property
    def parents(self) -> list[dist.ProcessGroup]:
        return list(self._groups)

    @property
    def groups(self) -> list[StepGroup]:
        return list(self._groups.values())

    @property
    def _of_a_backward(self) -> list[StepGroup]:
        return self.in_replica if self.keeps_apart else self.groups

    def group_of(self, parent: dist.ProcessGroup | None) -> StepGroup | None:
        """The group for a process group; None if it is not one of the model's."""
        return None if parent is None else self._groups.get(parent)

    def before_reduction(self) -> None:
        """Note that a backward reduces gradients: its first reduction begins the step."""
        backward = RunningBackward()
        if self.is_open and not backward.has_left(self._backward):
            return
        self.is_open = False
        self._begin(self._of_a_backward)
        self._backward = backward
        self.is_open = True
        self._on_begin()

    def _begin(self, groups: list[StepGroup]) -> None:
        self._taking_part = groups
        for group in groups:
            try:
                group.begin()
            except BaseException as error:
                raise self.fail_with(error, group) from error

    def begin_exchange(self, *, in_replica: bool = False) -> None:
        """Begin a step of the whole mesh, outside a backward.

        Args:
            in_replica: whether only this rank's replica takes the step.

        Raises:
            RuntimeError, PeerError: as :meth:`StepGroup.begin`; or a backward is still running.
        """
        if is_in_backward():
            raise RuntimeError(
                "torch_commhook: replicas cannot be averaged inside backward(); call "
                "optimizer.step() after it"
            )
        if self.is_open:
            self.fail(LEFT)
        self._in_exchange = True
        self._begin(self.in_replica if in_replica else self.groups)

    def end_exchange(self) -> None:
        """End an exchange that succeeded on this rank, together with all ranks.

        Raises:
            PeerError: it failed on another rank.
        """
        self._end()
        self._in_exchange = False

    def fail_exchange(self, error: BaseException, at: StepGroup) -> BaseException:
        """Fail an exchange; as :meth:`fail_with`, but returns a failed end's error itself."""
        return self.fail_with(error, at) if self._in_exchange else error

    def before_gather(self) -> None:
        """Prepare a gather of parameters. After a failed step, wait for the other ranks."""
        if self.is_open and not is_in_backward():
            self.fail(LEFT)
        for group in self._of_a_backward:
            group.connect()

    def end(self) -> None:
        """End the step, if one is open, together with all ranks."""
        if not self.is_open:  # it has failed
            return
        self.wait_for_reductions()
        self._end()
        self.is_open = False
        self._on_end()

    def wait_or_add(self, reduction: Reduction, goes_on: bool) -> None:
        """Let a reduction continue, or wait for it."""
        if goes_on:
            self._under_way.append(reduction)
        else:
            reduction.wait()

    def is_under_way(self, unit: int) -> bool:
        return any(each.unit == unit for each in self._under_way)

    def wait_for_reductions(self) -> None:
        """Wait for all reductions.

        Raises:
            Exception: one failed. The others' results are not written.
        """
        while self._under_way:
            reduction = self._under_way.pop(0)
            try:
                reduction.wait()
            except Exception as error:
                reduction.target.fill_(math.nan)
                raise self.fail_with(error, reduction.group) from None

    def _drop_reductions(self) -> None:
        """Wait for the reductions of a failed step, and write NaN."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._under_way:
            reduction = self._under_way.pop(0)
            with suppress(Exception):  # a consequence of the failure
                _C.wait_for(reduction.future, max(deadline - time.monotonic(), 0.0))
            reduction.target.fill_(math.nan)

    def _end(self) -> None:
        for group in self._taking_part:
            try:
                group.end()
            except BaseException as error:
                self.fail_with(error, group)
                raise

    def fail_with(self, error: BaseException, at: StepGroup) -> BaseException:
        """Make all ranks leave this step because of an error in the group ``at``.

        Returns:
            The error to raise; as :meth:`StepGroup.fail_with`.
        """
        # The failure of a replica's own step leaves other replicas' connections open.
        explained = at.fail_with(error) if at in self._failing else error
        self.fail(explained)
        return explained

    def fail(self, reason: BaseException | str) -> None:
        """Make all ranks leave this step, and send them the reason; as :meth:`StepGroup.fail`."""
        groups = self._failing
        self.has_failed = self.has_failed or not self._in_exchange
        self.is_open = self._in_exchange = False
        for group in groups:
            group.fail(reason)
        self._drop_reductions()

    @property
    def _failing(self) -> list[StepGroup]:
        """The groups of the open step, or of the step that a gather belongs to."""
        return self._taking_part if self.is_open or self._in_exchange else self._of_a_backward

    def close(self) -> None:
        for group in self.groups:
            group.close()


# ---- this rank's part of a copy of a sharded model, for a hook that keeps copies apart -----------


class ShardedReplica(Replica):
    """A rank's shards of a copy of a model. The hook's memory includes their padding."""

    is_sharded = True

    def __init__(
        self, step: ShardedStep, group: StepGroup, units: Sequence[Unit], device: torch.device
    ) -> None:
        self._step = step
        self.group = group
        self._units = units
        self._device = device

    def references(self) -> list[Callable[[], Tensor | None]]:
        return [reference for unit in self._units for reference in unit.references()]

    def _named(self) -> dict[str, Tensor]:
        living = [unit for unit in self._units if unit.group is not None]
        return dict(pair for unit in living for pair in unit.named_shards())

    def drop_copies(self) -> None:
        for unit in self._units:
            fsdp.drop_whole(unit.group)

    def begin(self) -> None:
        self._step.begin_exchange()

    def end(self) -> None:
        self._step.end_exchange()

    def fail_with(self, error: BaseException) -> BaseException:
        return self._step.fail_exchange(error, self.group)

    def on_any_rank(self, value: bool) -> bool:
        return is_on_any_rank(value, self._step.groups, self._device)

    def share_failure(self, failure: BaseException | None) -> BaseException | None:
        self._step.begin_exchange(in_replica=True)
        has_failed, at = failure is not None, self.group
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


# ---- the modules of fully_shard whose forward and backward begin and end a model's steps ---------


class Roots:
    """The outermost modules of a model, or one around it, that hold the states of ``fully_shard``.

    Args:
        step: the model's step.
        ended: called when a backward of one of them has ended.
    """

    def __init__(self, step: ShardedStep, ended: Callable[[], None]) -> None:
        self._step = step
        self._ended = ended
        self._states: list[weakref.ref[Any]] = []
        self._around: list[weakref.ref[nn.Module]] = []

    def listen_to(self, module: nn.Module) -> None:
        """Watch the ends of backwards of a module and of the modules in it."""
        for state in fsdp.states(module):
            if all(reference() is not state for reference in self._states):
                self._states.append(weakref.ref(state))
                fsdp.listen_to_end(state, self._ended)

    def stop(self) -> None:
        """Watch no module any more."""
        for reference in self._states:
            state = reference()
            if state is not None:
                fsdp.stop_listening(state, self._ended)

    @property
    def are_in_backward(self) -> bool:
        """Whether a backward of one of them is running."""
        return any(map(fsdp.is_in_backward, self._all()))

    @property
    def are_unfinished(self) -> bool:
        """Whether a forward or backward of one of them is running, or was left by an exception."""
        return any(map(fsdp.is_unfinished, self._all()))

    def around(self, model: nn.Module) -> list[nn.Module]:
        """Modules around a model that became roots in its first forward. Each is returned once.

        Their forward begins an iteration.
        """
        found = []
        for root in self._all():
            module = fsdp.root_module(root)
            if _has(model, module) or any(each() is module for each in self._around):
                continue
            self._around.append(weakref.ref(module))
            self.listen_to(module)
            found.append(module)
        return found

    def recover(self, module: nn.Module) -> None:
        """Make a module usable again if an exception ended its last forward or backward."""
        if is_in_backward():  # activation checkpointing
            return
        inside = [root for root in self._all() if _has(module, fsdp.root_module(root))]
        if not self._step.has_failed:
            if not self._step.is_open and not any(map(fsdp.is_unfinished, inside)):
                return
            self._step.fail(LEFT)
        for root in inside:
            fsdp.reset(root)
        if inside:
            self._step.has_failed = False

    def check(self) -> None:
        """Refuse backwards that do not reduce gradients."""
        states = [reference() for reference in self._states]
        if any(state is not None and fsdp.is_finalized_by_hand(state) for state in states):
            raise RuntimeError(
                "torch_commhook: with set_manual_backward_finalization(True) gradients are reduced "
                "after backward(), when a hook's step has ended; set it to False, or remove() "
                "the hook"
            )

    def reset(self) -> None:
        """Reset the states of all, so that they leave the present step."""
        for root in self._all():
            fsdp.reset(root)

    def _all(self) -> list[Any]:
        states = [reference() for reference in self._states]
        return fsdp.roots(state for state in states if state is not None)


def _has(module: nn.Module, other: nn.Module) -> bool:
    return module is other or any(each is other for each in module.modules())
