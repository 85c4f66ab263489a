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
    """The ranks of a training. They may change between steps."""

    @property
    def group(self) -> StepGroup:
        """The group of the present ranks."""

    def give_state(self) -> None:
        """Send new ranks their state, if this rank is the sender.

        Called while the parameters have their values after the last step.
        """

    def take_state(self) -> None:
        """Wait for this rank's part of the training's state in this step, if it is new.

        Raises:
            RuntimeError: a connection was closed.
        """

    def write_state(self) -> None:
        """Write the part that :meth:`take_state` has waited for: the step counts."""

    @property
    def is_joining(self) -> bool:
        """Whether this rank takes part with zeros, since it does not have the whole state yet."""

    @property
    def averaged(self) -> int:
        """The number of ranks with gradients of their own: the mean is over these."""

    @property
    def leader(self) -> int:
        """The place in the group of the first rank with the whole state."""

    def note(self) -> Tensor:
        """This rank's message to the others at the end of a step: uint8, flat.

        All ranks get the elementwise maximum.
        """

    def packed_buffers(self) -> Tensor | None:
        """The bytes of the model's buffers, or None. All ranks take the leader's."""

    def unpack_buffers(self, sent: Tensor) -> None:
        """Write the leader's buffers."""

    def go_on(self, error: BaseException, *, has_results: bool) -> bool:
        """Agree with the other ranks on who continues after a failure.

        Args:
            error: the error on this rank.
            has_results: whether this rank has all results of the open step.

        Returns:
            Whether that step counts: it has succeeded on all ranks, and some know that already.

        Raises:
            BaseException: this rank does not continue.
        """

    def unreachable(self, error: RuntimeError) -> Exception:
        """Fail the step because this rank could not connect to all others; returns the error."""

    def step_ended(self, note: Tensor | None) -> bool:
        """Note that a step counts on all ranks, and that this rank has written its results.

        Args:
            note: the maximum of :meth:`note` over the ranks; None if these have changed since.

        Returns:
            Whether the ranks have changed now.

        Raises:
            LeftOutError: the others continue without this rank, which was too slow.
        """


class RepeatableStep(EagerStep):
    """An eager step that writes no gradient until all ranks have all results.

    Attributes:
        failure: the error that has ended it early, until it is repeated.
        has_results: whether this rank has all results, and knows which parameters ranks have used.
        note: the ranks' combined notes at its end; None if the ranks have changed since.
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
        """Set the ranks, before the step begins."""
        self._survivors = survivors
        self._kept = KeptMemory(self.attached.memory)

    def begin(self, on_step: Callable[[bool], None]) -> None:
        if self.has_begun:
            return
        try:
            self._survivors.give_state()  # if the model's own forward was not called
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
        """Start the hook on no further bucket until the step is repeated."""
        self._starting = False
        self.failure = error

    def finish(self) -> None:
        """Finish the step; as :meth:`EagerStep.finish`.

        Raises:
            BaseException: a rank was lost, or another error occurred. See :attr:`has_results`.
        """
        if self.failure is not None:
            raise self.failure
        note = self._survivors.note()  # first: it measures the time until here
        self._start_all()
        used = self._use.locally_used(self._buckets, self.agreement)
        # Before this rank reports that it has all results: others may need to know what was used.
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
        """The means over the ranks that give gradients, from those over all ranks."""
        size, averaged = self._group.size, self._survivors.averaged
        if size == averaged:
            return results
        scale = size / averaged
        return [(state, scaled_result(result, scale, state.dtype)) for state, result in results]

    def apply(self) -> None:
        """Apply the step: all ranks have all results."""
        self._survivors.write_state()
        self._apply(*self._outcome)
        if self._buffers is not None:
            self._survivors.unpack_buffers(self._buffers)

    def repeat(self, group: StepGroup) -> None:
        """Repeat the step with this rank's own gradients.

        Args:
            group: the group of the remaining ranks.

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
        """Restore the hook's memory of before the step."""
        self._kept.put_back()
