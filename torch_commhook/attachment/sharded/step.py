"""The process groups of a sharded model, and the steps that all of them count together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torch_commhook.attachment.sharded.under_way import UnderWay
from torch_commhook.autograd.running_backward import RunningBackward
from torch_commhook.step.step_group import StepGroup

#: Why a step fails that nobody has ended.
LEFT = "forward() or backward() was left by an exception"


def is_in_backward() -> bool:
    """Whether this thread is inside of a backward."""
    return torch._C._current_graph_task_id() != -1


class ShardedStep:
    """One step on all process groups of a sharded model.

    A rank where something fails closes the connections of all its groups, and so does each rank
    that notices, so that all ranks of the mesh raise in the same step.

    Args:
        parents: the process groups through which the model communicates; all their ranks make
            theirs at the same point, in the same order.
        on_begin: called when a step begins.
        under_way: what is waited for when a step ends on this rank.
        on_end: called when a step has been done on all ranks.

    Attributes:
        has_failed: whether the last step did, after which the model has not run again.
    """

    def __init__(
        self,
        parents: Sequence[dist.ProcessGroup],
        on_begin: Callable[[], None],
        under_way: UnderWay,
        on_end: Callable[[], None],
    ) -> None:
        self._groups = [(parent, StepGroup(parent)) for parent in parents]
        self._on_begin = on_begin
        self._under_way = under_way
        self._on_end = on_end
        self._backward: RunningBackward | None = None
        self._is_open = False
        self.has_failed = False

    @property
    def is_open(self) -> bool:
        """Whether a backward that reduces gradients is under way."""
        return self._is_open

    @property
    def parents(self) -> list[dist.ProcessGroup]:
        """The process groups that these were made for."""
        return [parent for parent, _ in self._groups]

    @property
    def groups(self) -> list[StepGroup]:
        """Those of all parents."""
        return [group for _, group in self._groups]

    def group_of(self, parent: dist.ProcessGroup) -> StepGroup | None:
        """What stands for a process group; None for one that is not the model's."""
        return next((group for each, group in self._groups if each is parent), None)

    def before_reduction(self) -> None:
        """A backward reduces gradients: its first reduction begins the step.

        Raises:
            RuntimeError, PeerError: as :meth:`StepGroup.begin`.
        """
        backward = RunningBackward()
        if self._is_open and not backward.has_left(self._backward):
            return
        self._is_open = False
        for group in self.groups:
            try:
                group.begin()
            except BaseException as error:
                raise self.fail_with(error, group) from error
        self._backward = backward
        self._is_open = True
        self._on_begin()

    def before_gather(self) -> None:
        """Parameters are to be gathered. After a step that failed, wait for the other ranks.

        Raises:
            RuntimeError, PeerError: as :meth:`StepGroup.connect`.
        """
        if self._is_open and not is_in_backward():
            self.fail(LEFT)
        for group in self.groups:
            group.connect()

    def end(self) -> None:
        """End the step, where there is one, together with all ranks.

        Raises:
            PeerError: it failed on another rank.
        """
        if not self._is_open:  # it has failed
            return
        self._under_way.wait(self.fail_with)
        self._is_open = False
        for group in self.groups:
            try:
                group.end()
            except BaseException as error:
                self.fail_with(error, group)
                raise
        self._on_end()

    def fail_with(self, error: BaseException, at: StepGroup) -> BaseException:
        """Let all ranks leave this step because of an error.

        Args:
            error: what was raised.
            at: through which group.

        Returns:
            What to raise; as :meth:`StepGroup.fail_with`.
        """
        explained = at.fail_with(error)
        self.fail(f"{type(explained).__name__}: {explained}")
        return explained

    def fail(self, reason: str) -> None:
        """Let all ranks leave this step, and tell them why."""
        self._is_open = False
        self.has_failed = True
        for group in self.groups:
            group.fail(reason)
        self._under_way.drop()

    def close(self) -> None:
        """Give the groups up."""
        for group in self.groups:
            group.close()
