"""A training that goes on when ranks are lost: its settings, and the ranks as one sees them."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import NoneType
from typing import Any

import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.addresses import family_of, host_and_port
from torch_commhook.collectives.gloo_groups import destroy_group, make_group, state_of
from torch_commhook.elastic.membership import Heartbeats, LeftOutError, Lost, Membership, View
from torch_commhook.elastic.stores import own_address, store_of
from torch_commhook.metrics import MembershipEvent
from torch_commhook.step.connected_group import (
    PeerError,
    can_append,
    hashed,
    innermost,
    read_now,
    remove_address,
)
from torch_commhook.step.step_group import StepGroup, tell_unreachable
from torch_commhook.wording import check_type

# ---- tests whether the members of a training can connect to each other ---------------------------


#: The number of members that are tried at once.
_AT_ONCE = 64


class PortProbe:
    """A port of this process that others can connect to, and the ports of others.

    The process never accepts these connections: it suffices that the system does.

    Args:
        store: where members find each other's ports.
        own: this process's number.
        timeout: seconds after which a member counts as unreachable.
        address: that of this process's host.
    """

    def __init__(self, store: dist.Store, own: int, timeout: float, address: str) -> None:
        self._store = store
        self._own = own
        self._timeout = timeout
        self._socket = socket.create_server((address, 0), family=family_of(address), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        store.set(_key(own), f"{address} {self.port}")

    def unreachable(self, ranks: Collection[int]) -> frozenset[int]:
        """The members that this process cannot connect to."""
        if not ranks:
            return frozenset()
        with ThreadPoolExecutor(min(len(ranks), _AT_ONCE)) as pool:
            reached = pool.map(self._reaches, ranks)
            return frozenset(
                rank for rank, is_there in zip(ranks, reached, strict=True) if not is_there
            )

    def _reaches(self, rank: int) -> bool:
        with suppress(OSError, RuntimeError, ValueError, OverflowError):
            host, _, port = (read_now(self._store, _key(rank)) or "").rpartition(" ")
            with socket.create_connection((host, int(port)), timeout=self._timeout):
                return True
        return False

    def close(self) -> None:
        """Close the port, and remove it from the store."""
        self._socket.close()
        with suppress(RuntimeError):  # the store may be gone
            self._store.delete_key(_key(self._own))


def _key(rank: int) -> str:
    return f"door/{rank}"


# ---- settings of a training that continues when ranks are lost -----------------------------------


#: The types of settings, and their name in errors.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("min_ranks", "straggler_steps"), ((int,), "an int")),
    "ranks": ((int, NoneType), "an int"),
    **dict.fromkeys(("grace", "timeout"), ((int, float), "a number of s")),
    "straggler": ((int, float, NoneType), "a number or None"),
    "leave_out_stragglers": ((bool,), "a bool"),
    "leave_on": ((int, NoneType), "a signal or None"),
    "store": ((str, dist.Store, NoneType), "'host:port', a store of torch.distributed or None"),
}


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Settings for :func:`attach`: training continues when ranks are lost, and admits new ranks.

    See ``docs/elastic.md``.

    Attributes:
        min_ranks: the smallest number of ranks that trains. Fewer ranks wait for ``grace``, and
            then raise :class:`TooFewRanksError`.
        name: the training's name in the store, such as ``"first-run"``. All processes that give one
            name and one store train together, so each training needs its own.
        grace: seconds within which the ranks agree on who is left. A rank is lost when its process
            ends, or when it shows no sign of life for half of this time.
        state: objects that a new rank receives beside the model's parameters and buffers and the
            hook's shared memory: optimizers, schedulers, any objects with ``state_dict()`` and
            ``load_state_dict()``. The same on all ranks, in the same order.
        store: where the ranks meet: ``"host:port"`` or, with an IPv6 address, ``"[::1]:29400"``, as
            of ``python -m torch_commhook store``; or a store of ``torch.distributed``. It must live
            as long as the training. None means ``MASTER_ADDR`` and ``MASTER_PORT``, where
            ``torchrun`` runs one.
        ranks: training begins at once with so many ranks. Fewer ranks, at least ``min_ranks``,
            begin if no further rank comes for half of ``grace``; with None, this alone counts.
        timeout: seconds that a new rank waits for admission, and that a collective may take.
        straggler: a rank is slow in a step if its computing time exceeds this many times the median
            of all ranks; above 1. The log and :meth:`HookHandle.stats` name a rank that stays slow.
            None compares nothing.
        straggler_steps: a rank is named after this many consecutive slow steps; with ``local_sgd``,
            rounds.
        leave_out_stragglers: whether the others continue without such a rank, if ``min_ranks`` are
            left. It raises :class:`LeftOutError`.
        leave_on: a signal on which this process leaves in order, such as ``signal.SIGTERM``: it
            finishes the step, gives its error memory to another rank, and leaves; no rank repeats a
            step. Its next forward calls ``on_leave`` and raises ``SystemExit(128 + leave_on)``. A
            second signal has the effect that it had before :func:`attach`, which must run in the
            main thread.
        on_leave: a function without arguments that saves the training. Only a process that leaves
            in order calls it. Its parameters and optimizers are those of the other ranks.

    Raises:
        TypeError, ValueError: an attribute has a wrong type or value.

    Example:
        >>> settings = Elastic(min_ranks=6, name="first-run", grace=5.0, straggler=2.0)
        >>> settings.min_ranks, settings.timeout
        (6, 1800.0)
    """

    min_ranks: int
    name: str
    grace: float = 10.0
    state: Sequence[Any] = ()
    store: str | dist.Store | None = None
    ranks: int | None = None
    timeout: float = 1800.0
    straggler: float | None = None
    straggler_steps: int = 10
    leave_out_stragglers: bool = False
    leave_on: int | None = None
    on_leave: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        for name, (kinds, what) in _KINDS.items():
            check_type(f"Elastic: {name}", getattr(self, name), what, *kinds)

        def check(name: str, is_right: bool, what: str) -> None:
            if not is_right:
                raise ValueError(f"Elastic: {name} must be {what}, got {getattr(self, name)!r}")

        for name in ("min_ranks", "ranks", "straggler_steps"):
            value = getattr(self, name)
            check(name, value is None or value >= 1, "at least 1")
        least, ranks, factor = self.min_ranks, self.ranks, self.straggler
        check("ranks", ranks is None or ranks >= least, f"at least min_ranks, {least}")
        for name in ("grace", "timeout"):
            check(name, 0 < getattr(self, name) <= 1e6, "a positive number of s")
        check("straggler", factor is None or 1 < factor <= 1e6, "a number above 1")
        is_named = isinstance(self.name, str) and self.name != ""
        check("name", is_named, "a text that only this training has")
        if self.leave_out_stragglers and factor is None:
            raise ValueError("Elastic: leave_out_stragglers needs straggler, got None")
        handled = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        is_signal = self.leave_on is None or self.leave_on in handled
        check("leave_on", is_signal, "a signal that a process can handle")
        if self.on_leave is not None and (self.leave_on is None or not callable(self.on_leave)):
            raise TypeError("Elastic: on_leave must be a function, and needs leave_on")
        if isinstance(self.store, str):
            host_and_port(self.store)
        if isinstance(self.state, (str, bytes)) or not isinstance(self.state, Sequence):
            raise TypeError(f"Elastic: state must be a list, got {_C.type_name(self.state)}")
        for number, each in enumerate(self.state):
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(each, method, None)):
                    raise TypeError(
                        f"Elastic: state[{number}] must have {method}(), got {_C.type_name(each)}"
                    )


