"""A hook on a model with ranks that come and go: steps that the remaining ranks repeat."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_commhook.attachment.parameters import buffers_of, joined_bytes, unpack
from torch_commhook.attachment.training_state import NewRanks, TrainingState
from torch_commhook.buckets.grad_bucket import scaled_result
from torch_commhook.collectives.agreement import described
from torch_commhook.collectives.issuing import begin_maximum
from torch_commhook.collectives.plain import all_to_all, broadcast
from torch_commhook.elastic.ranks import Elastic, ElasticRanks
from torch_commhook.elastic.stragglers import StepReport, StepTimer
from torch_commhook.memory.hook_memory import KeptMemory
from torch_commhook.memory.states import add_to_error
from torch_commhook.reducer.buckets import BucketState
from torch_commhook.reducer.eager_step import EagerStep
from torch_commhook.reducer.reducer import Reducer
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.step_group import StepGroup
from torch_commhook.wording import warn_user

_log = logging.getLogger("torch_commhook.elastic")


def check_elastic_hook(attached: Attached) -> None:
    """Refuse a hook that ``elastic`` does not support."""
    if attached.hook.has_own_groups():
        raise ValueError(
            "attach: with elastic, the hook must communicate among all ranks, got "
            f"'{attached.name}' with process groups of its own"
        )


class ElasticTraining:
    """The ranks of a model's training, and the transfer of the state to new ones.

    Args:
        model: the model that is trained.
        attached: the first attached hook.
        settings: the user's settings.
        parameters: the names and parameters with gradients to average.
        shared: names and values that must be the same on all ranks.
        broadcast_buffers: whether all ranks take the first rank's buffers after each step.

    Attributes:
        ranks: the members of the training.
        new_ranks: the new members, and the state that they still have to receive.

    Raises:
        RuntimeError: a value differs from the other ranks, or too few ranks have joined.
    """

    def __init__(
        self,
        model: nn.Module,
        attached: Attached,
        settings: Elastic,
        parameters: list[tuple[str, Tensor]],
        shared: dict[str, object],
        *,
        broadcast_buffers: bool,
    ) -> None:
        self._broadcast_buffers = broadcast_buffers
        self._model = weakref.ref(model)
        self._first_attached = attached
        self._settings = settings
        self._reducer: Callable[[], ElasticReducer | None] = lambda: None
        self._pace: StepTimer | None = None
        if settings.straggler is not None:
            self._pace = StepTimer(settings.straggler, settings.straggler_steps)
        self._steps_measured = 0  # since the pace last began
        types = {parameter.device.type for _, parameter in parameters}
        self.ranks = ElasticRanks(settings, types - {"cpu"})
        self._state = TrainingState(
            model, settings.state, self.ranks, lambda: self._attached, str(shared["the hook"])
        )
        self.new_ranks = NewRanks(self.ranks, self._state)
        for name in ("straggler", "straggler_steps", "leave_out_stragglers"):
            shared[f"Elastic's {name}"] = getattr(settings, name)
        trained = {id(parameter) for _, parameter in parameters}
        shared["the parameters that are not trained"] = described(
            (name, each) for name, each in model.named_parameters() if id(each) not in trained
        )
        self.ranks.check_same({"the parameters": described(parameters), **shared})
        self.ranks.lets_in_late = lambda: not self._attached.keeps_ranks_apart
        self.ranks.keeps_error = lambda: self._attached.memory.error_bytes > 0
        self.ranks.enter()

    def hook_replaced(self, settings: dict[str, object]) -> None:
        """Note that all ranks use another hook from now on, which new ranks must attach."""
        self._state.printed_hook = str(settings["the hook"])
        self.ranks.change_settings(settings)

    def use(self, reducer: ElasticReducer) -> None:
        self._reducer = weakref.ref(reducer)

    @property
    def _attached(self) -> Attached:
        reducer = self._reducer()
        attached = None if reducer is None else reducer.attached
        return self._first_attached if attached is None else attached

    @property
    def group(self) -> StepGroup:
        return self.ranks.group

    @property
    def averaged(self) -> int:
        """The number of ranks with gradients of their own: the mean is over these."""
        return len(self.ranks.view.members) - len(self.new_ranks.joining)

    @property
    def leader(self) -> int:
        """The place in the group of the first rank with the whole state."""
        members, joining = self.ranks.view.members, self.new_ranks.joining
        return next(place for place, each in enumerate(members) if each not in joining)

    @property
    def stragglers(self) -> dict[int, float]:
        """The slow ranks, and their computing time divided by the median."""
        return {} if self._pace is None else self._pace.stragglers

    def stop_clock(self) -> None:
        """Stop measuring this rank's time: it waits for others from now on."""
        if self._pace is not None:
            self._pace.end()

    def note(self) -> Tensor:
        """This rank's message to the others at the end of a step: uint8, flat.

        All ranks get the elementwise maximum.
        """
        pace, view, own = self._pace, self.ranks.view, self.ranks.rank
        note = StepReport(
            len(view.members), compares=pace is not None, joins=bool(self.new_ranks.joining)
        )
        if self.new_ranks.has_all_pieces:
            note.write_has_all(own)
        note.wants_change = self.ranks.wants_change()
        if self.ranks.asked_by is not None:
            note.write_leaves(own)
        if pace is not None:
            note.write_time(own, pace.seconds(self._steps_measured))
            if self._settings.leave_out_stragglers:
                for rank in pace.stragglers:
                    note.leave_out(view.members.index(rank))
        return note.values

    def packed_buffers(self) -> Tensor | None:
        """The bytes of the model's buffers, or None. All ranks take the leader's."""
        model = self._model()
        if not self._broadcast_buffers or model is None:
            return None
        buffers = buffers_of(model).values()
        return joined_bytes(buffers) if buffers else None

    def unpack_buffers(self, sent: Tensor) -> None:
        model = self._model()
        if model is not None:
            unpack(sent, buffers_of(model).values())

    def go_on(self, error: BaseException, *, has_results: bool) -> bool:
        """Agree with the other ranks on who continues; as :meth:`ElasticRanks.go_on`."""
        if self._pace is not None:
            self._pace.skip()
        return self.ranks.go_on(error, has_results=has_results)

    def use_group(self, error: BaseException | None = None) -> None:
        """Use the group of the remaining ranks. No step is open on this rank.

        Args:
            error: the error after which ranks must first agree on who is left; None if they have.

        Raises:
            BaseException: this rank does not continue.
        """
        while True:
            if error is not None:
                self.go_on(error, has_results=False)
            reducer = self._reducer()
            assert reducer is not None
            try:
                reducer.use_group(self.group)
                return
            except RuntimeError as again:
                error = self.ranks.unreachable(again)

    def count_local_step(self) -> None:
        """Count a step that this rank has taken on its own."""
        self.ranks.trained += 1
        self._steps_measured += 1

    def step_ended(self, values: Tensor | None, *, lets_in: bool) -> bool:
        """Count a step or an exchange of all ranks, then admit and leave out the ranks they chose.

        Args:
            values: the combined notes of all members; None without notes.
            lets_in: whether new ranks may join now.

        Returns:
            Whether the members have changed.

        Raises:
            LeftOutError: the others continue without this rank, which was too slow.
        """
        pace, members = self._pace, self.ranks.view.members
        joins = bool(self.new_ranks.joining)
        note = StepReport(len(members), compares=pace is not None, joins=joins, values=values)
        if values is None:
            has_changed = self.ranks.step_ended(wants_change=False)
        else:
            if pace is not None:
                times = {members[place]: each for place, each in note.times().items()}
                pace.compare(self.ranks.membership.own, times)
            out = [members[place] for place in note.left_out()]
            leaving = [members[place] for place in note.leaving()]
            if len(members) - len(leaving) - len(out) < self._settings.min_ranks:
                out = []
            if leaving:
                self._hand_over(leaving, [*leaving, *out, *self.new_ranks.joining])
            has_changed = self.ranks.step_ended(
                wants_change=note.wants_change and lets_in,
                left_out=out,
                leaving=leaving,
                lets_in=lets_in,
            )
            if joins and not has_changed:
                having_all = [members[place] for place in note.having_all()]
                reducer = self._reducer()
                if self.new_ranks.have_all_pieces(having_all) and reducer is not None:
                    reducer.change_memory()  # for a mean over more ranks
        if pace is not None:
            pace.keep(self.ranks.view.members)
            if has_changed or values is None:
                pace.skip()  # ranks connect in the next step
            else:
                pace.begin()
            self._steps_measured = 0 if self._attached.keeps_ranks_apart else 1
        return has_changed

    def _hand_over(self, leaving: Sequence[int], excluded: Collection[int]) -> None:
        """Send the error memory of members that leave to others, which add it to their own.

        If a member is lost meanwhile, this memory is lost too. The log says so.

        Args:
            leaving: the members that leave.
            excluded: the members that receive none.
        """
        members, group = self.ranks.view.members, self.group
        errors = self._attached.memory.unsent_errors()
        receivers = [member for member in members if member not in excluded]
        if not errors or not receivers:
            return
        packed = joined_bytes(errors)
        sends, gets = [0] * len(members), [0] * len(members)
        for number, member in enumerate(leaving):
            receiver = receivers[number % len(receivers)]
            if member == self.ranks.membership.own:
                sends[members.index(receiver)] = len(packed)
            if receiver == self.ranks.membership.own:
                gets[members.index(member)] = len(packed)
        try:
            group.begin()
            received = all_to_all(
                packed[: sum(sends)],
                input_split_sizes=sends,
                output_split_sizes=gets,
                group=group.group,
            ).wait()
            group.end()
        except RuntimeError as error:
            lost = group.fail_with(error)
            _log.warning("the error memory of the ranks that leave is lost: %s", lost)
            return
        for place in range(0, len(received), len(packed)):
            given = [torch.empty_like(own) for own in errors]
            unpack(received[place : place + len(packed)], given)
            for own, more in zip(errors, given, strict=True):
                add_to_error(own, more, 1)
        self.ranks.handed_over.update(leaving)

    def leave(self) -> None:
        """Leave the training."""
        if self.new_ranks.is_receiving:
            warn_user(
                "torch_commhook: this rank leaves before it has the whole state of the training; "
                "its parameters are not those of the training"
            )
        self.ranks.leave()

    def before_forward(self) -> None:
        """Send new ranks their state. An error is only logged: it returns when the step begins."""
        self.ranks.end_if_left()
        try:
            self.new_ranks.give()
        except RuntimeError as error:
            _log.info("rank %d: before its step: %s", self.ranks.membership.own, error)

    def begin(self) -> None:
        """Wait for the state on a new rank; on other ranks, send it to the new ones."""
        reducer = self._reducer()
        assert reducer is not None
        self.new_ranks.begin(reducer.memory_loaded, self.use_group)


