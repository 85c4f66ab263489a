"""Who takes part, as ranks agree through a store: they are threads of one process."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from torch_commhook.elastic.membership import (
    LeftOutError,
    Lost,
    Membership,
    TooFewRanksError,
    View,
)

GRACE = 0.4
#: A rank that is waited for so long does not end within the test.
LONG = 600.0


class Clock:
    """The time of some threads. It goes on when all of them sleep, to where the next one wakes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = 0.0
        self._awake = 1  # the thread of the test
        self._wakes: list[float] = []
        self._ended: set[threading.Thread] = set()
        self._joined: threading.Thread | None = None

    def now(self) -> float:
        with self._changed:
            return self._now

    def sleep(self, seconds: float) -> None:
        with self._changed:
            wakes = self._now + seconds
            self._wakes.append(wakes)
            self._stop()
            assert self._changed.wait_for(lambda: self._now >= wakes, 30), "a thread does not sleep"

    def _stop(self) -> None:
        self._awake -= 1
        if self._awake == 0 and self._wakes:
            self._now = min(self._wakes)
            self._awake = self._wakes.count(self._now)
            self._wakes = [each for each in self._wakes if each > self._now]
            self._changed.notify_all()

    def start(self, function: Callable[[], object]) -> threading.Thread:
        """Call a function in a thread of its own."""

        def run() -> None:
            try:
                function()
            finally:
                with self._changed:
                    self._ended.add(threading.current_thread())
                    if self._joined is not threading.current_thread():
                        self._stop()  # otherwise the caller of join() is awake in its place
                    self._changed.notify_all()

        with self._changed:
            self._awake += 1
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def join(self, thread: threading.Thread) -> None:
        """Wait for the end of a thread; meanwhile time goes on without the caller."""
        with self._changed:
            if thread not in self._ended:
                self._joined = thread
                self._stop()
                assert self._changed.wait_for(lambda: thread in self._ended, 60)
                self._joined = None
        thread.join()


CLOCK = Clock()


class Signs:
    """Knows who is dead, as the test says."""

    def __init__(self) -> None:
        self.dead: set[int] = set()

    def silent(self, ranks: Collection[int]) -> set[int]:
        return self.dead & set(ranks)


def _members(store: dist.Store, count: int, signs: Signs, **settings: Any) -> list[Membership]:
    options: dict[str, Any] = {"min_ranks": 2, "grace": GRACE, "first_ranks": count, **settings}
    options |= {"now": CLOCK.now, "sleep": CLOCK.sleep}
    return [Membership(store, signs.silent, **options) for _ in range(count)]


def _wanting(member: Membership) -> list[int]:
    """The ranks that want to take part, as a member reads them."""
    return member._asking(member.current())[0]


def _together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each gives or raises, called at the same time."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:
            found[number] = error

    for thread in [CLOCK.start(partial(run, n)) for n in range(len(calls))]:
        CLOCK.join(thread)
    return found


def _entering(late: Membership) -> tuple[list[View], threading.Thread]:
    """Where the view comes that has a new rank, and the thread in which it waits for that."""
    entered: list[View] = []
    return entered, CLOCK.start(lambda: entered.append(late.enter(10.0)))


def _wait_until(condition: Callable[[], object]) -> None:
    deadline = CLOCK.now() + 5
    while not condition():
        assert CLOCK.now() < deadline
        CLOCK.sleep(0.01)


def _started(count: int, **settings: Any) -> tuple[dist.Store, Signs, list[Membership]]:
    store, signs = dist.HashStore(), Signs()
    members = _members(store, count, signs, **settings)
    views = _together([lambda m=m: m.enter(10.0) for m in members])
    assert len(set(views)) == 1 and views[0].members == tuple(m.own for m in members)
    for member in members:
        member.is_new = False
    return store, signs, members


def test_those_that_come_first_begin() -> None:
    _, _, members = _started(4)
    view = members[0].view
    assert view is not None
    assert (view.number, view.steps) == (1, 0)
    # The first one's parameters are everybody's.
    assert view.trained == (members[0].own,)


def test_those_that_come_within_grace_begin_where_their_number_is_not_known() -> None:
    _, _, members = _started(3, first_ranks=None)
    assert members[0].view is not None and len(members[0].view.members) == 3


def test_too_few_wait_and_raise() -> None:
    (member,) = _members(dist.HashStore(), 1, Signs())
    with pytest.raises(TooFewRanksError, match="1 ranks want to, 2 are needed"):
        member.enter(0.1)


