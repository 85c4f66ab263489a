"""How a reducer goes on when ranks are lost, and when new ones come."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch_commhook.reducer.repeatable_step import RepeatableStep, Survivors
from torch_commhook.step.step_group import StepGroup


class Recovering(Protocol):
    """What takes steps that may have to be repeated."""

    def use_group(self, group: StepGroup) -> None:
        """Go on among other ranks.

        Raises:
            RuntimeError: they could not connect.
        """

    def forget_step(self) -> None:
        """Forget the step that is open."""


class Recovery:
    """Takes steps again among the ranks that are left, and lets new ones in.

    Args:
        reducer: whose steps these are.
        survivors: the ranks.
    """

    def __init__(self, reducer: Recovering, survivors: Survivors) -> None:
        self._weak = weakref.ref(reducer)
        self.survivors = survivors

    @property
    def _reducer(self) -> Recovering:
        reducer = self._weak()
        assert reducer is not None
        return reducer

    def go_on(self, step: RepeatableStep, error: BaseException) -> None:
        """Take a step again among the ranks that are left, or let it count.

        Args:
            step: that has failed.
            error: what this rank has seen.

        Raises:
            BaseException: this rank does not go on.
        """
        while True:
            error = step.agreement.fail_with(error)  # else the ranks would wait for each other
            step.drain(error)
            try:
                if self.survivors.go_on(error, has_results=step.has_results):
                    step.apply()
                    step.note = None  # whoever was to be let in is in by now
                    return
                step.put_memory_back()
            except BaseException:
                step.drop()
                self._reducer.forget_step()
                raise
            try:
                self._use_group()
            except RuntimeError as again:
                error = self.survivors.unreachable(again)
                continue
            try:
                self.survivors.give_state()
                step.repeat(self.survivors.group)
                return
            except BaseException as again:
                error = again

    def count(self, step: RepeatableStep) -> None:
        """Count a step, and let in those that want to take part.

        Raises:
            BaseException: this rank does not go on.
        """
        has_changed = self.survivors.step_ended(step.note)
        if has_changed or step.note is None:
            self.go_on_between_steps()

    def go_on_between_steps(self, error: BaseException | None = None) -> None:
        """Use the group of the ranks that are left. No step is under way on this rank.

        Args:
            error: after which they are to agree first on who is left; None if they have.

        Raises:
            BaseException: this rank does not go on.
        """
        while True:
            if error is not None:
                self.survivors.go_on(error, has_results=False)
            try:
                self._use_group()
                return
            except RuntimeError as again:
                error = self.survivors.unreachable(again)

    def _use_group(self) -> None:
        """Go on among other ranks, of which the buckets' memory has other shards."""
        self._reducer.use_group(self.survivors.group)
