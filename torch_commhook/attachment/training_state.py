"""The state of a training, which a rank receives when it joins."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_commhook.elastic import joining
from torch_commhook.elastic.pieces import Pieces
from torch_commhook.elastic.ranks import ElasticRanks
from torch_commhook.elastic.transfer import groups_of, load_groups, load_states, states_of
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.reducer.reducer import Reducer
from torch_commhook.step.attached_hook import Attached

#: If an optimizer has any of these hooks, its ``state_dict()`` may differ from its state.
_STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class TrainingState:
    """Reads the state of a training on a donor, and writes it on a new rank.

    Args:
        model: the model that is trained. Only a weak reference is kept.
        objects: optimizers, schedulers and other objects with ``state_dict``, from
            ``Elastic(state=)``.
        ranks: the ranks of the training. Their counters are part of the state.
        attached: returns the hook that is attached now.
        printed_hook: the initial :attr:`printed_hook`.

    Attributes:
        printed_hook: the text of the hook that is attached now, with its settings.
    """

    def __init__(
        self,
        model: nn.Module,
        objects: Sequence[Any],
        ranks: ElasticRanks,
        attached: Callable[[], Attached],
        printed_hook: str,
    ) -> None:
        self._weak = weakref.ref(model)
        self._objects = objects
        self._ranks = ranks
        self._attached = attached
        self.printed_hook = printed_hook

    @property
    def _model(self) -> nn.Module:
        model = self._weak()
        assert model is not None
        return model

    @property
    def is_large(self) -> bool:
        """Whether new ranks get the parameters in pieces."""
        return sum(each.nbytes for each in self._model.parameters()) > joining.AT_ONCE

    @property
    def nbytes(self) -> int:
        """The bytes of the model's parameters and buffers."""
        return sum(each.nbytes for each in self._tensors().values())

    def pieces(self) -> Pieces:
        """The parameters and the optimizers' state for them, in pieces."""
        return Pieces(list(self._model.parameters()), self._optimizers)

    @property
    def _others_than_optimizers(self) -> list[Any]:
        optimizers = self._optimizers
        return [each for each in self._objects if each not in optimizers]

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose state can be sent in pieces."""
        plain = torch.optim.Optimizer
        return [
            each
            for each in self._objects
            if isinstance(each, plain)
            and type(each).state_dict is plain.state_dict
            and type(each).load_state_dict is plain.load_state_dict
            and not any(getattr(each, hooks) for hooks in _STATE_HOOKS)
        ]

    def whole(self) -> dict[str, Any]:
        """The whole state for a new rank."""
        return {
            **self._counters(),
            "tensors": {name: tensor.detach() for name, tensor in self._tensors().items()},
            "objects": states_of(self._objects),
        }

    def head(self) -> dict[str, Any]:
        """The part of the state that a new rank needs before the first piece."""
        return {**self._counters(), **self.rest()}

    def rest(self) -> dict[str, Any]:
        """The part of the state that is not in pieces.

        It contains buffers, other objects and the optimizers' settings.
        """
        return {
            "tensors": dict(self._model.named_buffers()),
            "objects": states_of(self._others_than_optimizers),
            "groups": [groups_of(each) for each in self._optimizers],
            "of_no_parameter": self.pieces().others(),
        }

    def _counters(self) -> dict[str, Any]:
        memory, local_steps = self._attached().memory, self._attached().local_steps
        return {
            "steps": self._ranks.steps,
            "trained": self._ranks.trained,
            "printed_hook": self.printed_hook,
            "place": None if local_steps is None else local_steps.place(),
            "hook": None if memory.remembers_nothing else _without_own(memory.state_dict()),
        }

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    def load(self, state: dict[str, Any], reducer: Reducer) -> None:
        """Write a donor's :meth:`whole` or :meth:`head` into the model, the objects and the hook.

        Raises:
            RuntimeError: the other ranks attached another hook while this rank waited.
        """
        if state["printed_hook"] != self.printed_hook:
            raise RuntimeError(
                f"attach: the hook must be the same on all ranks: this one has "
                f"{self.printed_hook}, the others have {state['printed_hook']}"
            )
        self._load_tensors(state)
        attached = self._attached()
        if state["hook"] is not None:
            memory = attached.memory
            memory.load_state(memory.check_state(_of_new_rank(state["hook"], memory)))
            reducer.memory_loaded(state["hook"]["buckets"])
        if attached.local_steps is not None:
            attached.local_steps.begin_at(state["place"])
        self._ranks.steps, self._ranks.trained = state["steps"], state["trained"]

    def load_rest(self, state: dict[str, Any]) -> None:
        """Write a donor's :meth:`rest` into the model and the objects.

        Raises:
            ValueError: the state does not fit this rank's model or objects.
        """
        try:
            self._load_tensors(state)
        except RuntimeError as error:  # callers take a RuntimeError for a closed connection
            raise ValueError(
                f"Elastic: another rank's state does not fit this one: {error}"
            ) from error

    def _load_tensors(self, state: dict[str, Any]) -> None:
        own = self._tensors()
        with torch.no_grad():
            for name, tensor in state["tensors"].items():
                own[name].copy_(tensor)
        if "groups" in state:
            load_states(self._others_than_optimizers, state["objects"])
            for optimizer, groups in zip(self._optimizers, state["groups"], strict=True):
                load_groups(optimizer, groups)
            self.pieces().put_others(state["of_no_parameter"])
        else:
            load_states(self._objects, state["objects"])


def _without_own(state: dict[str, Any]) -> dict[str, Any]:
    """A rank's state of the hook, with one number in place of each of the rank's own tensors."""
    (own,) = [key for key in state if key.startswith("rank")]
    return {
        **state,
        own: {
            kind: {
                name: torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
                for name, tensor in tensors.items()
            }
            for kind, tensors in state[own].items()
        },
    }


def _of_new_rank(state: dict[str, Any], memory: HookMemory) -> dict[str, Any]:
    """The state of the hook for a new rank, from another rank's: its own tensors are zeros."""
    (other,) = [key for key in state if key.startswith("rank")]
    zeros = {
        kind: {
            name: torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
            for name, tensor in tensors.items()
        }
        for kind, tensors in state.pop(other).items()
    }
    rank, world_size = memory.place
    return {**state, "world_size": world_size, f"rank{rank}": zeros}
