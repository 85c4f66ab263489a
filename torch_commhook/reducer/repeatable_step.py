"""How a reducer continues when ranks are lost or come: the step is repeated."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from torch_commhook.buckets.grad_bucket import scaled_result
from torch_commhook.collectives.issuing import begin_maximum
from torch_commhook.collectives.plain import broadcast
from torch_commhook.memory.hook_memory import KeptMemory
from torch_commhook.metrics import BucketTraffic
from torch_commhook.reducer.buckets import BucketState
from torch_commhook.reducer.eager_step import EagerStep
from torch_commhook.step.step_group import StepGroup

# ---- a step that the remaining ranks repeat when a rank is lost ----------------------------------


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


# ---- how a reducer continues when ranks are lost, and when new ones join -------------------------


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
