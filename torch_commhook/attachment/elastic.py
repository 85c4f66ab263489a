"""A hook on a model with ranks that come and go."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torch_commhook.attachment.buffers import (
    buffers_of,
    first_values,
    kind_of,
    packed,
    unpack,
    why_not_written,
)
from torch_commhook.attachment.new_ranks import NewRanks
from torch_commhook.attachment.parameters import ignored_names
from torch_commhook.attachment.training_state import TrainingState
from torch_commhook.attachment.user_warning import warn_user
from torch_commhook.collectives.agreement import described
from torch_commhook.elastic.pace import Note, Pace
from torch_commhook.elastic.ranks import ElasticRanks
from torch_commhook.elastic.settings import Elastic
from torch_commhook.hooks.base import Hook
from torch_commhook.reducer.recovery import Recovery
from torch_commhook.reducer.reducer import Reducer
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.step_group import StepGroup

_log = logging.getLogger("torch_commhook.elastic")


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
        self._reducer: Callable[[], Reducer | None] = lambda: None
        self._pace: Pace | None = None
        if settings.straggler is not None:
            self._pace = Pace(settings.straggler, settings.straggler_steps)
        self._steps_measured = 0  # since the pace last began
        self.ranks = ElasticRanks(settings)
        self._state = TrainingState(
            model, settings.state, self.ranks, lambda: self._attached, str(shared["the hook"])
        )
        self.new_ranks = NewRanks(self.ranks, self._state, lambda: self._attached.keeps_ranks_apart)
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
        """Note that all ranks use another hook from now on, which new ranks must attach.

        Args:
            settings: the hook's, from ``compared_settings()``.
        """
        self._state.printed_hook = str(settings["the hook"])
        self.ranks.change_settings(settings)

    def use(self, reducer: Reducer) -> None:
        """Serve a reducer: it recovers with these ranks."""
        self._reducer = weakref.ref(reducer)
        reducer.recovery = Recovery(reducer, self)

    @property
    def _attached(self) -> Attached:
        """The attached hook now."""
        reducer = self._reducer()
        attached = None if reducer is None else reducer.attached
        return self._first_attached if attached is None else attached

    @property
    def _recovery(self) -> Recovery:
        reducer = self._reducer()
        assert reducer is not None and reducer.recovery is not None
        return reducer.recovery

    @property
    def group(self) -> StepGroup:
        """The members' group now."""
        return self.ranks.group

    @property
    def is_joining(self) -> bool:
        """Whether this rank contributes zeros, because it does not have the whole state yet."""
        return self.new_ranks.is_joining

    @property
    def lacks_state(self) -> bool:
        """Whether this rank is new, and still lacks a part of the state."""
        return self.new_ranks.lacks_state

    @property
    def averaged(self) -> int:
        return len(self.ranks.view.members) - len(self.new_ranks.joining)

    @property
    def leader(self) -> int:
        members, joining = self.ranks.view.members, self.new_ranks.joining
        return next(place for place, each in enumerate(members) if each not in joining)

    @property
    def stragglers(self) -> dict[int, float]:
        """The slow ranks, and their computing time divided by the median."""
        return {} if self._pace is None else self._pace.stragglers

    def stop_clock(self) -> None:
        if self._pace is not None:
            self._pace.end()

    def note(self) -> Tensor:
        pace, view, own = self._pace, self.ranks.view, self.ranks.rank
        note = Note(
            len(view.members), compares=pace is not None, joins=bool(self.new_ranks.joining)
        )
        if self.new_ranks.has_all_pieces:
            note.write_has_all(own)
        note.wants_change = self.ranks.wants_change()
        if pace is not None:
            note.write_time(own, pace.seconds(self._steps_measured))
            if self._settings.leave_out_stragglers:
                for rank in pace.stragglers:
                    note.leave_out(view.members.index(rank))
        return note.values

    def packed_buffers(self) -> Tensor | None:
        model = self._model()
        if not self._broadcast_buffers or model is None:
            return None
        buffers = buffers_of(model).values()
        return packed(buffers) if buffers else None

    def unpack_buffers(self, sent: Tensor) -> None:
        model = self._model()
        if model is not None:
            unpack(sent, buffers_of(model).values())

    def go_on(self, error: BaseException, *, has_results: bool) -> bool:
        if self._pace is not None:
            self._pace.skip()
        return self.ranks.go_on(error, has_results=has_results)

    def unreachable(self, error: RuntimeError) -> Exception:
        return self.ranks.unreachable(error)

    def step_ended(self, note: Tensor | None) -> bool:
        self.ranks.trained += 1
        return self._ended(note, lets_in=True)

    def count_local_step(self) -> None:
        self.ranks.trained += 1
        self._steps_measured += 1

    def exchange_ended(self, note: Tensor | None, *, lets_in: bool) -> bool:
        return self._ended(note, lets_in=lets_in)

    def use_group(self) -> None:
        self._recovery.go_on_between_steps()

    def _ended(self, values: Tensor | None, *, lets_in: bool) -> bool:
        """Count a step or an exchange of all ranks, then admit and leave out the ranks they chose.

        Args:
            values: the combined notes of all members; None without notes.
            lets_in: whether new ranks may join now.

        Returns:
            Whether the members have changed.
        """
        pace, members = self._pace, self.ranks.view.members
        joins = bool(self.new_ranks.joining)
        note = Note(len(members), compares=pace is not None, joins=joins, values=values)
        if values is None:
            has_changed = self.ranks.step_ended(wants_change=False)
        else:
            if pace is not None:
                times = {members[place]: each for place, each in note.times().items()}
                pace.compare(self.ranks.membership.own, times)
            out = [members[place] for place in note.left_out()]
            if len(members) - len(out) < self._settings.min_ranks:
                out = []
            has_changed = self.ranks.step_ended(
                wants_change=note.wants_change and lets_in, left_out=out, lets_in=lets_in
            )
            if joins and not has_changed:
                having_all = [members[place] for place in note.having_all()]
                if self.new_ranks.have_all_pieces(having_all):
                    self._change_memory()
        if pace is not None:
            pace.keep(self.ranks.view.members)
            if has_changed or values is None:
                pace.skip()  # ranks connect in the next step
            else:
                pace.begin()
            self._steps_measured = 0 if self._attached.keeps_ranks_apart else 1
        return has_changed

    def _change_memory(self) -> None:
        """Adapt the hook's memory to a mean over more ranks."""
        reducer = self._reducer()
        assert reducer is not None
        reducer.change_memory()

    def leave(self) -> None:
        """Leave the training."""
        if self.new_ranks.is_receiving:
            warn_user(
                "torch_commhook: this rank leaves before it has the whole state of the training; "
                "its parameters are not those of the training"
            )
        self.ranks.leave()

    def before_forward(self) -> None:
        """Call :meth:`give_state`. An error is only logged: it returns when the step begins."""
        try:
            self.give_state()
        except RuntimeError as error:
            _log.info("rank %d: before its step: %s", self.ranks.membership.own, error)

    def give_state(self) -> None:
        self.new_ranks.give()

    def take_state(self) -> None:
        self.new_ranks.take()

    def write_state(self) -> None:
        self.new_ranks.write()

    def begin(self, reducer: Reducer) -> None:
        """Wait for the state on a new rank; on other ranks, send it to the new ones.

        Raises:
            RuntimeError: the other ranks attached another hook while this rank waited.
        """
        self.new_ranks.begin(reducer, self._recovery)