# ---- the ranks of a training that continues when some are lost, seen from one of them ------------


_log = logging.getLogger("torch_commhook.elastic")


#: The name of the first rank's number, beside a training's settings.
_FIRST = "the first rank"


class ElasticRanks:
    """This process's place among the ranks of a training.

    Args:
        settings: the user's settings.
        devices: the types of devices with the model's parameters, beside the CPU.

    Attributes:
        settings: as given.
        membership: the members.
        steps: the number of steps that count on this rank; on a new rank, those of the training.
            With local steps, of exchanges.
        trained: the number of the training's steps in this rank's parameters; with local steps, of
            those.
        group: the group of the present ranks.
        events: the ranks that were lost or have joined while this rank takes part.
        asked_by: the signal that has asked this process to leave, or None.
        handed_over: the members whose error memory others have.
        lets_in_late: whether new ranks may take part in a repeated step.
        keeps_error: says whether a lost rank takes error memory with it.
    """

    group: StepGroup

    def __init__(self, settings: Elastic, devices: Collection[str] = ()) -> None:
        if settings.leave_on is not None and (
            threading.current_thread() is not threading.main_thread()
        ):
            raise RuntimeError(
                "attach: Elastic(leave_on=) needs the main thread, which alone handles signals"
            )
        self.settings = settings
        self._devices = devices
        self.steps = self.trained = 0
        self.events: list[MembershipEvent] = []
        self.asked_by: int | None = None
        self.handed_over: set[int] = set()
        self.lets_in_late: Callable[[], bool] = lambda: True
        self.keeps_error: Callable[[], bool] = lambda: False
        self._same: dict[str, str] = {}  # settings that all ranks share
        self._members: tuple[int, ...] = ()  # at the last connection
        self._reason = ""  # why the next members differ
        prefix = f"commhook-elastic/{hashed(settings.name)}"
        store, host = store_of(settings.store, settings.timeout)
        self._store: Any = dist.PrefixStore(prefix, store)
        if not can_append(self._store):
            raise ValueError(
                "Elastic: store must be one that can append, such as a TCPStore, got "
                f"{type(settings.store).__name__}"
            )
        half = settings.grace / 2
        self._callbacks: list[Callable[[int, int], object]] = []
        self._stopped = threading.Event()
        self.membership = Membership(
            self._store,
            lambda ranks: self._signs.silent(ranks),
            min_ranks=settings.min_ranks,
            grace=half,
            patience=settings.timeout,
            first_ranks=settings.ranks,
        )
        self._signs = Heartbeats(self._store, self.membership.own, half)
        self._door = PortProbe(self._store, self.membership.own, half, own_address(host))
        self._base: dist.ProcessGroup | None = None
        self._addresses: list[Callable[[], object]] = []  # remove those of groups that have ended
        self._base_address: Callable[[], object] = lambda: None  # removes that of the base
        self._reasons: list[Callable[[], object]] = []  # remove these groups' reasons
        self._process = os.getpid()
        self._handler: Any = None  # of the signal, before this training
        if settings.leave_on is not None:
            self._handler = signal.signal(settings.leave_on, self._on_signal)
        atexit.register(self.leave)

    @property
    def view(self) -> View:
        """The members."""
        view = self.membership.view
        assert view is not None
        return view

    @property
    def rank(self) -> int:
        """This process's place among the members."""
        return self.view.members.index(self.membership.own)

    def on_membership(self, callback: Callable[[int, int], object]) -> None:
        """Call a function with this process's rank and the number of ranks: now, and on changes."""
        callback(self.rank, len(self.view.members))
        self._callbacks.append(callback)

    # ---- joining and leaving ---------------------------------------------------------------------

    def check_same(self, settings: dict[str, object]) -> None:
        """Compare settings with those of the training's first rank.

        The settings of a training that has ended are replaced: all its ranks have left, or show no
        sign of life within ``grace``.

        Raises:
            RuntimeError: a setting differs. The message names it.
        """
        own = {name: repr(value) for name, value in settings.items()}
        until = time.monotonic() + self.settings.grace
        before = ""
        while True:
            text = json.dumps({**own, _FIRST: str(self.membership.own)})
            found = self._store.compare_set("settings", before, text).decode(errors="replace")
            first = _checked_settings(found)
            differing = next((name for name in own if first.get(name) != own[name]), None)
            number = int(first[_FIRST])
            has_ended = number != self.membership.own and self.membership.has_ended(number)
            if has_ended:  # also where settings are the same: others now find this rank there
                before = found
            elif differing is None:
                self._same = first
                return
            elif time.monotonic() < until:
                time.sleep(self.settings.grace / 50)
            else:
                raise RuntimeError(
                    f"attach: {differing} must be the same on all ranks: this one has "
                    f"{own[differing]}, the first rank of training {self.settings.name!r} has "
                    f"{first.get(differing)}; give another training another Elastic(name=)"
                )

    def change_settings(self, settings: dict[str, object]) -> None:
        """Change settings of :meth:`check_same` on all ranks; new ranks must have these."""
        self._same = {**self._same, **{name: repr(value) for name, value in settings.items()}}
        with suppress(RuntimeError):  # without the store no rank can join
            self._store.set("settings", json.dumps(self._same))

    def enter(self) -> None:
        """Join the training, at its beginning or later."""
        view = self.membership.enter(self.settings.timeout)
        self.steps = view.steps
        threading.Thread(target=self._look_after, name="commhook-elastic", daemon=True).start()
        self._connect()

    def _on_signal(self, number: int, _: object) -> None:
        """Note the first signal to a member. Otherwise the signal has its effect of before."""
        if self.asked_by is None and self.membership.view is not None:
            self.asked_by = number
            _log.warning(
                "rank %d leaves after this step, because of %s",
                self.membership.own,
                signal.Signals(number).name,
            )
        else:
            self._restore_handler()
            os.kill(os.getpid(), number)

    def _restore_handler(self) -> None:
        number, handler = self.settings.leave_on, self._handler
        with suppress(ValueError):  # another thread than the main one leaves
            if number is not None and signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def end_if_left(self) -> None:
        """End a process that has left in order.

        Raises:
            SystemExit: it has.
        """
        if self.asked_by is not None and self._stopped.is_set():
            self._restore_handler()
            number, self.asked_by = self.asked_by, None  # the user's function may call the model
            if self.settings.on_leave is not None:
                self.settings.on_leave()
            raise SystemExit(128 + number)

    def leave(self, *, within: float = 0.0) -> None:
        """Leave the training. The others continue without this rank.

        Args:
            within: the longest wait in seconds until they have agreed on the next members. Until
                then some of them still receive the end of the last step.
        """
        # A forked process leaves nothing: it shares its parent's connections.
        if self._stopped.is_set() or os.getpid() != self._process:
            return
        self._stopped.set()
        atexit.unregister(self.leave)
        with suppress(RuntimeError):  # the store may be gone
            self.membership.leave(self.steps)
        until = time.monotonic() + within
        while time.monotonic() < until and self._signs.view_number() <= self.view.number:
            time.sleep(0.01)
        if self.asked_by is None:
            self._restore_handler()
        group: StepGroup | None = getattr(self, "group", None)  # None: it has never connected
        if group is not None and self._base is not None:
            group.fail("it has left the training")
        self._give_up_group()
        self._forget(reasons=False)
        self._signs.stop()
        self._door.close()

    def wants_change(self) -> bool:
        """Whether this rank knows of a rank that wants to join, or of too few members."""
        if len(self.view.members) < self.settings.min_ranks:
            return True
        return self._signs.wanted() > self.view.wanted

    # ---- continuing ------------------------------------------------------------------------------

    def go_on(self, error: BaseException, *, has_results: bool) -> bool:
        """Agree with the other ranks on who continues after a failure; sets a new :attr:`group`.

        Args:
            error: the error on this rank.
            has_results: whether this rank has all results of the open step.

        Returns:
            Whether that step counts: it has succeeded on all ranks, and some know that already.

        Raises:
            BaseException: ``error``, if this rank is at fault or the others continue without it.
        """
        raised = self.group.fail_with(error)
        if not isinstance(raised, PeerError) or not isinstance(error, Exception):
            self.leave()
            raise error
        _log.warning("rank %d: %s", self.membership.own, raised)
        self._change(_lost(raised), raised, lets_in=self.lets_in_late())
        self._connect()
        counts = self.view.steps > self.steps
        if counts and not has_results:
            self.leave()
            raise LeftOutError(
                "torch_commhook: the other ranks have done a step, and this one lacks its results"
            )
        return counts

    def step_ended(
        self,
        *,
        wants_change: bool,
        left_out: Collection[int] = (),
        leaving: Collection[int] = (),
        lets_in: bool = True,
    ) -> bool:
        """Count a step. If ranks come or go, this sets a new :attr:`group`.

        Args:
            wants_change: whether a rank knows of a rank that wants to join.
            left_out: the ranks to leave out because they are slow.
            leaving: the ranks that leave by themselves.
            lets_in: whether new ranks may join.

        Returns:
            Whether the group is new.

        Raises:
            LeftOutError: this rank is left out.
        """
        self.steps += 1
        if self.membership.own in left_out:
            self.leave()
            raise LeftOutError(
                f"torch_commhook: the other ranks continue without this one (rank "
                f"{self.membership.own}), because it was too slow in "
                f"{self.settings.straggler_steps} consecutive steps: it computed for more than "
                f"{self.settings.straggler:g} times their median"
            )
        if self.membership.own in leaving:
            self.leave(within=self.settings.grace if len(self.view.members) > 1 else 0.0)
            return False
        if not wants_change and not left_out and not leaving:
            return False
        for ranks, why in ((left_out, "too slow"), (leaving, "it has left in order")):
            if ranks:
                named = ", ".join(f"rank {rank}" for rank in sorted(ranks))
                self._reason = f"{named}: {why}"
        self._change(Lost(ended=frozenset([*left_out, *leaving])), None, lets_in=lets_in)
        self._connect()
        return True

    def unreachable(self, error: RuntimeError) -> PeerError:
        """Fail the step because this rank could not connect to all others. Returns the error."""
        self.group.lose(None, f"since ranks could not connect: {error}")
        return self.group.explain(error)

    def _others(self) -> list[int]:
        return [rank for rank in self.view.members if rank != self.membership.own]

    def _change(self, lost: Lost, cause: BaseException | None, *, lets_in: bool = True) -> None:
        if cause is not None and not self._reason:
            said = str(cause).removeprefix("torch_commhook: ")
            self._reason = said.partition(", as rank ")[0].partition("\n")[0]
        try:
            self.membership.change(self.steps, lost, lets_in=lets_in)
        except dist.DistNetworkError as error:
            self.leave()
            raise RuntimeError(
                "torch_commhook: the store through which the ranks agree on who continues does "
                f"not answer ({error}); run another one, and restart all ranks"
            ) from (cause or error)
        except BaseException as error:
            self.leave()
            raise error from cause
        if self.membership.is_new and not self.membership.has_begun:
            self.steps = self.view.steps

    def _connect(self) -> None:
        """Connect to the members of the view, or of the next view if some are unreachable."""
        while True:
            view = self.view
            self._watch()
            self._give_up_group()
            try:
                self._make_group(view)
            except RuntimeError as error:
                _log.warning("rank %d: view %d: %s", self.membership.own, view.number, error)
                if self._base is not None:
                    tell_unreachable(self._base, error)
                lost = Lost(unreachable=self._door.unreachable(self._others()))
                self._change(lost, error, lets_in=self.lets_in_late())
                continue
            self._forget(reasons=True)  # all members have left those views
            _log.info(
                "rank %d: view %d, rank %d of %d after %d steps",
                self.membership.own,
                view.number,
                self.rank,
                len(view.members),
                view.steps,
            )
            has_changed = view.members != self._members
            self._note_event(view)
            for callback in self._callbacks if has_changed else ():
                callback(self.rank, len(view.members))
            return

    def _note_event(self, view: View) -> None:
        """Log the ranks that were lost or have joined since the last connection."""
        before, now = self._members, view.members
        self._members, reason, self._reason = now, self._reason, ""
        lost = tuple(rank for rank in before if rank not in now)
        joined = tuple(rank for rank in now if rank not in before)
        if not before or not (lost or joined):
            return
        event = MembershipEvent(
            steps=self.trained,
            size=len(now),
            lost=lost,
            joined=joined,
            reason=reason if lost else "",
            error_lost=not self.handed_over.issuperset(lost) and self.keeps_error(),
        )
        self.events.append(event)
        _log.warning("rank %d: %s", self.membership.own, event)

    def _make_group(self, view: View) -> None:
        # Over a separate connection: while one waits for a rank, it serves nothing else.
        own = self._store.clone()
        within = timedelta(seconds=self.settings.grace)
        if innermost(own) is not innermost(self._store):  # a HashStore is its own clone
            own.set_timeout(within)
        store = dist.PrefixStore(f"view{view.number}", own)
        name = f"{self.settings.name}, view {view.number}"
        base_store = dist.PrefixStore("base", store)
        self._base_address = partial(remove_address, base_store, self.rank)
        self._base = make_group(
            base_store,
            self.rank,
            view.members,
            name,
            timedelta(seconds=self.settings.timeout),
            description=name,
            within=within,
            devices=self._devices,
        )
        state_of(self._base).ports.add(self._door.port)
        self.group = StepGroup(self._base, meets_again=False, connect_within=within)

    def _forget(self, *, reasons: bool) -> None:
        """Remove this rank's keys of earlier views from the store."""
        forgets = [*self._addresses, *(self._reasons if reasons else [])]
        self._addresses, self._reasons = [], []
        with suppress(RuntimeError):  # the store may be gone
            for forget in forgets:
                forget()

    def _give_up_group(self) -> None:
        group: StepGroup | None = getattr(self, "group", None)
        if group is not None:
            self._reasons.append(group.forget_reason)
            group.close()
        if self._base is not None:
            self._addresses.append(self._base_address)
            destroy_group(self._base)
            self._base = None

    # ---- signs of life ---------------------------------------------------------------------------

    def _watch(self) -> None:
        self._signs.watch(self._others())

    def _look_after(self) -> None:
        """Fail the step when a member shows no sign of life, or the others have a newer view."""
        half = self.settings.grace / 2
        while not self._stopped.wait(half / 10):
            view, group = self.view, getattr(self, "group", None)
            silent = self._signs.silent(self._others())
            # A rank that was stopped for a while may get no error from its connections.
            is_old = self._signs.view_number() > view.number
            if group is None or self.view is not view:
                continue
            if silent:
                lost = min(silent)
                group.lose(lost, f"since rank {lost} has shown no sign of life for {half:g} s")
            elif is_old:
                group.lose(None, "since the other ranks continue without this one")


def _checked_settings(text: str) -> dict[str, str]:
    """The settings of a training's first rank. Raises a RuntimeError if the text has none."""
    with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
        found: dict[str, str] = json.loads(text)
        int(found[_FIRST])
        return found
    raise RuntimeError(
        f"attach: the store's settings of the training must be from this version of the library, "
        f"got {text[:200]!r}; give the training another Elastic(name=)"
    )


def _lost(error: PeerError) -> Lost:
    reason = error._reason
    if reason is None or reason.rank is None:
        return Lost()
    ranks = frozenset([reason.rank])
    return Lost(ended=ranks) if reason.has_ended else Lost(silent=ranks)