def test_the_others_go_on_without_a_rank_that_has_ended() -> None:
    _, _, members = _started(4, grace=LONG)
    left = members[:2] + members[3:]
    lost = Lost(ended=frozenset([members[2].own]))
    # One has seen it. That the others need not wait for it they learn from that one.
    views = _together(
        [lambda m=m, n=n: m.change(7, lost if n == 0 else Lost()) for n, m in enumerate(left)]
    )
    assert len(set(views)) == 1
    assert views[0].members == tuple(m.own for m in left)
    assert (views[0].number, views[0].steps, views[0].new) == (2, 7, ())


def test_a_rank_that_nobody_knows_to_be_lost_has_its_time() -> None:
    _, _, members = _started(3)
    begun = CLOCK.now()
    views = _together([lambda m=m: m.change(0) for m in members[:2]])
    assert CLOCK.now() - begun >= GRACE
    assert {view.members for view in views} == {(members[0].own, members[1].own)}
    # It comes late, and learns that the others have gone on.
    with pytest.raises(LeftOutError, match="continue without this one"):
        members[2].change(0)


def test_a_rank_that_shows_no_sign_of_life_is_not_waited_for() -> None:
    _, signs, members = _started(3, grace=LONG)
    signs.dead.add(members[1].own)
    views = _together([lambda m=m: m.change(0) for m in (members[0], members[2])])
    assert {view.members for view in views} == {(members[0].own, members[2].own)}


def test_half_of_the_ranks_do_not_go_on_unless_the_others_have_ended() -> None:
    _, signs, members = _started(4)
    signs.dead.update(m.own for m in members[2:])
    errors = _together([lambda m=m: m.change(0) for m in members[:2]])
    assert all(isinstance(error, TooFewRanksError) for error in errors)
    assert "more than half" in str(errors[0])
    _, _, members = _started(4)
    lost = Lost(ended=frozenset(m.own for m in members[2:]))
    views = _together([lambda m=m: m.change(0, lost) for m in members[:2]])
    assert {view.members for view in views} == {tuple(m.own for m in members[:2])}


def test_of_a_split_network_the_larger_side_goes_on() -> None:
    _, _, members = _started(5)
    sides = members[:2], members[2:]
    owns = [frozenset(m.own for m in side) for side in sides]
    found = _together(
        [lambda m=m: m.change(3, Lost(unreachable=owns[1])) for m in sides[0]]
        + [lambda m=m: m.change(3, Lost(unreachable=owns[0])) for m in sides[1]]
    )
    assert all(isinstance(error, LeftOutError) for error in found[:2])
    assert {view.members for view in found[2:]} == {tuple(sorted(owns[1]))}


def test_a_rank_that_is_here_is_alive() -> None:
    store, _, members = _started(3)
    thought = [Lost(ended=frozenset([members[1].own]), silent=frozenset([members[2].own]))]
    for member in members[1:]:  # else the first may not wait until they are here
        store.append("here/2", member._entry(3, *thought))
    views = _together([lambda m=m: m.change(3, *thought) for m in members])
    assert {view.members for view in views} == {tuple(m.own for m in members)}


def test_too_few_ranks_do_not_go_on() -> None:
    _, _, members = _started(3, min_ranks=3)
    lost = Lost(ended=frozenset([members[0].own]))
    errors = _together([lambda m=m: m.change(0, lost) for m in members[1:]])
    assert all(isinstance(error, TooFewRanksError) for error in errors)
    assert "2 ranks are left and 0 want to join, but 3 are needed" in str(errors[0])


def test_ranks_count_the_step_after_which_the_others_have_left() -> None:
    _, _, members = _started(3, min_ranks=3)
    for member in members[:2]:
        member.leave(5)
    view = members[2].change(4)
    assert (view.members, view.steps) == ((members[2].own,), 5)


def test_ranks_that_leave_before_the_step_do_not_count_among_min_ranks() -> None:
    _, _, members = _started(3, min_ranks=3)
    for member in members[:2]:
        member.leave(4)
    with pytest.raises(TooFewRanksError, match="1 ranks are left"):
        members[2].change(4)


def test_a_new_rank_is_let_in_where_the_others_change() -> None:
    store, signs, members = _started(2)
    (late,) = _members(store, 1, signs)
    entered, thread = _entering(late)
    _wait_until(partial(_wanting, members[0]))
    views = _together([lambda m=m: m.change(5) for m in members])
    CLOCK.join(thread)
    assert {*views, *entered} == {views[0]}
    assert views[0].members == (*(m.own for m in members), late.own)
    assert views[0].new == (late.own,) and views[0].steps == 5
    assert late.is_new and not _wanting(members[0])