# ---- steps that change nothing until all ranks have all results ----------------------------------


class RepeatableStep(ABC):
    """A step that the remaining ranks repeat when a rank is lost.

    Attributes:
        training: the ranks.
        has_results: whether this rank has all results, also the combined :attr:`flags`.
        note: the ranks' combined notes at its end; None if the ranks have changed since.
        flags: the maximum of the ranks' results of :meth:`_send`.
    """

    training: ElasticTraining
    has_results = False
    note: Tensor | None = None
    flags: Tensor
    _group: StepGroup
    _buffers: Tensor | None = None

    @abstractmethod
    def _send(self) -> Tensor:
        """Send this rank's part of the step. Returns flags for all ranks: uint8, flat."""

    @abstractmethod
    def _receive(self) -> None:
        """Wait for the results, and keep them."""

    @abstractmethod
    def _write_results(self) -> None:
        """Write the results: all ranks have them."""

    @abstractmethod
    def drain(self, error: BaseException) -> object:
        """Wait for running collectives after an error."""

    @abstractmethod
    def undo(self) -> None:
        """Restore the hook's memory of before the step."""

    @abstractmethod
    def repeat(self, group: StepGroup) -> None:
        """Take the step again in the group of the remaining ranks."""

    def take(self) -> None:
        """Take the step until all ranks have all results.

        Raises:
            BaseException: a rank was lost, or another error occurred. See :attr:`has_results`.
        """
        training, group = self.training, self._group
        self.has_results = False
        note = training.note()  # first: it measures the time until here
        flags = self._send()
        # Before this rank reports that it has all results: others may need the rest.
        maximum = begin_maximum(group.group, torch.cat([note, flags]))
        buffers, leader = training.packed_buffers(), training.leader
        sent = None if buffers is None else broadcast(buffers, src=leader, group=group.group)
        self._receive()
        combined = maximum()
        self._buffers = None if sent is None else sent.wait()
        self.note, self.flags = combined[: len(note)], combined[len(note) :]
        training.new_ranks.take()
        self.has_results = True
        group.end()

    def go_on(self, error: BaseException) -> bool:
        """Repeat the failed step among the remaining ranks, or count it.

        Args:
            error: the error on this rank.

        Returns:
            Whether it counts: it has succeeded on all ranks, and some know that already.

        Raises:
            BaseException: this rank does not continue.
        """
        training = self.training
        while True:
            error = self._group.fail_with(error)  # otherwise the ranks would wait for each other
            self.drain(error)
            counts = False
            try:
                counts = training.go_on(error, has_results=self.has_results)
            finally:
                if not counts:
                    self.undo()
            if counts:
                self.note = None  # the ranks that it would admit have joined by now
                return True
            self.has_results = False  # of the step as it is repeated
            training.use_group()
            try:
                training.new_ranks.give()
                self.repeat(training.group)
                return False
            except BaseException as again:
                error = again

    def apply(self) -> None:
        """Apply the step: all ranks have all results."""
        self.training.new_ranks.write()
        self._write_results()
        if self._buffers is not None:
            self.training.unpack_buffers(self._buffers)

    def count(self, *, lets_in: bool = True) -> None:
        """Count the step, and admit ranks that want to join."""
        has_changed = self.training.step_ended(self.note, lets_in=lets_in)
        if has_changed or self.note is None:
            self.training.use_group()


