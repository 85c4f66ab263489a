"""The process groups of a sharded model, and the steps that they take together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torch_commhook.attachment.sharded.under_way import UnderWay
from torch_commhook.autograd.running_backward import RunningBackward
from torch_commhook.step.step_group import StepGroup

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
        under_way: the exchanges to wait for when a step ends on this rank.
        on_end: called when all ranks have done a step.

    Attributes:
        has_failed: whether the last backward failed, and the model has not run since.
        keeps_apart: whether replicas are apart.
    """

    def __init__(
        self,
        parents: Sequence[dist.ProcessGroup],
        replicas: dist.ProcessGroup | None,
        on_begin: Callable[[], None],
        under_way: UnderWay,
        on_end: Callable[[], None],
    ) -> None:
        self._groups = [(parent, StepGroup(parent)) for parent in parents]
        others = set() if replicas is None else set(dist.get_process_group_ranks(replicas))
        self._in_replica = [
            group
            for parent, group in self._groups
            if len(others.intersection(dist.get_process_group_ranks(parent))) <= 1
        ]
        self._taking_part: list[StepGroup] = []  # in the open step
        self._in_exchange = False
        self._on_begin = on_begin
        self._under_way = under_way
        self._on_end = on_end
        self._backward: RunningBackward | None = None
        self._is_open = False
        self.has_failed = False
        self.keeps_apart = False

    @property
    def is_open(self) -> bool:
        """Whether a backward that reduces gradients is running."""
        return self._is_open

    @property
    def parents(self) -> list[dist.ProcessGroup]:
        """The process groups for which these were made."""
        return [parent for parent, _ in self._groups]

    @property
    def groups(self) -> list[StepGroup]:
        """The groups of all parents."""
        return [group for _, group in self._groups]

    @property
    def in_replica(self) -> list[StepGroup]:
        """The groups within this rank's replica."""
        return self._in_replica

    @property
    def _of_a_backward(self) -> list[StepGroup]:
        return self._in_replica if self.keeps_apart else self.groups

    def group_of(self, parent: dist.ProcessGroup) -> StepGroup | None:
        """The group for a process group; None if it is not one of the model's."""
        return next((group for each, group in self._groups if each is parent), None)

    def before_reduction(self) -> None:
        """Note that a backward reduces gradients: its first reduction begins the step.

        Raises:
            RuntimeError, PeerError: as :meth:`StepGroup.begin`.
        """
        backward = RunningBackward()
        if self._is_open and not backward.has_left(self._backward):
            return
        self._is_open = False
        self._begin(self._of_a_backward)
        self._backward = backward
        self._is_open = True
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
        if self._is_open:
            self.fail(LEFT)
        self._in_exchange = True
        self._begin(self._in_replica if in_replica else self.groups)

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
        """Prepare a gather of parameters. After a failed step, wait for the other ranks.

        Raises:
            RuntimeError, PeerError: as :meth:`StepGroup.connect`.
        """
        if self._is_open and not is_in_backward():
            self.fail(LEFT)
        for group in self._of_a_backward:
            group.connect()

    def end(self) -> None:
        """End the step, if one is open, together with all ranks.

        Raises:
            PeerError: it failed on another rank.
        """
        if not self._is_open:  # it has failed
            return
        self._under_way.wait(self.fail_with)
        self._end()
        self._is_open = False
        self._on_end()

    def _end(self) -> None:
        for group in self._taking_part:
            try:
                group.end()
            except BaseException as error:
                self.fail_with(error, group)
                raise

    def fail_with(self, error: BaseException, at: StepGroup) -> BaseException:
        """Make all ranks leave this step because of an error.

        Args:
            error: the error.
            at: the group in which it occurred.

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
        self._is_open = self._in_exchange = False
        for group in groups:
            group.fail(reason)
        self._under_way.drop()

    @property
    def _failing(self) -> list[StepGroup]:
        """The groups of the open step, or of the step that a gather belongs to."""
        return self._taking_part if self._is_open or self._in_exchange else self._of_a_backward

    def close(self) -> None:
        """Close the groups."""
        for group in self.groups:
            group.close()