def test_new_ranks_wait_where_the_others_change_without_letting_in() -> None:
    store, signs, members = _started(3, min_ranks=3)
    lost = Lost(ended=frozenset([members[0].own]))
    left = members[1:]
    (late,) = _members(store, 1, signs)
    entered, thread = _entering(late)
    _wait_until(partial(_wanting, left[0]))
    # With the one that waits they are enough.
    views = _together([lambda m=m: m.change(5, lost, lets_in=False) for m in left])
    assert views[0] == views[1] and views[0].members == tuple(m.own for m in left)
    assert _wanting(left[0]) == [late.own], "members still know that it waits"
    views = _together([lambda m=m: m.change(6) for m in left])
    CLOCK.join(thread)
    assert {*views, *entered} == {views[0]}
    assert views[0].members == (*(m.own for m in left), late.own) and late.is_new


def test_a_new_rank_whose_view_has_gone_waits_for_the_next() -> None:
    store, signs, members = _started(3)
    (late,) = _members(store, 1, signs, grace=LONG)
    store.append("wanting", f"{late.own} ")
    views = _together([lambda m=m: m.change(5) for m in members])
    late.view, late.is_new = views[0], True
    assert views[0].new == (late.own,)
    left = members[1:]
    lost = Lost(ended=frozenset([members[0].own]))
    entered: list[View] = []
    thread = CLOCK.start(lambda: entered.append(late.change(5, lets_in=False)))
    views = _together([lambda m=m: m.change(5, lost, lets_in=False) for m in left])
    assert views[0].members == tuple(m.own for m in left)
    _wait_until(partial(_wanting, left[0]))
    views = _together([lambda m=m: m.change(6) for m in left])
    CLOCK.join(thread)
    assert entered == [views[0]] and views[0].new == (late.own,) and late.view == views[0]


def test_a_new_rank_that_was_lost_again_is_not_let_in() -> None:
    store, signs, members = _started(2)
    (late,) = _members(store, 1, signs)
    store.append("wanting", f"{late.own} ")
    signs.dead.add(late.own)
    views = _together([lambda m=m: m.change(5) for m in members])
    assert views[0].members == tuple(m.own for m in members)


def test_a_rank_that_was_overlooked_asks_again() -> None:
    store, signs, members = _started(2)
    (late,) = _members(store, 1, signs)
    signs.dead.add(late.own)  # it has just stood still
    entered, thread = _entering(late)
    _wait_until(lambda: store.check(["wanted"]) and store.add("wanted", 0) >= 3)
    (view, _) = _together([lambda m=m: m.change(5) for m in members])
    assert late.own not in view.members
    signs.dead.clear()
    _wait_until(partial(_wanting, members[0]))
    views = _together([lambda m=m: m.change(5) for m in members])
    CLOCK.join(thread)
    assert entered == [views[0]] and views[0].new == (late.own,)


def test_a_rank_that_is_always_overlooked_gives_up() -> None:
    store, signs, _ = _started(2)
    (late,) = _members(store, 1, signs)
    late._asking = lambda view: ([], 0, 0)  # type: ignore[method-assign]
    with pytest.raises(TooFewRanksError, match="0 ranks want to"):
        late.enter(0.2)


class _BusyStore:
    """A store in which somebody asks to take part after each look at who does."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found = self._store.compare_set(key, expected, desired)
        if key == "wanting":
            self._store.append("wanting", f"{self._store.add('ranks', 1)} ")
        return found


def test_a_rank_that_asks_while_the_others_look_is_not_overlooked() -> None:
    store, _, members = _started(1, min_ranks=1)
    members[0]._store = _BusyStore(store)
    late = store.add("ranks", 1)
    store.append("wanting", f"{late} ")
    assert members[0].change(5).members == (members[0].own, late)
    members[0]._store = store
    assert _wanting(members[0])[0] == late + 1


def test_words_of_others_in_the_store_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    store, signs, members = _started(2)
    (late,) = _members(store, 1, signs)
    for key in ("wanting", "left", "here/2"):
        store.append(key, f"hello 1:2:3:4 :, 99999 -7 {'9' * 30}:0:0:::1 1:{'9' * 30} 9:5:0:::1 ")
    entered, thread = _entering(late)
    _wait_until(partial(_wanting, members[0]))
    views = _together([lambda m=m: m.change(5) for m in members])
    CLOCK.join(thread)
    assert {*views, *entered} == {views[0]}
    assert views[0].members == (*(m.own for m in members), late.own)
    assert "the store's list 'wanting' has the entry 'hello', which is skipped" in caplog.text
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == len(set(texts)), "each rank logs each entry once"


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("text", [b"hello", b"\xff\xfe", b"9" * 30, b"", b"-7"])
@pytest.mark.parametrize("key", ["wanted", "ranks"])
def test_other_texts_in_a_counter_are_replaced(
    key: str, text: bytes, is_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A store closes the connection of whoever adds to them."""
    store, signs, members = _started(2)
    if is_first:
        store.set(key, text)
    (late,) = _members(store, 1, signs)
    if not is_first:
        store.set(key, text)
    entered, thread = _entering(late)
    _wait_until(partial(_wanting, members[0]))
    views = _together([lambda m=m: m.change(5) for m in members])
    CLOCK.join(thread)
    assert {*views, *entered} == {views[0]}
    assert views[0].members == (*(m.own for m in members), late.own)
    assert f"the store's counter '{key}' has {text!r}, which is replaced" in caplog.text


