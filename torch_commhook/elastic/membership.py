"""The members of a training, as its ranks agree through a store, and their signs of life.

The store has one text, the view, which lists the members. It changes only by ``compare_set``, from
one view to the next. So even if the network splits, at most one side continues.

A member that wants the next view writes to the store that it is here, and what it knows about
others: whose processes have ended, and who shows no sign of life. Any member may then write the
next view. It waits until all members that are not known to be lost are here, or until a timeout.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

from torch_commhook import _C
from torch_commhook.collectives.wire import keep_for_good
from torch_commhook.step.connected_group import read_now

# ---- the members of a training, as its ranks agree through a store -------------------------------


_log = logging.getLogger("torch_commhook.elastic")

_T = TypeVar("_T")

#: The longest time that a rank waits before it reads the store again, in seconds.
_LONGEST_PAUSE = 0.05
#: Each member waits this much longer than the one before it, so that only one writes a view.
_TURN = 0.02
#: The numbers that processes may have beside those in the view.
_SPARE_NUMBERS = 1000
_NUMBER = re.compile(rb"\d{1,18}")
#: The key of the last view's number; it may lag behind the view, but is never ahead.
VIEW_NUMBER = "view_number"


class LeftOutError(RuntimeError):
    """The other ranks continue without this rank.

    Example:
        >>> try:
        ...     raise LeftOutError("the others go on")  # as backward() does with elastic=
        ... except RuntimeError as error:
        ...     print(error)
        the others go on
    """


class TooFewRanksError(RuntimeError):
    """Too few ranks are left to continue.

    Example:
        >>> try:
        ...     raise TooFewRanksError("1 rank is left")  # as backward() does with elastic=
        ... except RuntimeError as error:
        ...     print(error)
        1 rank is left
    """


@dataclass(frozen=True)
class View:
    """The members of a training, from a step on.

    Attributes:
        number: the view's number, from 1.
        members: the members in rank order, each by its number for life.
        new: the members that have not trained yet. The others have the whole state.
        steps: the number of steps done.
        entries: the number of entries already handled, in the list of ranks that want to join.
        wanted: the number of requests to join when they were handled. It may differ from
            ``entries``, because a rank may end between its two writes.
    """

    number: int
    members: tuple[int, ...]
    new: tuple[int, ...] = ()
    steps: int = 0
    entries: int = 0
    wanted: int = 0

    @property
    def trained(self) -> tuple[int, ...]:
        """The members that have the whole state."""
        return tuple(member for member in self.members if member not in self.new)

    @property
    def donors(self) -> dict[int, int]:
        """The trained member that sends the state to each new member."""
        return {new: self.trained[i % len(self.trained)] for i, new in enumerate(self.new)}

    def as_text(self) -> str:
        """Return the view as text for a store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> View:
        """Return the view of a text from :meth:`as_text`.

        Raises:
            RuntimeError: the text is no view.
        """
        try:
            found = json.loads(text)
            for name in ("members", "new"):
                found[name] = tuple(found[name])
            view = cls(**found)
            numbers = view.number, view.steps, view.entries, view.wanted, *view.members, *view.new
            if view.trained and all(type(each) is int and 0 <= each < 1 << 60 for each in numbers):
                return view
            raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RuntimeError(
                f"torch_commhook: the store's list of members must be one of this version of the "
                f"library, got {text[:200]!r}"
            ) from error


class Lost(NamedTuple):
    """The ranks that a rank has lost.

    Attributes:
        ended: ranks whose processes have ended, or that have left.
        silent: ranks without a sign of life. They may be alive, behind a network that has failed.
        unreachable: ranks that this rank cannot connect to. They may be alive, and reach others.
    """

    ended: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    unreachable: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Here:
    """A member's entry that says it is here.

    Attributes:
        steps: the number of steps that it has done.
        is_new: whether it has not trained yet.
        lost: the ranks that it cannot reach.
    """

    steps: int
    is_new: bool
    lost: Lost


