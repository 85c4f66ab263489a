"""The state of a training, its transfer to new ranks, and pre-hooks on a model's forward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torch_commhook.collectives.agreement import packed, unpacked
from torch_commhook.elastic import joining
from torch_commhook.elastic.joining import (
    Donor,
    InBackground,
    NewRank,
    StateChunks,
    groups_of,
    load_groups,
    load_states,
    receive,
    send,
    send_number,
)
from torch_commhook.elastic.ranks import ElasticRanks
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.native.runtime import skip_dynamo
from torch_commhook.step.attached_hook import Attached

_log = logging.getLogger("torch_commhook.elastic")

# ---- the library's forward pre-hook, which a model calls before its forward ----------------------


class _Listener(Protocol):
    def before_forward(self, module: nn.Module) -> None:
        """Called when the module's forward begins."""


class BeforeForward:
    """A forward pre-hook of the library. A copy of the module gets an empty one."""

    def __init__(self, listener: _Listener) -> None:
        self._listener = listener

    # If the module's own call is not traced, Dynamo would compile this alone, without guards that
    # recompile it when needed.
    @skip_dynamo
    def __call__(self, module: nn.Module, args: Any) -> None:
        self._listener.before_forward(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_nothing, ()


def register_first(module: nn.Module, hook: BeforeForward) -> RemovableHandle:
    """Register a hook that runs before the module's existing forward pre-hooks."""
    handle = module.register_forward_pre_hook(hook, prepend=True)
    # After reordering, an OrderedDict keeps the old order for dict's own methods. Dynamo of torch
    # 2.11 uses these to tell hooks apart.
    hooks = module._forward_pre_hooks
    for number in list(hooks):
        hooks[number] = hooks.pop(number)
    return handle


def _nothing(module: nn.Module, args: Any) -> None:
    pass


def _get_nothing() -> Any:
    return _nothing


# ---- the state of a training, which a rank receives when it joins --------------------------------


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
    def goes_in_pieces(self) -> bool:
        """Whether new ranks get the parameters in pieces."""
        if self._attached().keeps_ranks_apart:  # each rank has its own parameters for some steps
            return False
        return sum(each.nbytes for each in self._model.parameters()) > joining.AT_ONCE

    @property
    def nbytes(self) -> int:
        """The bytes of the model's parameters and buffers."""
        return sum(each.nbytes for each in self._tensors().values())

    def pieces(self) -> StateChunks:
        """The parameters and the optimizers' state for them, in pieces."""
        return StateChunks(list(self._model.parameters()), self._optimizers)

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
            "objects": [each.state_dict() for each in self._objects],
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
            "objects": [each.state_dict() for each in self._others_than_optimizers],
            "groups": [groups_of(each) for each in self._optimizers],
            "of_no_parameter": self.pieces().others(),
        }

    def _counters(self) -> dict[str, Any]:
        memory, local_steps = self._attached().memory, self._attached().local_steps
        return {
            "steps": self._ranks.steps,
            "trained": self._ranks.trained,
            "printed_hook": self.printed_hook,
            "place": None if local_steps is None else local_steps.round_position(),
            "hook": None if memory.remembers_nothing else _without_own(memory.state_dict()),
        }

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    def load(self, state: dict[str, Any], memory_loaded: Callable[[list[list[str]]], None]) -> None:
        """Write a donor's :meth:`whole` or :meth:`head` into the model, the objects and the hook.

        Args:
            state: the donor's state.
            memory_loaded: called with the names of each bucket's parameters, in the loaded memory.
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
            memory_loaded(state["hook"]["buckets"])
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
    rank, world_size = memory.state_rank
    return {**state, "world_size": world_size, f"rank{rank}": zeros}


# ---- the transfer of the training's state to ranks that join -------------------------------------


class NewRanks:
    """The new members of the view, and the transfer of the state to them.

    The donor sends a small model's state at once, before the first step. It sends a large model's
    parameters in pieces, while all ranks train: see :mod:`torch_commhook.elastic.joining`.

    Attributes:
        sent_again: the number of parameters that this rank received twice, because their checksums
            differed.
    """

    def __init__(self, ranks: ElasticRanks, state: TrainingState) -> None:
        self._ranks = ranks
        self._state = state
        self._given = 0  # the number of the last view with a state for all new members
        self._joining_of_view = 0, frozenset[int]()  # a view's number, and its joining members
        self._donors: dict[int, Donor] = {}  # this rank as a donor, by new member
        self._last_sends: list[Donor] = []  # donors of members that are complete from this step on
        self._new_rank: NewRank | None = None  # this rank, while it receives pieces
        self._in_step = (0, 0)  # the view and the step of the pieces under way
        self.sent_again = 0

    @property
    def joining(self) -> frozenset[int]:
        """The members that contribute zeros, because they do not have the whole state yet."""
        view = self._ranks.view
        if self._joining_of_view[0] != view.number:
            in_pieces = view.steps > 0 and self._state.goes_in_pieces
            self._joining_of_view = view.number, frozenset(view.new if in_pieces else ())
        return self._joining_of_view[1]

    @property
    def is_joining(self) -> bool:
        """Whether this rank is joining."""
        return self._ranks.membership.own in self.joining

    @property
    def lacks_state(self) -> bool:
        """Whether this rank is new, and still lacks a part of the state."""
        return self.is_joining or self.is_receiving

    @property
    def is_receiving(self) -> bool:
        """Whether this rank receives its state in pieces now."""
        return self._new_rank is not None

    @property
    def has_all_pieces(self) -> bool:
        """Whether this rank receives its state in pieces, and has all of them."""
        return self._new_rank is not None and self._new_rank.has_all

    def have_all_pieces(self, ranks: Iterable[int]) -> bool:
        """Let ranks with all pieces contribute from the next step on.

        Returns:
            Whether some of them were joining until now.
        """
        view, joining = self._joining_of_view
        left = joining.difference(ranks)
        self._joining_of_view = view, left
        return left != joining

    def give(self) -> None:
        """As a donor, send new ranks their state; as a joining rank, receive a piece of it.

        Call it before a step, when the parameters hold the results of the previous one.
        """
        ranks, view = self._ranks, self._ranks.view
        if view.number != self._in_step[0]:
            self._donors, self._last_sends = {}, []
        elif self._new_rank is not None and not self.is_joining:
            self._get_rest(self._new_rank)
        for new in self._donors.keys() - self.joining:
            sender = self._donors.pop(new)
            sender.end(packed(self._state.rest()))
            self._last_sends.append(sender)
        if self.joining:
            self._exchange_pieces()
        if view.number == self._given or ranks.membership.is_new:
            return
        self._given = view.number
        own = ranks.membership.own
        for new, donor in view.donors.items():
            if donor == own and new not in self.joining:
                self._give_all(view.members.index(new))

    def _give_all(self, place: int) -> None:
        data, group = packed(self._state.whole()), self._ranks.group.group
        own = self._ranks.membership.own

        def give() -> None:
            try:
                send(data, group, place)
            except RuntimeError as error:  # a rank is lost
                _log.warning("rank %d: a new rank did not get its state: %s", own, error)

        InBackground(give)

    def _exchange_pieces(self) -> None:
        """Begin the exchange of a step's pieces. It runs once, before any rank ends the step."""
        ranks, view = self._ranks, self._ranks.view
        before, self._in_step = self._in_step, (view.number, ranks.steps)
        if self._in_step == before:
            return
        is_first, group, own = before[0] != view.number, ranks.group.group, ranks.membership.own
        if self._new_rank is not None:
            self._new_rank.begin_step(group, self._own_donor(), is_first=is_first)
            return
        members = [each for each, donor in view.donors.items() if donor == own]
        if is_first and members:
            head, pieces = packed(self._state.head()), self._state.pieces()
            for each in members:
                self._donors[each] = Donor(pieces, group, view.members.index(each), head)
        for sender in self._donors.values():
            sender.begin_step()

    def take(self) -> None:
        """Wait for the step's pieces."""
        if self._new_rank is not None:
            self._new_rank.receive()
        ends, self._last_sends = self._last_sends, []
        for sender in (*self._donors.values(), *ends):
            sender.wait()

    def write(self) -> None:
        """Write the step's piece into the parameters, once the step counts."""
        if self._new_rank is not None:
            self._new_rank.write()

    def _get_rest(self, new_rank: NewRank) -> None:
        """Receive the last part of the state."""
        own = self._ranks.membership.own
        group, donor = self._ranks.group.group, self._own_donor()
        self.sent_again = new_rank.end(group, donor, self._state.load_rest)
        self._new_rank, self._ranks.membership.is_new = None, False
        _log.info("rank %d has the whole state after %d steps", own, self._ranks.steps)
        if self.sent_again:
            _log.warning(
                "rank %d: the donor sent %d parameters and their optimizer state again, while the "
                "other ranks waited, because an optimizer does not update elements independently",
                own,
                self.sent_again,
            )

    def begin(
        self,
        memory_loaded: Callable[[list[list[str]]], None],
        go_on: Callable[[RuntimeError], None],
    ) -> None:
        """Wait for the state on a new rank; on other ranks, send it to the new ones.

        Args:
            memory_loaded: called with the names of each bucket's parameters, in the loaded memory.
            go_on: continues among the remaining ranks after an error.

        Raises:
            RuntimeError: the other ranks attached another hook while this rank waited.
            ValueError: the state can't be read, or contains more than tensors and plain values.
        """
        membership = self._ranks.membership
        if not membership.is_new:
            self.give()
        while membership.is_new and not membership.has_begun:
            view, group = self._ranks.view, self._ranks.group.group
            try:
                donor = self._own_donor()
                data = receive(group, donor, self._state.nbytes)
                if self.is_joining:
                    send_number(0, group, donor)
            except RuntimeError as error:
                go_on(error)
                continue
            self._state.load(unpacked(data), memory_loaded)
            if self.is_joining:
                self._new_rank = NewRank(self._state.pieces())
                self._in_step = view.number, -1
            else:
                membership.is_new = False
            break
        membership.has_begun = True

    def _own_donor(self) -> int:
        """The place of this new rank's donor."""
        view = self._ranks.view
        return view.members.index(view.donors[self._ranks.membership.own])