class ElasticStep(EagerStep, RepeatableStep):
    """An eager step that writes no gradient until all ranks have all results.

    Attributes:
        failure: the error that has ended it early, until it is repeated.
    """

    _writes_late = True

    failure: BaseException | None = None
    _kept: KeptMemory
    _late: Sequence[tuple[BucketState, Tensor]]

    def train_with(self, training: ElasticTraining) -> None:
        """Set the ranks, before the step begins."""
        self.training = training
        self._kept = KeptMemory(self.attached.memory)

    def begin(self, on_step: Callable[[bool], None]) -> None:
        if self.has_begun:
            return
        self.training.ranks.end_if_left()
        try:
            self.training.new_ranks.give()  # if the model's own forward was not called
            super().begin(on_step)
        except Exception as error:
            self.failure = error

    def run_in_cpp(self) -> None:
        """Do nothing: the hook is called in Python, which can repeat a call."""

    def choose(self) -> None:
        memory = self.attached.memory
        if memory.scale != self._kept.scale:  # look_at_scale() has converted its errors
            self._kept = KeptMemory(memory)
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
        """Finish the step; as :meth:`EagerStep.finish`."""
        if self.failure is not None:
            raise self.failure
        self.take()
        self.apply()

    def _start(self, state: BucketState, gradients: list[Tensor] | None = None) -> None:
        if self.training.new_ranks.is_joining:
            for parameter in state.parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
        super()._start(state, gradients)

    def _send(self) -> Tensor:
        self._start_all()
        return self._parameters.locally_used(self._buckets, self.agreement)

    def _receive(self) -> None:
        self._late = self._of_those_that_give(self._results())

    def _of_those_that_give(
        self, results: list[tuple[BucketState, Tensor]]
    ) -> list[tuple[BucketState, Tensor]]:
        """The means over the ranks that give gradients, from those over all ranks."""
        size, averaged = self._group.size, self.training.averaged
        if size == averaged:
            return results
        scale = size / averaged
        return [(state, scaled_result(result, scale, state.dtype)) for state, result in results]

    def _write_results(self) -> None:
        self._apply(self._late, self.flags, [call.traffic for call in self._calls])

    def repeat(self, group: StepGroup) -> None:
        self.drop()
        if self.attached.choosing is not None:
            self.attached.choosing.step_repeats()
        self._next, self.failure = 0, None
        self._group = self.agreement = group
        group.begin()
        self.finish()

    def undo(self) -> None:
        self._kept.put_back()


