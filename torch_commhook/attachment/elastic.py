"""A hook on a model whose ranks come and go."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_commhook.attachment.buffers import buffers_of, unpack
from torch_commhook.attachment.buffers import packed as pack_buffers
from torch_commhook.elastic.pace import Note, Pace
from torch_commhook.elastic.ranks import ElasticRanks, donors_of
from torch_commhook.elastic.settings import Elastic
from torch_commhook.elastic.transfer import (
    load_states,
    packed,
    receive,
    send,
    states_of,
    unpacked,
)
from torch_commhook.hooks.base import Hook
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.reducer.reducer import Reducer
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.step_group import StepGroup

_log = logging.getLogger("torch_commhook.elastic")


class ElasticTraining:
    """The ranks of a model's training, and what new ones get.

    Args:
        model: which is trained.
        attached: the hook that is attached first.
        settings: as a user gives them.
        parameters: names and parameters whose gradients are averaged.
        shared: names and values that must be the same on all ranks.
        broadcast_buffers: whether all ranks take the first one's buffers after each step.

    Attributes:
        ranks: who takes part.

    Raises:
        RuntimeError: something differs from the other ranks; too few have come.
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
        self._steps_measured = 0  # since the pace was begun
        self._given = 0  # the last view whose new members have been given what they need
        self.ranks = ElasticRanks(settings)
        specs = [f"'{name}' of shape {tuple(p.shape)} and {p.dtype}" for name, p in parameters]
        for name in ("straggler", "straggler_steps", "leave_out_stragglers"):
            shared[f"Elastic's {name}"] = getattr(settings, name)
        self.ranks.check_same({"the parameters": specs, **shared})
        self.ranks.lets_in_late = lambda: not self._attached.keeps_ranks_apart
        self.ranks.keeps_error = lambda: self._attached.memory.error_bytes > 0
        self.ranks.enter()

    def use(self, reducer: Reducer) -> None:
        """Be the ranks of a reducer."""
        self._reducer = weakref.ref(reducer)
        reducer.survivors = self

    @property
    def _attached(self) -> Attached:
        """The hook at the moment."""
        reducer = self._reducer()
        attached = None if reducer is None else reducer.attached
        return self._first_attached if attached is None else attached

    @property
    def group(self) -> StepGroup:
        """The members' group at the moment."""
        return self.ranks.group

    @property
    def stragglers(self) -> dict[int, float]:
        """The ranks that are slow, and their computing time over the median."""
        return {} if self._pace is None else self._pace.stragglers

    def stop_clock(self) -> None:
        if self._pace is not None:
            self._pace.end()

    def note(self) -> Tensor:
        pace, view, own = self._pace, self.ranks.view, self.ranks.rank
        note = Note(len(view.members), compares=pace is not None)
        note.wants_change = self.ranks.wants_change()
        if pace is not None:
            note.write_time(own, pace.seconds(self._steps_measured))
            if self._settings.leave_out_stragglers:
                for rank in pace.stragglers:
                    note.leave_out(view.members.index(rank))
        return note.values

    def packed_buffers(self) -> Tensor | None:
        model = self._model()
        buffers = buffers_of(model) if self._broadcast_buffers and model is not None else []
        return pack_buffers(buffers) if buffers else None

    def unpack_buffers(self, sent: Tensor) -> None:
        model = self._model()
        if model is not None:
            unpack(sent, buffers_of(model))

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
        reducer = self._reducer()
        assert reducer is not None
        reducer.go_on_between_steps()

    def _ended(self, values: Tensor | None, *, lets_in: bool) -> bool:
        """Count what all ranks have done, and let in or leave out whom they want to."""
        pace, members = self._pace, self.ranks.view.members
        note = Note(len(members), compares=pace is not None, values=values)
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
        if pace is not None:
            pace.keep(self.ranks.view.members)
            if has_changed or values is None:
                pace.skip()  # ranks connect in the next step
            else:
                pace.begin()
            self._steps_measured = 0 if self._attached.keeps_ranks_apart else 1
        return has_changed

    def leave(self) -> None:
        """Leaves the training."""
        self.ranks.leave()

    # ---- what new ranks get ----------------------------------------------------------------------

    def give_state(self) -> None:
        """Sends new ranks their state, if this rank is their donor.

        Called where the parameters are what the last step has made of them.
        """
        ranks, view = self.ranks, self.ranks.view
        if view.number == self._given:
            return
        self._given = view.number
        own = ranks.membership.own
        places = [view.members.index(new) for new, donor in donors_of(view).items() if donor == own]
        if places:
            data, group = packed(self._state()), ranks.group.group

            def give() -> None:
                for place in places:
                    try:
                        send(data, group, place)
                    except RuntimeError as error:  # it is lost, or another rank is
                        _log.warning("rank %d: a new rank did not get its state: %s", own, error)

            threading.Thread(target=give, name="commhook-state", daemon=True).start()

    def begin(self, reducer: Reducer) -> None:
        """Waits for the state if this rank is new; sends it to the ranks that begin if not."""
        ranks = self.ranks
        if not ranks.membership.is_new:
            self.give_state()
        while ranks.membership.is_new:
            view = ranks.view
            try:
                donor = view.members.index(donors_of(view)[ranks.membership.own])
                data = receive(ranks.group.group, donor)
            except RuntimeError as error:
                reducer.go_on_between_steps(error)
                continue
            self._load(unpacked(data), reducer)
            ranks.membership.is_new = False

    def _state(self) -> dict[str, Any]:
        memory, local_steps = self._attached.memory, self._attached.local_steps
        return {
            "steps": self.ranks.steps,
            "trained": self.ranks.trained,
            "place": None if local_steps is None else local_steps.place(),
            "tensors": {name: tensor.detach() for name, tensor in self._tensors().items()},
            "objects": states_of(self._settings.state),
            "hook": None if memory.remembers_nothing else memory.state_dict(),
        }

    def _tensors(self) -> dict[str, Tensor]:
        model = self._model()
        assert model is not None
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def _load(self, state: dict[str, Any], reducer: Reducer) -> None:
        own, given = self._tensors(), state["tensors"]
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(given[name])
        load_states(self._settings.state, state["objects"])
        memory = self._attached.memory
        if state["hook"] is not None:
            memory.load_state(memory.check_state(_of_new_rank(state["hook"], memory)))
            reducer.memory_loaded(state["hook"]["buckets"])
        if self._attached.local_steps is not None:
            self._attached.local_steps.begin_at(state["place"])
        self.ranks.steps, self.ranks.trained = state["steps"], state["trained"]