class Membership:
    """This process's part in a training whose ranks come and go.

    Args:
        store: a store of ``torch.distributed`` that all ranks reach, for this training only. It
            must have ``append``.
        silent: returns those of the given ranks that have shown no sign of life for too long.
        min_ranks: the smallest number of ranks that continues.
        first_ranks: the number of ranks that begins; None for those that arrive within ``grace`` of
            each other.
        grace: how long ranks wait for others that may be lost, in seconds.
        patience: how long they wait for ranks that show signs of life, in seconds.
        now: a clock, in seconds.
        sleep: waits for a number of seconds.

    Attributes:
        own: this process's number; no other process of the training ever has it.
        view: the members; None before :meth:`enter`.
        is_new: whether this process still needs the state of a member that has trained.
        has_begun: whether it takes part in steps. It may still be new.
    """

    def __init__(
        self,
        store: Any,
        silent: Callable[[Collection[int]], set[int]],
        *,
        min_ranks: int,
        grace: float,
        patience: float | None = None,
        first_ranks: int | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._store = store
        self._silent = silent
        self._min_ranks = min_ranks
        self._first_ranks = first_ranks
        self._grace = grace
        self._patience = grace if patience is None else patience
        self._now = now
        self._sleep = sleep
        self._skipped: set[tuple[str, str]] = set()  # each is logged once
        self.own: int = self._count("ranks", 1)
        self.view: View | None = None
        self.is_new = True
        self.has_begun = False

    # ---- joining ---------------------------------------------------------------------------------

    def enter(self, timeout: float) -> View:
        """Wait until this process takes part: from the beginning, or as a new member.

        Args:
            timeout: the longest wait, in seconds.

        Returns:
            The first view that contains it.

        Raises:
            TooFewRanksError: the time is over.
        """
        request = self._ask()
        begun = self._now()
        seen, seen_at = 0, begun
        for _ in self._pauses():
            view = self.current()
            if view is not None and self.own in view.members:
                self.view = view
                self.is_new = self.own in view.new
                return view
            wanting, entries, wanted = self._asking(view)
            is_heard = self.own in wanting
            # The others had seen no sign of life when they read its request, or a stray count.
            if not is_heard or (view is not None and view.wanted >= request):
                request = self._ask()
            if len(wanting) != seen:
                seen, seen_at = len(wanting), self._now()
            waited = self._now() - seen_at
            if is_heard and self._may_begin(view, wanting, waited):
                if waited >= wanting.index(self.own) * _TURN:
                    number = 1 if view is None else view.number + 1
                    new = tuple(wanting[1:])  # all ranks take the parameters of the first one
                    self._propose(view, View(number, tuple(wanting), new, 0, entries, wanted))
            elif self._now() - begun > timeout:
                raise TooFewRanksError(
                    f"torch_commhook: rank {self.own} has waited for {timeout:g} s to join; "
                    f"{len(wanting)} ranks want to, {self._min_ranks} are needed"
                )
        raise AssertionError

    def _ask(self) -> int:
        """Request to join; returns the number of requests.

        Members look for entries after the number has grown, so the entry comes first. If this
        process ends before it adds 1, the next request makes the members read both entries.
        """
        self._store.append("wanting", f"{self.own} ")
        return self._count("wanted", 1)

    def _may_begin(self, view: View | None, wanting: list[int], waited: float) -> bool:
        """Whether the ranks that want to take part should begin, because nobody trains."""
        if len(wanting) < self._min_ranks:
            return False
        if view is not None and self._silent(view.members) != set(view.members):
            return False  # the members will admit this rank
        if view is None and self._first_ranks is not None:
            return len(wanting) >= self._first_ranks or waited >= self._grace
        return waited >= self._grace

    def _asking(self, view: View | None) -> tuple[list[int], int, int]:
        """The ranks that want to take part after a view, in order of their numbers.

        Also the length of the list of entries, and the number of requests.
        """
        wanted = self._count("wanted", 0)  # first: the entries of all these are in the list
        entries = self._entries("wanting", _number)
        known = set() if view is None else set(view.members)
        at = 0 if view is None else view.entries
        new = {each for each in entries[at:] if each is not None}
        if new:  # else a stray number would become a member
            last = self._count("ranks", 0)
            new = {each for each in new if 0 < each <= last}
        silent = self._silent([each for each in new if each != self.own])
        return sorted(new - known - silent), len(entries), wanted

    def has_ended(self, first: int) -> bool:
        """Whether nobody trains or waits to: all have left, or show no sign of life.

        The rank ``first`` may wait without having requested to join yet.
        """
        view = self.current()
        ranks = {first, *self._asking(view)[0], *(() if view is None else view.members)}
        left = {own for own, _ in self._leaving()}
        return self._silent(ranks - left) == ranks - left

    # ---- leaving ---------------------------------------------------------------------------------

    def leave(self, steps: int) -> None:
        """Announce that this process leaves after a number of steps.

        The others count these steps too: it left when all ranks had the results of the last one.
        """
        self._store.append("left", f"{self.own}:{steps} ")

    def _leaving(self) -> list[tuple[int, int]]:
        """The ranks that have announced that they leave, with the steps of each."""
        return [each for each in self._entries("left", _own_and_steps) if each is not None]

    # ---- changing --------------------------------------------------------------------------------

    def change(
        self,
        steps: int,
        lost: Lost = Lost(),  # noqa: B008
        *,
        lets_in: bool = True,
    ) -> View:
        """Agree with the others on who continues, after a loss or to admit new members.

        Args:
            steps: the number of steps that this rank has done.
            lost: the ranks that it cannot reach.
            lets_in: whether new members may take part from now on. If not, those that have not
                trained yet wait for a later view.

        Returns:
            The next view, which contains this rank. Its ``steps`` are the most that a member has
            done.

        Raises:
            LeftOutError: the others continue without this rank.
            TooFewRanksError: fewer than ``min_ranks`` are left, or no more than half of those that
                may be alive.
        """
        view = self.view
        assert view is not None
        place = _here_key(view.number + 1)
        self._store.append(place, self._entry(steps, lost))
        begun = since = self._now()
        for _ in self._pauses():
            current = self.current()
            assert current is not None
            if current.number > view.number:
                return self._take(view, current)
            now = self._now()
            is_late = now - begun >= self._patience
            found = self._next(view, self._here(place), is_late=is_late, lets_in=lets_in)
            if found is None:
                since = now
            elif isinstance(found, str):
                if now - since >= self._grace:
                    raise TooFewRanksError(f"torch_commhook: {found}")
            elif self.own in found.members:
                if now - since >= found.members.index(self.own) * _TURN:
                    self._propose(view, found)
        raise AssertionError

    def _take(self, before: View, current: View) -> View:
        """Continue with a view that others have agreed on.

        A rank that has not taken a step yet and is not in the view waits until it is admitted
        again.

        Raises:
            LeftOutError: the view excludes this rank.
        """
        if self.is_new and not self.has_begun and self.own not in current.members:
            return self.enter(self._patience)
        if current.number > before.number + 1 or self.own not in current.members:
            raise LeftOutError(
                f"torch_commhook: the other ranks continue without this one (rank {self.own}), "
                "because they saw no sign of life from it; restart its process to join again"
            )
        self.view = current
        self.is_new = self.own in current.new
        return current

    def _next(
        self, view: View, here: Mapping[int, _Here], *, is_late: bool, lets_in: bool
    ) -> View | str | None:
        """The next view, or why there is none, or None while it waits for ranks.

        Args:
            view: the last view.
            here: its members that want another view.
            is_late: whether the time of the missing members is over.
            lets_in: whether new members may take part.
        """
        left_before = {own: steps for own, steps in self._leaving() if own in view.members}
        stay = here.keys() - left_before
        here = {rank: here[rank] for rank in view.members if rank in stay}
        missing = set(view.members) - here.keys()
        lost = Lost(frozenset(left_before), frozenset(self._silent(missing)))
        for each in here.values():
            lost = Lost(*map(frozenset.union, lost, each.lost))
        if not is_late and not missing <= frozenset().union(*lost):
            return None
        # A rank that is here is alive, whatever others believed.
        reachable = _without_conflicts({rank: each.lost.unreachable for rank, each in here.items()})
        left = [rank for rank in view.members if rank in reachable]
        ended = lost.ended - here.keys()
        may_live = [rank for rank in view.members if rank not in ended]
        if 2 * len(left) <= len(may_live):
            return (
                f"{len(left)} of the last {len(may_live)} ranks can reach each other; only "
                "more than half of them may continue, because the others may be alive, too"
            )
        steps = max([*(here[rank].steps for rank in left), *left_before.values()])
        new = [rank for rank in left if here[rank].is_new]
        if new == left:
            if steps:
                return "no rank with trained parameters is left"
            new = left[1:]  # as at the beginning, all ranks take the first one's parameters
        wanting, entries, wanted = self._asking(view)
        # Some ranks may have counted the open step and left; those that are here then count it too.
        ahead = [rank for rank, done in left_before.items() if done == steps]
        if any(here[rank].steps == steps for rank in left):
            ahead = []
        if len(left) + len(wanting) + len(ahead) < self._min_ranks:
            return (
                f"{len(left)} ranks are left and {len(wanting)} want to join, but "
                f"{self._min_ranks} are needed"
            )
        if not lets_in:
            trained = tuple(rank for rank in left if rank not in new)
            return View(view.number + 1, trained, (), steps, view.entries, view.wanted)
        members = (*left, *wanting)
        return View(view.number + 1, members, (*new, *wanting), steps, entries, wanted)

    # ---- the store -------------------------------------------------------------------------------

    def current(self) -> View | None:
        """The last view; None if there is none yet."""
        text = self._read("view")
        return None if text is None else View.from_text(text)

    def _propose(self, before: View | None, after: View) -> None:
        """Write a view, unless another rank has written one."""
        expected = "" if before is None else self._read("view") or ""
        if before is not None and View.from_text(expected).number != before.number:
            return
        text = after.as_text()
        if self._store.compare_set("view", expected, text) == text.encode():
            self._store.set(VIEW_NUMBER, str(after.number))
            # All that still read these entries find a newer view first.
            self._store.delete_key(_here_key(after.number - 1))

    def _entry(self, steps: int, lost: Lost) -> str:
        fields = self.own, steps, int(self.is_new), *map(_numbers, lost)
        return f"{':'.join(map(str, fields))} "

    def _here(self, place: str) -> dict[int, _Here]:
        """The entries of ranks that are here; a rank's last entry counts."""
        return {each[0]: each[1] for each in self._entries(place, _rank_here) if each is not None}

    def _entries(self, key: str, parse: Callable[[str], _T]) -> list[_T | None]:
        """The parsed entries of a list; None for each that this library has not written."""
        found: list[_T | None] = []
        for entry in (self._read(key) or "").split():
            try:
                found.append(parse(entry))
            except ValueError:
                found.append(None)
                if (key, entry) not in self._skipped:
                    self._skipped.add((key, entry))
                    _log.warning(
                        "rank %d: the store's list '%s' has the entry %r, which is skipped",
                        self.own,
                        key,
                        entry[:80],
                    )
        return found

    def _count(self, key: str, amount: int) -> int:
        """Add to a counter, and return it. A text that is no such number is replaced before.

        There, a store closes the connection of whoever calls ``add()``.
        """
        text = self._store.compare_set(key, "-", "-")  # "-" if there is none
        if text != b"-" and not _NUMBER.fullmatch(text):
            _log.warning("the store's counter '%s' has %r, which is replaced", key, text[:80])
            view = self.current()
            last = 0 if view is None else view.wanted
            if key == "ranks":  # others may have numbers that are in no view
                last = max(view.members if view else (0,)) + _SPARE_NUMBERS
            self._store.compare_set(key, text, str(last))
        return int(self._store.add(key, amount))

    def _read(self, key: str) -> str | None:
        return read_now(self._store, key)

    def _pauses(self) -> Iterator[None]:
        """Yield before each pause; pauses get longer, without end."""
        pause = 0.0005
        while True:
            yield
            self._sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _here_key(view: int) -> str:
    """The list of the members that want this view."""
    return f"here/{view}"


def _numbers(ranks: Collection[int]) -> str:
    return ",".join(map(str, sorted(ranks)))


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text.encode()):
        raise ValueError
    return int(text)