def check_fits(attached: Attached, model: nn.Module, parameters: list[tuple[str, Tensor]]) -> None:
    """Refuse a hook or a model that ``elastic`` does not support.

    Args:
        attached: the hook.
        model: the model.
        parameters: the names and parameters with gradients to average.

    Raises:
        ValueError: a parameter is not on the CPU, each rank has one for itself, or the hook has
            process groups of its own.
        RuntimeError: a parameter or buffer cannot be written.
    """
    check_elastic_hook(attached)
    ignored = ignored_names(model)
    if ignored:
        raise ValueError(
            "attach: with elastic, new ranks get all parameters and buffers from another rank, so "
            "the model's _ddp_params_and_buffers_to_ignore must be empty, got "
            f"{sorted(ignored)}"
        )
    for name, parameter in parameters:
        if parameter.device.type != "cpu":
            raise ValueError(
                f"attach: with elastic, parameters must be on the CPU, got '{name}' on "
                f"{parameter.device}"
            )
    for name, tensor in first_values(model).items():
        why = why_not_written(tensor)
        if why is not None:
            raise RuntimeError(
                "attach: with elastic, new ranks get all parameters and buffers from another rank, "
                f"but {kind_of(model, name)} '{name}' cannot be written: {why}"
            )


def check_elastic_hook(attached: Attached) -> None:
    """Refuse a hook that ``elastic`` does not support.

    Raises:
        ValueError: the hook has process groups of its own.
    """
    hook: Callable[..., Any] = attached.hook
    if isinstance(hook, Hook) and hook.has_own_groups():
        raise ValueError(
            "attach: with elastic, the hook must communicate among all ranks, got "
            f"'{attached.name}' with process groups of its own"
        )
