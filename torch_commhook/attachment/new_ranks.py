"""The transfer of the training's state to ranks that join, on their side and on the donors'."""

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