class ElasticReducer(Reducer):
    """Averages gradients over ranks that come and go."""

    def __init__(
        self,
        training: ElasticTraining,
        named_parameters: Sequence[tuple[str, Tensor]],
        group: StepGroup,
        **settings: Any,
    ) -> None:
        super().__init__(named_parameters, group, **settings)
        self._training = training
        training.use(self)
        self.keep_buckets()  # new ranks do not know the order of others' gradients

    def _connect_hook(self, attached: Attached) -> None:
        self._training.use_group()

    def use_group(self, group: StepGroup) -> None:
        """Continue among other ranks. No step is open, or one that is to be repeated.

        Raises:
            RuntimeError: they could not connect.
        """
        group.users = self.group.users
        self.group = group
        if self._attached is not None:
            self._attached.use_group(group, self.device)
        self.change_memory()

    def change_memory(self) -> None:
        """Give the hook its memory among the present ranks."""
        attached, averaged = self._attached, self._training.averaged
        if attached is not None:
            attached.memory.change_ranks(self.group.rank, self.group.size, averaged=averaged)
        self._prepare_memory()

    def before_capture(self) -> None:
        """Refuse compiled autograd, which cannot repeat a backward."""
        raise RuntimeError(
            "torch_commhook: with elastic, backward must be eager, but compiled autograd was "
            "enabled"
        )

    def _step(self, attached: Attached) -> EagerStep:
        if attached.keeps_ranks_apart:
            return super()._step(attached)
        step = ElasticStep(attached, self)
        step.train_with(self._training)
        return step

    def _failed(self, step: EagerStep, error: BaseException) -> None:
        if not isinstance(step, ElasticStep):
            self._abort(step, error)
        try:
            if step.go_on(error):
                step.apply()
        except BaseException:
            step.drop()
            self._reset()
            raise

    def _finished(self, step: EagerStep) -> None:
        self._step_ended()
        if isinstance(step, ElasticStep):
            self._training.ranks.trained += 1
            step.count()
