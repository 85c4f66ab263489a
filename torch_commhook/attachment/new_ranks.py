"""How ranks that join get the training's state, on their side and on that of their donors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from torch_commhook.attachment.training_state import TrainingState
from torch_commhook.elastic.joining import Donor, InBackground, NewRank
from torch_commhook.elastic.ranks import ElasticRanks, donors_of
from torch_commhook.elastic.transfer import packed, receive, send, send_number, unpacked
from torch_commhook.reducer.recovery import Recovery
from torch_commhook.reducer.reducer import Reducer

_log = logging.getLogger("torch_commhook.elastic")


class NewRanks:
    """The members that are new in the view, and what they still have to receive.

    A small model's state is sent at once, before the first step. A large one's parameters are sent
    in pieces, while all ranks train: see :mod:`torch_commhook.elastic.joining`.

    Args:
        ranks: the ranks of the training.
        state: the state that new ranks get.
        keeps_ranks_apart: returns whether the hook lets parameters differ between ranks for some
            steps. New ranks then get all at once.

    Attributes:
        sent_again: parameters that this rank received twice, since their checksums differed.
    """

    def __init__(
        self, ranks: ElasticRanks, state: TrainingState, keeps_ranks_apart: Callable[[], bool]
    ) -> None:
        self._ranks = ranks
        self._state = state
        self._keeps_ranks_apart = keeps_ranks_apart
        self._given = 0  # the last view whose new members have been given what they need
        self._joining_of_view = 0, frozenset[int]()  # a view's number, and its joining members
        self._donors: dict[int, Donor] = {}  # by new member, where this rank is its donor
        self._last_sends: list[Donor] = []  # to members that have all from this step on
        self._new_rank: NewRank | None = None  # this one, while it gets its state in pieces
        self._in_step = (0, 0)  # the view and the step whose pieces are on their way
        self.sent_again = 0

    @property
    def joining(self) -> frozenset[int]:
        """The members that take part with zeros, since they do not have the whole state yet."""
        view = self._ranks.view
        if self._joining_of_view[0] != view.number:
            in_pieces = view.steps > 0 and self._state.is_large and not self._keeps_ranks_apart()
            self._joining_of_view = view.number, frozenset(view.new if in_pieces else ())
        return self._joining_of_view[1]

    @property
    def is_joining(self) -> bool:
        """Whether this rank is one of them."""
        return self._ranks.membership.own in self.joining

    @property
    def lacks_state(self) -> bool:
        """Whether this rank is new, and has yet to get a part of the state."""
        return self.is_joining or self.is_receiving

    @property
    def is_receiving(self) -> bool:
        """Whether this rank has begun to get its state in pieces, and lacks some of it."""
        return self._new_rank is not None

    @property
    def has_all_pieces(self) -> bool:
        """Whether this rank gets its state in pieces, and has received the last of them."""
        return self._new_rank is not None and self._new_rank.has_all

    def have_all_pieces(self, ranks: Iterable[int]) -> bool:
        """Count these as members like any other from the next step on; whether that is news."""
        view, joining = self._joining_of_view
        left = joining.difference(ranks)
        self._joining_of_view = view, left
        return left != joining

    def give(self) -> None:
        """Send new ranks their state, if this rank is their donor, or receive a piece of it.

        Called before a step, when the parameters hold the results of the last one.
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
            except RuntimeError as error:  # it is lost, or another rank is
                _log.warning("rank %d: a new rank did not get its state: %s", own, error)

        InBackground(give)

    def _exchange_pieces(self) -> None:
        """Once a step, before any rank can be at its end."""
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
        """Wait for the pieces of the step that are on their way.

        Raises:
            RuntimeError: a connection was closed.
        """
        if self._new_rank is not None:
            self._new_rank.receive()
        ends, self._last_sends = self._last_sends, []
        for sender in (*self._donors.values(), *ends):
            sender.wait()

    def write(self) -> None:
        """Write the piece of the step, once the step counts."""
        if self._new_rank is not None:
            self._new_rank.write()

    def _get_rest(self, new_rank: NewRank) -> None:
        """Receive the last part of the state.

        Raises:
            RuntimeError: a connection was closed.
        """
        own = self._ranks.membership.own
        group, donor = self._ranks.group.group, self._own_donor()
        self.sent_again = others = new_rank.end(group, donor, self._state.load_rest)
        self._new_rank, self._ranks.membership.is_new = None, False
        _log.info("rank %d has the whole state after %d steps", own, self._ranks.steps)
        if others:
            _log.warning(
                "rank %d: %d parameters and what optimizers remember of them were sent again, "
                "while the others waited: an optimizer does not change each element by itself",
                own,
                others,
            )

    def begin(self, reducer: Reducer, recovery: Recovery) -> None:
        """Wait for the state if this rank is new; else send it to the ranks that are.

        Raises:
            RuntimeError: another hook was attached while this rank waited.
        """
        membership = self._ranks.membership
        if not membership.is_new:
            self.give()
        while membership.is_new and not membership.has_begun:
            view, group = self._ranks.view, self._ranks.group.group
            try:
                donor = self._own_donor()
                data = receive(group, donor)
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
        """The place of the rank that gives this new one its state."""
        view = self._ranks.view
        return view.members.index(donors_of(view)[self._ranks.membership.own])
