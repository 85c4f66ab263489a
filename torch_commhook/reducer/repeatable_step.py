"""A step that the remaining ranks repeat when a rank is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from torch_commhook.buckets.results import scaled_result
from torch_commhook.collectives.plain import broadcast
from torch_commhook.memory.kept_memory import KeptMemory
from torch_commhook.metrics import BucketTraffic
from torch_commhook.reducer.buckets import BucketState
from torch_commhook.reducer.eager_step import EagerStep
from torch_commhook.step.step_end import begin_maximum
from torch_commhook.step.step_group import StepGroup


class Survivors(Protocol):
    """The ranks of a training, which may be others in its next step."""

    @property
    def group(self) -> StepGroup:
        """Those that take part at the moment."""

    def give_state(self) -> None:
        """Let new ranks have what they need, where this one is to give it to them.

        Called where the parameters are what the last step has made of them.
        """

    def take_state(self) -> None:
        """Wait for what this rank gets of the training's state in this step, if it is new.

        Raises:
            RuntimeError: a connection was closed.
        """

    def write_state(self) -> None:
        """Write what :meth:`take_state` has waited for: the step counts."""

    @property
    def is_joining(self) -> bool:
        """Whether this rank takes part with zeros, since it does not have the whole state yet."""

    @property
    def averaged(self) -> int:
        """How many ranks take part with gradients of their own: the mean is over these."""

    @property
    def leader(self) -> int:
        """The first rank that has the whole state, by its place in the group."""

    def note(self) -> Tensor:
        """What this rank tells the others at the end of a step: uint8, flat.

        All ranks take the maximum over them, element by element.
        """

    def packed_buffers(self) -> Tensor | None:
        """The bytes of the model's buffers, of which all ranks take the leader's; or None."""

    def unpack_buffers(self, sent: Tensor) -> None:
        """Write the buffers of the leader."""

    def go_on(self, error: BaseException, *, has_results: bool) -> bool:
        """Agree with the other ranks on who goes on after a failure.

        Args:
            error: what this rank has seen.
            has_results: whether it has all results of the step that is open.

        Returns:
            Whether that step counts: then it has gone well on all ranks, and some know it already.

        Raises:
            BaseException: this rank does not go on.
        """

    def unreachable(self, error: RuntimeError) -> Exception:
        """Let the step fail, since this rank could not connect to all others; gives why."""

    def step_ended(self, note: Tensor | None) -> bool:
        """A step counts on all ranks, and on this one its results are written.

        Args:
            note: the maximum of :meth:`note` over the ranks; None where these have changed since.

        Returns:
            Whether the ranks are others now.

        Raises:
            LeftOutError: the others go on without this rank, which was too slow.
        """


class RepeatableStep(EagerStep):
    """An eager step that writes no gradient until all ranks have all results.

    Attributes:
        failure: what has ended it early, until it is taken again.
        has_results: whether this rank has all results, and knows which parameters ranks have used.
        note: what the ranks have told each other at its end; None where these have changed since.
    """

    _writes_late = True

    failure: BaseException | None = None
    has_results = False
    note: Tensor | None = None
    _survivors: Survivors
    _kept: KeptMemory
    _buffers: Tensor | None = None
    _outcome: tuple[list[tuple[BucketState, Tensor]], Tensor, list[BucketTraffic]]

    def survives_with(self, survivors: Survivors) -> None:
        """Be told of the ranks; before the step begins."""
        self._survivors = survivors
        self._kept = KeptMemory(self.attached.memory)

    def begin(self, on_step: Callable[[bool], None]) -> None:
        if self.has_begun:
            return
        try:
            self._survivors.give_state()  # where the model's own forward was not called
            super().begin(on_step)
        except Exception as error:
            self.failure = error

    def choose(self) -> None:
        if self.failure is None:
            try:
                super().choose()
            except RuntimeError as error:  # a rank may be lost
                self.fail(error)

    def start_full(self) -> None:
        if self.failure is None:
            try:
                super().start_full()
            except Exception as error:
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Starts the hook on no further bucket until the step is repeated."""
        self._starting = False
        self.failure = error

    def finish(self) -> None:
        """As there.

        Raises:
            BaseException: a rank was lost, or something else has failed. See :attr:`has_results`.
        """
        if self.failure is not None:
            raise self.failure
        note = self._survivors.note()  # first: it has the time until here
        self._start_all()
        used = self._use.locally_used(self._buckets, self.agreement)
        # Before this rank says that it has all results: others may have to know what was used.
        maximum = begin_maximum(self._group.group, torch.cat([note, used]))
        buffers = self._survivors.packed_buffers()
        group, leader = self._group.group, self._survivors.leader
        sent = None if buffers is None else broadcast(buffers, src=leader, group=group)
        late = self._of_those_that_give(self._results())
        notes = maximum()
        self._buffers = None if sent is None else sent.wait()
        self.note, used = notes[: len(note)], notes[len(note) :]
        self._outcome = late, used, [started.call.traffic for started in self._started]
        self._survivors.take_state()
        self.has_results = True
        self.agreement.end()
        self.apply()

    def _start(self, state: BucketState, gradients: list[Tensor] | None = None) -> None:
        if self._survivors.is_joining:
            for parameter in state.parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
        super()._start(state, gradients)

    def _of_those_that_give(
        self, results: list[tuple[BucketState, Tensor]]
    ) -> list[tuple[BucketState, Tensor]]:
        """The means over the ranks that give gradients, of those over all ranks."""
        size, averaged = self._group.size, self._survivors.averaged
        if size == averaged:
            return results
        scale = size / averaged
        return [(state, scaled_result(result, scale, state.dtype)) for state, result in results]

    def apply(self) -> None:
        """Let the step count: all ranks have all results."""
        self._survivors.write_state()
        self._apply(*self._outcome)
        if self._buffers is not None:
            self._survivors.unpack_buffers(self._buffers)

    def repeat(self, group: StepGroup) -> None:
        """Repeats the step with this rank's own gradients.

        Args:
            group: the ranks that are left.

        Raises:
            BaseException: as :meth:`finish`.
        """
        self.drop()
        if self.attached.choosing is not None:
            self.attached.choosing.step_repeats()
        self._next, self.failure, self.has_results = 0, None, False
        self._group = self.agreement = group
        group.begin()
        self.finish()

    def put_memory_back(self) -> None:
        """Restores the hook's memory of before the step."""
        self._kept.put_back()
