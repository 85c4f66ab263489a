"""A hook on a model whose ranks come and go."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torch_commhook.attachment.buffers import buffers_of, unpack
from torch_commhook.attachment.buffers import packed as pack_buffers
from torch_commhook.attachment.user_warning import warn_user
from torch_commhook.elastic import joining
from torch_commhook.elastic.joining import Donor, InBackground, NewRank
from torch_commhook.elastic.pace import Note, Pace
from torch_commhook.elastic.pieces import Pieces
from torch_commhook.elastic.ranks import ElasticRanks, donors_of
from torch_commhook.elastic.settings import Elastic
from torch_commhook.elastic.transfer import (
    groups_of,
    load_groups,
    load_states,
    packed,
    receive,
    send,
    send_number,
    states_of,
    unpacked,
)
from torch_commhook.hooks.base import Hook
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.reducer.recovery import Recovery
from torch_commhook.reducer.reducer import Reducer
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.step_group import StepGroup

_log = logging.getLogger("torch_commhook.elastic")
#: With any of these, what an optimizer's ``state_dict()`` holds is more than it remembers.
_STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


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
        sent_again: parameters that this rank, which has joined in pieces, got twice.

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
        self._joining_of_view = 0, frozenset[int]()  # a view, and who of it is joining
        self._donors: dict[int, Donor] = {}  # by new member, where this rank is its donor
        self._last_sends: list[Donor] = []  # of new members that have all from this step on
        self._new_rank: NewRank | None = None  # this one, where it gets its state in pieces
        self.sent_again = 0
        self._in_step = (0, 0)  # the view and the step whose pieces are on their way
        self.ranks = ElasticRanks(settings)
        for name in ("straggler", "straggler_steps", "leave_out_stragglers"):
            shared[f"Elastic's {name}"] = getattr(settings, name)
        self._printed_hook = shared["the hook"]
        trained = {id(parameter) for _, parameter in parameters}
        shared["the parameters that are not trained"] = _specs(
            (name, each) for name, each in model.named_parameters() if id(each) not in trained
        )
        self.ranks.check_same({"the parameters": _specs(parameters), **shared})
        self.ranks.lets_in_late = lambda: not self._attached.keeps_ranks_apart
        self.ranks.keeps_error = lambda: self._attached.memory.error_bytes > 0
        self.ranks.enter()

    def hook_replaced(self, printed: str) -> None:
        """Another hook takes part from here on, on all ranks: new ranks are to attach that."""
        self._printed_hook = printed
        self.ranks.change_setting("the hook", printed)

    def use(self, reducer: Reducer) -> None:
        """Be the ranks of a reducer."""
        self._reducer = weakref.ref(reducer)
        reducer.recovery = Recovery(reducer, self)

    @property
    def _attached(self) -> Attached:
        """The hook at the moment."""
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
        """The members' group at the moment."""
        return self.ranks.group

    @property
    def joining(self) -> frozenset[int]:
        """The members that take part with zeros, since they do not have the whole state yet."""
        view = self.ranks.view
        if self._joining_of_view[0] != view.number:
            in_pieces = view.steps > 0 and self._is_large and not self._attached.keeps_ranks_apart
            self._joining_of_view = view.number, frozenset(view.new if in_pieces else ())
        return self._joining_of_view[1]

    @property
    def is_joining(self) -> bool:
        """Whether this rank is one of them."""
        return self.ranks.membership.own in self.joining

    @property
    def lacks_state(self) -> bool:
        """Whether this rank is new, and has yet to get a part of the state."""
        return self.is_joining or self._new_rank is not None

    @property
    def _is_large(self) -> bool:
        model = self._model()
        assert model is not None
        return sum(each.nbytes for each in model.parameters()) > joining.AT_ONCE

    @property
    def averaged(self) -> int:
        return len(self.ranks.view.members) - len(self.joining)

    @property
    def leader(self) -> int:
        members = self.ranks.view.members
        return next(place for place, each in enumerate(members) if each not in self.joining)

    @property
    def stragglers(self) -> dict[int, float]:
        """The ranks that are slow, and their computing time over the median."""
        return {} if self._pace is None else self._pace.stragglers

    def stop_clock(self) -> None:
        if self._pace is not None:
            self._pace.end()

    def note(self) -> Tensor:
        pace, view, own = self._pace, self.ranks.view, self.ranks.rank
        note = Note(len(view.members), compares=pace is not None, joins=bool(self.joining))
        if self._new_rank is not None and self._new_rank.has_all:
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
        self._recovery.go_on_between_steps()

    def _ended(self, values: Tensor | None, *, lets_in: bool) -> bool:
        """Count what all ranks have done, and let in or leave out whom they want to."""
        pace, members = self._pace, self.ranks.view.members
        joins = bool(self.joining)
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
                self._have_joined(members[place] for place in note.having_all())
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
        if self._new_rank is not None:
            warn_user(
                "torch_commhook: this rank leaves before it has the whole state of the training: "
                "its parameters are not the training's"
            )
        self.ranks.leave()

    # ---- what new ranks get ----------------------------------------------------------------------

    def before_forward(self) -> None:
        """:meth:`give_state`. If it fails, it fails again where the step begins."""
        try:
            self.give_state()
        except RuntimeError as error:
            _log.info("rank %d: before its step: %s", self.ranks.membership.own, error)

    def give_state(self) -> None:
        """Sends new ranks their state, if this rank is their donor; or receives a piece of it.

        Called where the parameters are what the last step has made of them.
        """
        ranks, view = self.ranks, self.ranks.view
        if view.number != self._in_step[0]:
            self._donors, self._last_sends = {}, []
        elif self._new_rank is not None and not self.is_joining:
            self._get_rest(self._new_rank)
        for new in self._donors.keys() - self.joining:
            sender = self._donors.pop(new)
            sender.end(packed(self._rest()))
            self._last_sends.append(sender)
        if self.joining:
            self._exchange_pieces()
        if view.number == self._given or ranks.membership.is_new:
            return
        self._given = view.number
        own = ranks.membership.own
        for new, donor in donors_of(view).items():
            if donor == own and new not in self.joining:
                self._give_all(view.members.index(new))

    def _give_all(self, place: int) -> None:
        data, group, own = packed(self._state()), self.ranks.group.group, self.ranks.membership.own

        def give() -> None:
            try:
                send(data, group, place)
            except RuntimeError as error:  # it is lost, or another rank is
                _log.warning("rank %d: a new rank did not get its state: %s", own, error)

        InBackground(give)

    def _exchange_pieces(self) -> None:
        """Once a step, before any rank can be at its end."""
        ranks, view = self.ranks, self.ranks.view
        before, self._in_step = self._in_step, (view.number, ranks.steps)
        if self._in_step == before:
            return
        is_first, group, own = before[0] != view.number, ranks.group.group, ranks.membership.own
        if self._new_rank is not None:
            self._new_rank.begin_step(group, self._own_donor(), is_first=is_first)
            return
        members = [each for each, donor in donors_of(view).items() if donor == own]
        if is_first and members:
            head, pieces = packed(self._state(whole=False)), self._pieces()
            for each in members:
                self._donors[each] = Donor(pieces, group, view.members.index(each), head)
        for sender in self._donors.values():
            sender.begin_step()

    def take_state(self) -> None:
        if self._new_rank is not None:
            self._new_rank.receive()
        ends, self._last_sends = self._last_sends, []
        for sender in (*self._donors.values(), *ends):
            sender.wait()

    def write_state(self) -> None:
        if self._new_rank is not None:
            self._new_rank.write()

    def _have_joined(self, ranks: Iterable[int]) -> None:
        """The step has ended in which these have told that they have all pieces."""
        view, joining = self._joining_of_view
        left = joining.difference(ranks)
        if left == joining:
            return
        self._joining_of_view = view, left
        reducer = self._reducer()
        assert reducer is not None
        reducer.change_memory()  # the mean is over more ranks

    def _get_rest(self, new_rank: NewRank) -> None:
        """The last that this rank lacks.

        Raises:
            RuntimeError: a connection was closed.
        """
        own = self.ranks.membership.own
        group, donor = self.ranks.group.group, self._own_donor()
        self.sent_again = others = new_rank.end(group, donor, self._load_rest)
        self._new_rank, self.ranks.membership.is_new = None, False
        _log.info("rank %d has the whole state after %d steps", own, self.ranks.steps)
        if others:
            _log.warning(
                "rank %d: %d parameters and what optimizers remember of them were sent again, "
                "while the others waited: an optimizer does not change each element by itself",
                own,
                others,
            )

    def begin(self, reducer: Reducer) -> None:
        """Waits for the state if this rank is new; sends it to the ranks that begin if not."""
        membership = self.ranks.membership
        if not membership.is_new:
            self.give_state()
        while membership.is_new and not membership.has_begun:
            view, group = self.ranks.view, self.ranks.group.group
            try:
                donor = self._own_donor()
                data = receive(group, donor)
                if self.is_joining:
                    send_number(0, group, donor)
            except RuntimeError as error:
                self._recovery.go_on_between_steps(error)
                continue
            state = unpacked(data)
            if state["printed_hook"] != self._printed_hook:  # replaced while this rank waited
                raise RuntimeError(
                    f"attach: the hook must be the same on all ranks: this one has "
                    f"{self._printed_hook}, the others have {state['printed_hook']}"
                )
            self._load(state, reducer)
            if self.is_joining:
                self._new_rank = NewRank(self._pieces())
                self._in_step = view.number, -1
            else:
                membership.is_new = False
            break
        membership.has_begun = True

    def _own_donor(self) -> int:
        """Who gives this new rank its state, by its place."""
        view = self.ranks.view
        return view.members.index(donors_of(view)[self.ranks.membership.own])

    def _pieces(self) -> Pieces:
        model = self._model()
        assert model is not None
        return Pieces(list(model.parameters()), self._optimizers)

    @property
    def _others_than_optimizers(self) -> list[Any]:
        optimizers = self._optimizers
        return [each for each in self._settings.state if each not in optimizers]

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Those whose state new ranks may get in pieces."""
        plain = torch.optim.Optimizer
        return [
            each
            for each in self._settings.state
            if isinstance(each, plain)
            and type(each).state_dict is plain.state_dict
            and type(each).load_state_dict is plain.load_state_dict
            and not any(getattr(each, hooks) for hooks in _STATE_HOOKS)
        ]

    def _state(self, *, whole: bool = True) -> dict[str, Any]:
        """What a new rank needs before its first step; all that it needs, if that is the whole."""
        memory, local_steps = self._attached.memory, self._attached.local_steps
        return {
            "steps": self.ranks.steps,
            "trained": self.ranks.trained,
            "printed_hook": self._printed_hook,
            "place": None if local_steps is None else local_steps.place(),
            "hook": None if memory.remembers_nothing else _without_own(memory.state_dict()),
            **(self._whole() if whole else self._rest()),
        }

    def _whole(self) -> dict[str, Any]:
        return {
            "tensors": {name: tensor.detach() for name, tensor in self._tensors().items()},
            "objects": states_of(self._settings.state),
        }

    def _rest(self) -> dict[str, Any]:
        """What does not come in pieces."""
        model = self._model()
        assert model is not None
        return {
            "tensors": dict(model.named_buffers()),
            "objects": states_of(self._others_than_optimizers),
            "groups": [groups_of(each) for each in self._optimizers],
            "of_no_parameter": self._pieces().others(),
        }

    def _tensors(self) -> dict[str, Tensor]:
        model = self._model()
        assert model is not None
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def _load(self, state: dict[str, Any], reducer: Reducer) -> None:
        """Write what a donor's :meth:`_state` has given."""
        self._load_tensors(state)
        memory = self._attached.memory
        if state["hook"] is not None:
            memory.load_state(memory.check_state(_of_new_rank(state["hook"], memory)))
            reducer.memory_loaded(state["hook"]["buckets"])
        if self._attached.local_steps is not None:
            self._attached.local_steps.begin_at(state["place"])
        self.ranks.steps, self.ranks.trained = state["steps"], state["trained"]

    def _load_rest(self, state: dict[str, Any]) -> None:
        try:
            self._load_tensors(state)
        except RuntimeError as error:  # which is not that a connection was closed
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
            self._pieces().put_others(state["of_no_parameter"])
        else:
            load_states(self._settings.state, state["objects"])


def _specs(parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    return [f"'{name}' of shape {tuple(each.shape)} and {each.dtype}" for name, each in parameters]


def _without_own(state: dict[str, Any]) -> dict[str, Any]:
    """A rank's state of the hook, with one number in place of each tensor that is its own."""
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
    """Turns another rank's state of the hook into that of a new rank, with empty error memory."""
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
