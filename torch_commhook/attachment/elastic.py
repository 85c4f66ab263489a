"""A hook on a model with ranks that come and go, and the state that new ranks get."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from torch_commhook.attachment.parameters import (
    buffers_of,
    first_values,
    ignored_names,
    joined_bytes,
    kind_of,
    unpack,
    why_not_written,
)
from torch_commhook.attachment.training_state import TrainingState
from torch_commhook.collectives.agreement import described, packed, unpacked
from torch_commhook.elastic.joining import Donor, InBackground, NewRank, receive, send, send_number
from torch_commhook.elastic.pace import Note, Pace
from torch_commhook.elastic.ranks import Elastic, ElasticRanks, donors_of
from torch_commhook.reducer.reducer import Reducer
from torch_commhook.reducer.repeatable_step import Recovery
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.step_group import StepGroup
from torch_commhook.wording import warn_user

# ---- the transfer of the training's state to ranks that join -------------------------------------


_log = logging.getLogger("torch_commhook.elastic")


class NewRanks:
    """The new members of the view, and the transfer of the state to them.

    The donor sends a small model's state at once, before the first step. It sends a large model's
    parameters in pieces, while all ranks train: see :mod:`torch_commhook.elastic.joining`.

    Args:
        ranks: the ranks of the training.
        state: the state for new ranks.
        keeps_ranks_apart: returns whether the hook lets parameters differ between ranks for some
            steps. New ranks then get the state at once.

    Attributes:
        sent_again: the number of parameters that this rank received twice, because their checksums
            differed.
    """

    def __init__(
        self, ranks: ElasticRanks, state: TrainingState, keeps_ranks_apart: Callable[[], bool]
    ) -> None:
        self._ranks = ranks
        self._state = state
        self._keeps_ranks_apart = keeps_ranks_apart
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
            in_pieces = view.steps > 0 and self._state.is_large and not self._keeps_ranks_apart()
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

        Args:
            ranks: the ranks.

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
        for new, donor in donors_of(view).items():
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
        members = [each for each, donor in donors_of(view).items() if donor == own]
        if is_first and members:
            head, pieces = packed(self._state.head()), self._state.pieces()
            for each in members:
                self._donors[each] = Donor(pieces, group, view.members.index(each), head)
        for sender in self._donors.values():
            sender.begin_step()

    def take(self) -> None:
        """Wait for the step's pieces.

        Raises:
            RuntimeError: a connection was closed.
        """
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
        """Receive the last part of the state.

        Raises:
            RuntimeError: a connection was closed.
        """
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

    def begin(self, reducer: Reducer, recovery: Recovery) -> None:
        """Wait for the state on a new rank; on other ranks, send it to the new ones.

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
                recovery.go_on_between_steps(error)
                continue
            self._state.load(unpacked(data), reducer)
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
        return view.members.index(donors_of(view)[self._ranks.membership.own])


# ---- a hook on a model with ranks that come and go -----------------------------------------------


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
        return joined_bytes(buffers) if buffers else None

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
    if attached.hook.has_own_groups():
        raise ValueError(
            "attach: with elastic, the hook must communicate among all ranks, got "
            f"'{attached.name}' with process groups of its own"
        )