def _of_new_rank(state: dict[str, Any], memory: HookMemory) -> dict[str, Any]:
    """Turns another rank's state of the hook into that of a new rank, with empty error memory."""
    (other,) = [key for key in state if key.startswith("rank")]
    zeros = {
        kind: {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        for kind, tensors in state.pop(other).items()
    }
    rank, world_size = memory.place
    return {**state, "world_size": world_size, f"rank{rank}": zeros}


def check_fits(attached: Attached, parameters: list[tuple[str, Tensor]]) -> None:
    """Refuses a hook or a model that ``elastic`` does not support.

    Raises:
        ValueError: it cannot.
    """
    check_elastic_hook(attached)
    for name, parameter in parameters:
        if parameter.device.type != "cpu":
            raise ValueError(
                f"attach: with elastic, parameters must be on the CPU, got '{name}' on "
                f"{parameter.device}"
            )


def check_elastic_hook(attached: Attached) -> None:
    """Refuses a hook that ``elastic`` does not support.

    Raises:
        ValueError: it cannot.
    """
    hook: Callable[..., Any] = attached.hook
    if isinstance(hook, Hook) and hook.has_own_groups():
        raise ValueError(
            "attach: with elastic, the hook must communicate among all ranks, got "
            f"'{attached.name}' with process groups of its own"
        )
