"""Runs the library's code for ranks that come and go on doubles in virtual time.

The library's own code makes the decisions: ``Membership``, ``ElasticRanks``, ``ElasticTraining``,
``StepGroup``'s failures, ``ElasticStep``, and ``ElasticReducer`` after a failure. Doubles replace
the store, signs of life, ports and connections. A step ends with an exchange of flags, as in
``StepEnd``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from virtual_world import Endpoint, Process, WorldStore, the_world

from torch_commhook.attachment import elastic as attachment_module
from torch_commhook.attachment import training_state as state_module
from torch_commhook.elastic import joining as joining_module
from torch_commhook.elastic import ranks as ranks_module
from torch_commhook.elastic.membership import _SIGNS, VIEW_NUMBER, Membership
from torch_commhook.elastic.ranks import ElasticRanks
from torch_commhook.step.connected_group import Reason, Rendezvous
from torch_commhook.step.step_group import StepGroup

#: The timeout of a training's collectives, in seconds.
TIMEOUT = 8.0
#: Keys of numbers that are no signs of life.
_COUNTERS = ("wanted", VIEW_NUMBER)


class Signs:
    """Counts signs of life like ``SignsOfLife`` and ``Heartbeats``."""

    def __init__(self, store: WorldStore, own: int, silent_after: float) -> None:
        self._world = world = the_world()
        self._process = world.process
        self._prefix = store._prefix
        self._own = own
        self._silent_after = silent_after
        self._interval = silent_after / _SIGNS
        self._seen: dict[str, list[float]] = {key: [] for key in _COUNTERS}
        self._answered = world.now
        self._has_stopped = False
        self.looks: Callable[[], None] | None = None
        self.is_old: Callable[[], bool] = lambda: False
        world.after(world.random.random() * 0.01, self._tick)

    def _tick(self) -> None:
        process, world = self._process, self._world
        if self._has_stopped or process.is_dead:
            return
        world.after(self._interval, self._tick)
        if process.is_stopped or world.has_no_store(process.host):
            return
        self._number(f"alive/{self._own}", 1)
        since = min(world.now - self._answered, 2 * self._interval)
        self._answered = world.now
        for key, seen in self._seen.items():
            number = self._number(key, 0)
            is_new = not seen or seen[0] != number
            seen[:] = [number, 0.0 if is_new else seen[1] + since]
        if self.looks is not None and (self.is_old() or self._is_silent()):
            self.looks()

    def _is_silent(self) -> bool:
        return any(
            seen and seen[1] > self._silent_after
            for key, seen in self._seen.items()
            if key not in _COUNTERS
        )

    def _number(self, key: str, amount: int) -> int:
        values = self._world.values
        number = int(values.get(self._prefix + key, b"0")) + amount
        values[self._prefix + key] = str(number).encode()
        return number

    def watch(self, ranks: Collection[int]) -> None:
        keys = [*_COUNTERS, *(f"alive/{rank}" for rank in ranks)]
        self._seen = {key: self._seen.get(key, []) for key in keys}

    def silent(self, ranks: Collection[int]) -> set[int]:
        for rank in ranks:
            self._seen.setdefault(f"alive/{rank}", [])
        seen = {rank: self._seen[f"alive/{rank}"] for rank in ranks}
        return {rank for rank, each in seen.items() if each and each[1] > self._silent_after}

    def wanted(self) -> int:
        return self._count("wanted")

    def view_number(self) -> int:
        return self._count(VIEW_NUMBER)

    def _count(self, key: str) -> int:
        return int(self._seen[key][0]) if self._seen[key] else 0

    def stop(self) -> None:
        self._has_stopped = True


class PortProbe:
    """Finds reachable processes like ``PortProbe``."""

    port = 0

    def __init__(self, store: WorldStore, own: int, timeout: float, address: str) -> None:
        self._world = the_world()
        self._doors = self._world.doors
        self._own = own
        self._timeout = timeout
        self._doors[own] = self._world.process

    def unreachable(self, ranks: Collection[int]) -> frozenset[int]:
        if not self._answering(ranks) >= set(ranks):
            self._world.sleep(self._timeout)
        return frozenset(ranks) - self._answering(ranks)

    def _answering(self, ranks: Collection[int]) -> set[int]:
        own = self._world.process.host
        return {
            rank
            for rank in ranks
            if rank in self._doors
            and not self._doors[rank].is_dead
            and not self._world.are_apart(own, self._doors[rank].host)
        }

    def close(self) -> None:
        self._doors.pop(self._own, None)


class Event:
    """An event. A thread that waits for it checks signs of life, and wakes if one is missing."""

    def __init__(self) -> None:
        self._world = the_world()
        self._is_set = False
        self._must_look = False
        self._process: Process | None = None

    def set(self) -> None:
        self._is_set = True
        if self._process is not None:
            self._process.notify()

    def is_set(self) -> bool:
        return self._is_set

    def look(self) -> None:
        self._must_look = True
        if self._process is not None:
            self._process.notify()

    def wait(self, seconds: float) -> bool:
        self._must_look = False
        self._process = self._world.process
        self._world.wait_until(lambda: self._is_set or self._must_look, 1e9)
        return self._is_set


class Base:
    """The group from which a StepGroup is made."""

    def __init__(self, store: WorldStore, rank: int, members: Sequence[int]) -> None:
        self.store = store
        self.own_rank = rank
        self.members = tuple(members)

    def rendezvous(self) -> StoreRendezvous:
        return StoreRendezvous(self.store.under("commhook0"), self.own_rank, len(self.members))


class StoreRendezvous(Rendezvous):
    """Stores the reasons of failures in the virtual store."""

    def __init__(self, store: WorldStore, rank: int, size: int) -> None:
        self.store: Any = store
        self.epoch = 1
        self._rank = rank
        self._size = size


class Group(Endpoint):
    """The connections as hooks and :mod:`joining` use them, by rank."""

    def send_tensor(self, tensors: list[Tensor], rank: int, tag: int) -> SimpleNamespace:
        self.world.point("give")
        self.send(self.members[rank], ("tensor", tag), tensors[0].clone())
        self.world.sleep(self.world.random.random() * 0.004)  # until the receiver takes it
        return SimpleNamespace(wait=self.process.check)

    def receive_tensor(self, tensors: list[Tensor], rank: int, tag: int) -> SimpleNamespace:
        def wait() -> None:
            tensors[0].copy_(self.receive(self.members[rank], ("tensor", tag)))

        return SimpleNamespace(wait=wait)

    def transferred(self) -> SimpleNamespace:
        """This group with the names that :mod:`joining` calls."""
        return SimpleNamespace(send=self.send_tensor, recv=self.receive_tensor)

    def any_rank(self, flag: bool = True) -> bool:
        """Agrees like ``StepEnd``."""
        return any(self.exchange("end", flag))


class VirtualStepGroup(StepGroup):
    """A StepGroup over virtual connections. It fails like the real one."""

    def __init__(self, base: Base, *, meets_again: bool, connect_within: Any) -> None:
        world = the_world()
        self.parent: Any = base
        self._meets_again = meets_again
        self.size, self.rank = len(base.members), base.own_rank
        self.timeout = SimpleNamespace(total_seconds=lambda: TIMEOUT)  # type: ignore[assignment]
        self._open = self._broken = self.in_background = False
        self.users = weakref.WeakValueDictionary()
        self._step_end = self._comparison = None
        self._ranks = list(base.members)
        self._rendezvous = base.rendezvous() if self.size > 1 else None
        self._agrees = self.shares_used = self.size > 1
        self._outside = set()  # type: ignore[assignment]
        own = base.members[base.own_rank]
        name = base.store._prefix
        self.group: Any = Group(world, name, own, base.members, TIMEOUT)
        group = self.group
        self._own = [
            SimpleNamespace(
                group=group, close=lambda why: group.close(), failure=lambda: group.failure
            )
        ]  # type: ignore
        self._end: Any = group.close
        if self.size > 1:
            self.group.connect(connect_within.total_seconds())

    def begin(self) -> None:
        if self._open:
            self.fail("backward() was left by an exception")
        self.connect()
        self._open = self.size > 1

    def _others(self) -> list[StepGroup]:
        return []

    def _end_of_step(self) -> Any:
        return self.group


# ---- doubles of functions ------------------------------------------------------------------------


def _tell_unreachable(base: Base, error: BaseException) -> None:
    base.rendezvous().tell(Reason(f"since ranks could not connect: {error}", None, False))


def _begin_maximum(group: Group, own: Tensor) -> Callable[[], Tensor]:
    values = [own] * group.size()
    tag = group.begin_exchange("used", values)
    return lambda: torch.stack(group.end_exchange(tag, values)).amax(0)


def _broadcast(tensor: Tensor, *, src: int, group: Group) -> SimpleNamespace:
    values = [tensor] * group.size()
    tag = group.begin_exchange("buffers", values)
    return SimpleNamespace(wait=lambda: group.end_exchange(tag, values)[src])


class _Thread:
    """A thread of the process that starts it."""

    def __init__(self, target: Callable[[], object], name: str, daemon: bool) -> None:
        self._target = target
        self._has_ended = False

    def start(self) -> None:
        process = the_world().process

        def run() -> None:
            self._target()
            self._has_ended = True
            process.notify()

        process.start(run)

    def join(self) -> None:
        the_world().wait_until(lambda: self._has_ended, 1e9)


def _membership(*args: Any, **options: Any) -> Membership:
    world = the_world()
    return Membership(*args, now=lambda: world.now, sleep=world.sleep, **options)


def _watch(ranks: ElasticRanks) -> None:
    """Like the real function; its signs wake the thread that checks them."""
    signs: Any = ranks._signs
    signs.looks = ranks._stopped.look  # type: ignore[attr-defined]
    signs.is_old = lambda: signs.view_number() > ranks.view.number
    signs.watch(ranks._others())


def _transferred(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of :mod:`joining` over virtual connections."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*(each.transferred() if isinstance(each, Group) else each for each in args))

    return call


@contextmanager
def virtual_time() -> Iterator[None]:
    """Replaces parts of the library by the doubles."""
    atexit = SimpleNamespace(
        register=lambda call: the_world().process.exits.append(call),
        unregister=lambda call: the_world().process.exits.remove(call),
    )
    dist = SimpleNamespace(
        PrefixStore=lambda prefix, store: store.under(prefix),
        DistNetworkError=torch.distributed.DistNetworkError,
        Store=torch.distributed.Store,
    )
    quiet = SimpleNamespace(warning=lambda *args: None, info=lambda *args: None)
    transferred = {
        name: _transferred(getattr(joining_module, name))
        for name in ("receive", "receive_number", "send", "send_number")
    }
    clock = SimpleNamespace(monotonic=lambda: the_world().now)
    places: dict[Any, dict[str, Any]] = {
        ranks_module: {
            "PortProbe": PortProbe,
            "Membership": _membership,
            "StepGroup": VirtualStepGroup,
            "Heartbeats": Signs,
            "remove_address": lambda store, rank: None,
            "_log": quiet,
            "store_of": lambda *_: (WorldStore(the_world()), None),
            "atexit": atexit,
            "destroy_group": lambda group: None,
            "dist": dist,
            "make_group": lambda *args, **options: Base(*args[:3]),
            "tell_unreachable": _tell_unreachable,
            "threading": SimpleNamespace(Thread=_Thread, Event=Event),
        },
        attachment_module: {
            "_log": quiet,
            "warn_user": lambda message: None,
            "begin_maximum": _begin_maximum,
            "broadcast": _broadcast,
        },
        state_module: {
            "_log": quiet,
            **{name: transferred[name] for name in ("receive", "send", "send_number")},
        },
        joining_module: {
            "AT_ONCE": 0,
            "_FIRST_BYTES": 16,
            "_LEAST_BYTES": 1,
            "threading": SimpleNamespace(Thread=_Thread),
            "time": clock,
            "_PIECE": 1024,
            **transferred,
        },
        ElasticRanks: {"_watch": _watch},
    }
    with ExitStack() as stack:
        for place, doubles in places.items():
            for name, double in doubles.items():
                stack.enter_context(mock.patch.object(place, name, double))
        yield
