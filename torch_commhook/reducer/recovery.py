"""How a reducer continues when ranks are lost, and when new ones join."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch_commhook.reducer.repeatable_step import RepeatableStep, Survivors
from torch_commhook.step.step_group import StepGroup


class Recovering(Protocol):
    """An object whose steps may have to be repeated."""

    def use_group(self, group: StepGroup) -> None:
        """Continue among other ranks.

        Raises:
            RuntimeError: they could not connect.
        """

    def forget_step(self) -> None:
        """Forget the open step."""


class Recovery:
    """Repeats steps among the remaining ranks, and admits new ranks.

    Args:
        reducer: the object whose steps these are.
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
        """Repeat a step among the remaining ranks, or count it.

        Args:
            step: the failed step.
            error: the error on this rank.

        Raises:
            BaseException: this rank does not continue.
        """
        while True:
            error = step.agreement.fail_with(error)  # otherwise the ranks would wait for each other
            step.drain(error)
            try:
                if self.survivors.go_on(error, has_results=step.has_results):
                    step.apply()
                    step.note = None  # the ranks that it would admit have joined by now
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
        """Count a step, and admit ranks that want to join.

        Raises:
            BaseException: this rank does not continue.
        """
        has_changed = self.survivors.step_ended(step.note)
        if has_changed or step.note is None:
            self.go_on_between_steps()

    def go_on_between_steps(self, error: BaseException | None = None) -> None:
        """Use the group of the remaining ranks. No step is open on this rank.

        Args:
            error: the error after which ranks must first agree on who is left; None if they have.

        Raises:
            BaseException: this rank does not continue.
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
        """Continue among other ranks; the buckets' memory then has other shards."""
        self._reducer.use_group(self.survivors.group)