def _own_and_steps(entry: str) -> tuple[int, int]:
    own, steps = entry.split(":")
    return _number(own), _number(steps)


def _rank_here(entry: str) -> tuple[int, _Here]:
    rank, steps, is_new, *lost = entry.split(":")
    ended, silent, unreachable = (
        frozenset(_number(each) for each in kind.split(",") if each) for kind in lost
    )
    return _number(rank), _Here(_number(steps), is_new == "1", Lost(ended, silent, unreachable))


def _without_conflicts(lost: Mapping[int, Collection[int]]) -> set[int]:
    """The largest set of ranks that all reach each other, or nearly.

    ``lost`` has for each rank the ranks that it cannot reach.
    """
    left = set(lost)
    while True:
        conflicts = dict.fromkeys(left, 0)
        for rank in left:
            for other in set(lost[rank]) & left:
                if other != rank:
                    conflicts[rank] += 1
                    conflicts[other] += 1
        worst = max(left, key=lambda rank: (conflicts[rank], rank), default=None)
        if worst is None or conflicts[worst] == 0:
            return left
        left.remove(worst)


# ---- detects which members of a training are alive, by signs that they write to its store --------


#: The number of signs in the time after which a rank counts as lost.
_SIGNS = 5


class Heartbeats:
    """This process's signs of life, and those of others.

    Args:
        store: a store of ``torch.distributed``, read through a connection of its own.
        own: this process's number.
        silent_after: seconds without a sign after which a process counts as lost.
    """

    #: The number of requests to join.
    WANTED = "wanted"

    def __init__(self, store: Any, own: int, silent_after: float) -> None:
        self._process = os.getpid()
        self._store = store
        self._own = own
        self._silent_after = silent_after
        self._signs = _C.SignsOfLife(store.clone(), _key(own), silent_after / _SIGNS)
        self._watched: set[int] = set()
        self.watch(())

    def __del__(self, own_process: Callable[[], int] = os.getpid) -> None:
        # An argument, since modules may be gone before this object is.
        if own_process() != self._process:  # a forked process has no thread that could be joined
            keep_for_good(self._signs)

    def watch(self, ranks: Collection[int]) -> None:
        """Watch these processes, and no others."""
        self._watched = set(ranks)
        self._signs.watch([self.WANTED, VIEW_NUMBER, *map(_key, sorted(self._watched))])

    def silent(self, ranks: Collection[int]) -> set[int]:
        """Return those that show no sign of life. They are watched from now on."""
        if not set(ranks) <= self._watched:
            self.watch(self._watched | set(ranks))
        signs = self._signs.signs()
        return {
            rank
            for rank in ranks
            if _key(rank) in signs and signs[_key(rank)][1] > self._silent_after
        }

    def wanted(self) -> int:
        """The number of requests to join that this process has seen."""
        return self._number(self.WANTED)

    def view_number(self) -> int:
        """The number of the last view that this process has seen in the store; 0 if none."""
        return self._number(VIEW_NUMBER)

    def _number(self, key: str) -> int:
        return self._signs.signs().get(key, (0, 0.0))[0]

    def stop(self) -> None:
        """Send no more signs, and remove the last one from the store."""
        self._signs.stop()
        with suppress(RuntimeError):  # the store may be gone
            self._store.delete_key(_key(self._own))


def _key(rank: int) -> str:
    return f"alive/{rank}"