def test_a_rank_asks_again_where_the_number_of_requests_is_too_low() -> None:
    store, signs, members = _started(2)
    (late,) = _members(store, 1, signs)
    view = members[0].view
    assert view is not None
    store.add("wanted", -5)
    _, thread = _entering(late)
    _wait_until(lambda: store.add("wanted", 0) > view.wanted)
    _together([lambda m=m: m.change(5) for m in members])
    CLOCK.join(thread)


def test_the_store_keeps_no_entries_that_nobody_reads() -> None:
    store, _, members = _started(2)
    for steps in range(4):
        _together([lambda m=m, steps=steps: m.change(steps) for m in members])
    assert [number for number in range(8) if store.check([f"here/{number}"])] == [5]


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        "[" * 100_000,
        '{"number": 1, "members": [], "new": []}',
        '{"number": 1, "members": "ab", "new": []}',
        '{"number": 1e999, "members": [1], "new": []}',
        '{"number": 1, "members": [[1]], "new": []}',
    ],
    ids=range(6),
)
def test_a_store_with_another_text_for_the_view(text: str) -> None:
    store, _, members = _started(1, min_ranks=1)
    store.set("view", text)
    with pytest.raises(
        RuntimeError, match=rf"members must be one of .*, got '{re.escape(text[:9])}"
    ):
        members[0].current()


def test_nobody_that_has_trained_is_left() -> None:
    store, signs, members = _started(2)
    (late,) = _members(store, 1, signs)
    late.view, late.is_new = members[0].view, True
    view = members[0].view
    assert view is not None
    late.view = View(view.number, (*view.members, late.own), (late.own,), 3)
    late._store.set("view", late.view.as_text())
    signs.dead.update(view.members)
    lost = Lost(ended=frozenset(view.members))
    with pytest.raises(TooFewRanksError, match="no rank with trained parameters is left"):
        late.change(3, lost)


def test_another_rank_is_the_first_where_that_is_lost_before_the_first_step() -> None:
    _, _, members = _started(3)
    first, *others = members
    for each in others:
        each.is_new = True  # it has not got the first one's parameters yet
    lost = Lost(ended=frozenset([first.own]))
    views = _together([lambda m=m: m.change(0, lost) for m in others])
    assert len(set(views)) == 1
    assert views[0].members == (others[0].own, others[1].own)
    assert views[0].new == (others[1].own,)
    assert not others[0].is_new and others[1].is_new


def test_new_ranks_begin_anew_where_all_members_have_gone() -> None:
    store, signs, members = _started(2)
    signs.dead.update(m.own for m in members)
    late = _members(store, 2, signs, first_ranks=None)
    views = _together([lambda m=m: m.enter(10.0) for m in late])
    assert len(set(views)) == 1
    assert views[0].members == tuple(m.own for m in late) and views[0].number == 2


def _changed(member: Membership, steps: int, ended: frozenset[int], after: float) -> View:
    CLOCK.sleep(after)
    return member.change(steps, Lost(ended=ended))


@pytest.mark.parametrize("seed", range(4))
def test_random_histories(seed: int) -> None:
    chosen = random.Random(seed)
    store, signs, members = _started(5, grace=0.15, min_ranks=1)
    for steps in range(1, 6):
        gone = [m for m in members if len(members) > 2 and chosen.random() < 0.25]
        gone = gone[: (len(members) - 1) // 2]
        silent = frozenset(m.own for m in gone if chosen.random() < 0.5)
        ended = frozenset(m.own for m in gone) - silent
        signs.dead |= silent
        members = [m for m in members if m not in gone]
        late = _members(store, chosen.randrange(3), signs, grace=0.15, min_ranks=1)
        for each in late:
            store.append("wanting", f"{each.own} ")
        known_by = [ended if chosen.random() < 0.5 else frozenset() for _ in members]
        views = _together(
            [
                partial(_changed, m, steps, known, chosen.random() * 0.02)
                for m, known in zip(members, known_by, strict=True)
            ]
        )
        assert len(set(views)) == 1, views
        view = views[0]
        assert view.members == (*(m.own for m in members), *(m.own for m in late))
        assert view.steps == steps
        for each in late:
            assert each.enter(5.0) == view
            each.is_new = False
        members += late
