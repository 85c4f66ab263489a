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
        attached: the hook.
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
        self._attached = attached
        self._settings = settings
        self._given = 0  # the last view whose new members have been given what they need
        self.ranks = ElasticRanks(settings)
        specs = [f"'{name}' of shape {tuple(p.shape)} and {p.dtype}" for name, p in parameters]
        self.ranks.check_same({"the parameters": specs, **shared})
        self.ranks.enter()

    @property
    def group(self) -> StepGroup:
        """The members' group at the moment."""
        return self.ranks.group

    def wants_change(self) -> bool:
        return self.ranks.wants_change()

    def packed_buffers(self) -> Tensor | None:
        model = self._model()
        buffers = buffers_of(model) if self._broadcast_buffers and model is not None else []
        return pack_buffers(buffers) if buffers else None

    def unpack_buffers(self, sent: Tensor) -> None:
        model = self._model()
        if model is not None:
            unpack(sent, buffers_of(model))

    def go_on(self, error: BaseException, *, has_results: bool) -> bool:
        return self.ranks.go_on(error, has_results=has_results)

    def unreachable(self, error: RuntimeError) -> Exception:
        return self.ranks.unreachable(error)

    def step_ended(self, wants_change: bool) -> bool:
        return self.ranks.step_ended(wants_change)

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
            self._load(unpacked(data))
            ranks.membership.is_new = False

    def _state(self) -> dict[str, Any]:
        memory = self._attached.memory
        return {
            "steps": self.ranks.steps,
            "tensors": {name: tensor.detach() for name, tensor in self._tensors().items()},
            "objects": states_of(self._settings.state),
            "hook": None if memory.remembers_nothing else memory.state_dict(),
        }

    def _tensors(self) -> dict[str, Tensor]:
        model = self._model()
        assert model is not None
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def _load(self, state: dict[str, Any]) -> None:
        own, given = self._tensors(), state["tensors"]
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(given[name])
        load_states(self._settings.state, state["objects"])
        memory = self._attached.memory
        if state["hook"] is not None:
            memory.load_state(memory.check_state(_of_new_rank(state["hook"], memory)))
        self.ranks.steps = state["steps"]


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
    hook: Callable[..., Any] = attached.hook
    if isinstance(hook, Hook) and hook.has_own_groups():
        raise ValueError(
            "attach: with elastic, the hook must communicate among all ranks, got "
            f"'{attached.name}' with process groups of its own"
        )
    if attached.keeps_ranks_apart:
        raise ValueError(
            f"attach: with elastic, the hook must average gradients, got '{attached.name}'"
        )
    for name, parameter in parameters:
        if parameter.device.type != "cpu":
            raise ValueError(
                f"attach: with elastic, parameters must be on the CPU, got '{name}' on "
                f"{parameter.device}"
            )
