"""A world of processes on hosts, in virtual time: a clock, threads, a store, and connections.

One thread runs at a time, and hands over when it sleeps or waits. The clock jumps to the next
event. A seed determines the times of messages, so the same seed gives the same history.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from typing import Any, NoReturn

from torch_commhook._C import WireFailure
from torch_commhook.step.connected_group import Failure

#: Seconds until TCP gives up a host that does not answer.
LOST_HOST = 1.5
#: Seconds that a store's client waits for an answer.
STORE_TIMEOUT = 4.0


class Killed(BaseException):
    """The process has ended: its threads stop."""


class Baton:
    """The thread with the baton runs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()


class Task(Baton):
    def __init__(self, process: Process, run: Callable[[], object]) -> None:
        super().__init__()
        self.process = process
        self.pause = 0  # counts its pauses; an event for an earlier one is void
        self.has_ended = False
        self._run = run
        threading.Thread(target=self._begin, daemon=True).start()

    def _begin(self) -> None:
        self.lock.acquire()
        world = self.process.world
        try:
            self.process.check()
            self._run()
        except Killed:
            pass
        except BaseException as error:
            world.failure = world.failure or error
        self.has_ended = True
        world.pass_on(self)


class Process:
    """A process on a host. It calls its ``exits`` when it ends by itself."""

    def __init__(self, world: World, number: int, host: int) -> None:
        self.world = world
        self.number = number
        self.host = host
        self.is_dead = False
        self.is_stopped = False
        self.exits: list[Callable[[], object]] = []
        self.endpoints: list[Endpoint] = []
        self._waiting: dict[Task, Callable[[], bool]] = {}
        self._held: list[tuple[Task, int]] = []  # continue with the process

    def start(self, run: Callable[[], object]) -> None:
        """Runs a function on a new thread of this process."""
        task = Task(self, run)
        self.world.tasks.append(task)
        self.world.resume(task, 0.0)

    def check(self) -> None:
        """Raises :class:`Killed` if the process has ended."""
        if self.is_dead:
            raise Killed

    def notify(self) -> None:
        """Makes its threads check the conditions again for which they wait."""
        for task, is_so in self._waiting.items():
            if is_so():
                self.world.resume(task, 0.0)

    def hold(self, task: Task, pause: int) -> None:
        self._held.append((task, pause))

    def wait(self, task: Task, is_so: Callable[[], bool]) -> None:
        self._waiting[task] = is_so
        try:
            self.world.hand_over(task)
        finally:
            del self._waiting[task]

    def stop(self, seconds: float) -> None:
        """Suspends all threads for a time."""
        self.is_stopped = True

        def go_on() -> None:
            self.is_stopped = False
            held, self._held = self._held, []
            for task, pause in held:
                self.world.resume(task, 0.0, pause)

        self.world.after(seconds, go_on)

    def end(self, *, silently: bool = False) -> None:
        """Ends the process. Its host closes its connections, unless it has ended (``silently``)."""
        if self.is_dead:
            return
        self.is_dead = True
        self.world.live -= 1
        for endpoint in list(self.endpoints):
            endpoint.close(silently=silently)
        for task in list(self._waiting):
            self.world.resume(task, 0.0)
        self.world.notify_all()


#: The running worlds; the last one counts.
worlds: list[World] = []


def the_world() -> World:
    return worlds[-1]


class World:
    """Processes, events and the clock."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.values: dict[str, bytes] = {}  # the store's
        self.processes: list[Process] = []
        self.tasks: list[Task] = []
        # for each number in the training, the process that accepts connections
        self.doors: dict[int, Process] = {}
        self.endpoints: dict[tuple[str, int], Endpoint] = {}
        self.current: Any = None
        self.failure: BaseException | None = None  # an error of the simulation itself
        # called with a process and the name of a point that it has reached
        self.reach: Callable[[Process, str], None] = lambda process, point: None
        # called with a key of the store and its new value
        self.written: Callable[[str, bytes], None] = lambda key, value: None
        self._events: list[tuple[float, int, Any, Any, int]] = []
        self._count = 0
        self._main = Baton()
        self._latest = 0.0
        self.live = 0  # the number of processes that run or have not started yet
        self._cut: dict[tuple[int, int], int] = {}  # the number of faults that separate two hosts
        self._storeless: dict[int, int] = {}
        self._delayed: list[Callable[[], None]] = []

    # ---- events ----------------------------------------------------------------------------------

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._events, (self.now + seconds, self._count, call, None, 0))

    def resume(self, task: Task, seconds: float, pause: int | None = None) -> None:
        """Resumes a task later, if it is still in the same pause."""
        self._count += 1
        which = task.pause if pause is None else pause
        heappush(self._events, (self.now + seconds, self._count, None, task, which))

    def run(self, latest: float) -> None:
        """Runs everything until no process lives, or until a time. Ends all processes."""
        self._latest = latest
        self.pass_on(self._main)
        for process in self.processes:
            process.is_dead = True
        self.live = 0
        for task in self.tasks:
            if not task.has_ended:
                self.current = task
                task.lock.release()
                self._main.lock.acquire()
        self.current = None

    def hand_over(self, task: Task) -> None:
        """Lets others run until an event resumes this task."""
        self.pass_on(task)
        self.current = task

    def pass_on(self, own: Any) -> None:
        """:meth:`hand_over`; forever if the task has ended."""
        next_one = self._next()
        if next_one is own:
            return
        self.current = next_one
        next_one.lock.release()
        if not getattr(own, "has_ended", False):
            own.lock.acquire()

    def _next(self) -> Any:
        while self._events and self.live > 0 and self.now < self._latest and not self.failure:
            self.now, _, call, task, pause = heappop(self._events)
            if task is None:
                try:
                    call()
                except BaseException as error:
                    self.failure = error
            elif task.pause == pause and not task.has_ended:
                if not task.process.is_stopped or task.process.is_dead:
                    return task
                task.process.hold(task, pause)
        return self._main

    # ---- for the running process -----------------------------------------------------------------

    @property
    def process(self) -> Process:
        return self.current.process

    def sleep(self, seconds: float) -> None:
        task = self.current
        task.process.check()
        task.pause += 1
        self.resume(task, seconds)
        self.hand_over(task)
        task.process.check()

    def wait_until(self, is_so: Callable[[], bool], seconds: float) -> bool:
        """Waits until a condition holds, checked after notifications; returns whether it holds."""
        task = self.current
        process, deadline = task.process, self.now + seconds
        process.check()
        while not is_so():
            if self.now >= deadline:
                return False
            task.pause += 1
            self.resume(task, deadline - self.now)
            process.wait(task, is_so)
            process.check()
        return True

    def point(self, name: str) -> None:
        """Reports that the process has reached a point at which it may end."""
        process = self.process
        process.check()
        self.reach(process, name)
        process.check()
        if process.is_stopped:
            self.sleep(0.0)

    def notify_all(self) -> None:
        for process in self.processes:
            process.notify()

    # ---- networks --------------------------------------------------------------------------------

    def are_apart(self, host: int, other: int) -> bool:
        """Whether messages between two hosts are blocked."""
        return (min(host, other), max(host, other)) in self._cut

    def has_no_store(self, host: int) -> bool:
        """Whether a host cannot reach the store."""
        return host in self._storeless

    def split(self, side: Collection[int], others: Collection[int], seconds: float) -> None:
        """Blocks messages between two sides for a time."""
        pairs = [(min(a, b), max(a, b)) for a in side for b in others]
        for pair in pairs:
            self._cut[pair] = self._cut.get(pair, 0) + 1
        if seconds > LOST_HOST:
            self.after(LOST_HOST, self._give_up_connections)

        def heal() -> None:
            for pair in pairs:
                self._cut[pair] -= 1
                if not self._cut[pair]:
                    del self._cut[pair]
            delayed, self._delayed = self._delayed, []
            for deliver in delayed:
                self.after(0.0, deliver)
            self.notify_all()

        self.after(seconds, heal)

    def _give_up_connections(self) -> None:
        for endpoint in list(self.endpoints.values()):
            for other in endpoint.others:
                peer = self.endpoints.get((endpoint.name, other))
                if peer and self.are_apart(endpoint.process.host, peer.process.host):
                    endpoint.lose(other, is_silent=True)

    def cut_off_from_store(self, side: Collection[int], seconds: float) -> None:
        """Keeps hosts from the store for a time."""
        for host in side:
            self._storeless[host] = self._storeless.get(host, 0) + 1

        def heal() -> None:
            for host in side:
                self._storeless[host] -= 1
                if not self._storeless[host]:
                    del self._storeless[host]
            self.notify_all()

        self.after(seconds, heal)

    def delay(self, deliver: Callable[[], None]) -> None:
        """Delivers something once the hosts are connected again."""
        self._delayed.append(deliver)


class WorldStore:
    """The store as a process uses it. The calling thread determines the process."""

    def __init__(self, world: World, prefix: str = "") -> None:
        self._world = world
        self._prefix = prefix

    def under(self, prefix: str) -> WorldStore:
        return WorldStore(self._world, f"{self._prefix}{prefix}/")

    def clone(self) -> WorldStore:
        return self

    def set_timeout(self, timeout: object) -> None:
        """Does nothing: this store has its own timeout."""

    def has_extended_api(self) -> bool:
        return True

    def _ask(self, key: str, act: Callable[[str], Any]) -> Any:
        world = self._world
        process = world.process
        process.check()
        if world.random.random() < 0.2:
            world.sleep(world.random.random() * 0.002)
        self._wait_for_store(process)
        found = act(self._prefix + key)
        if world.random.random() < 0.05:
            world.sleep(world.random.random() * 0.002)
        self._wait_for_store(process)
        return found

    def _wait_for_store(self, process: Process) -> None:
        world = self._world
        if world.has_no_store(process.host) and not world.wait_until(
            lambda: not world.has_no_store(process.host), STORE_TIMEOUT
        ):
            raise RuntimeError("store: no answer in time")

    def _set(self, key: str, value: str | bytes) -> None:
        value = value.encode() if isinstance(value, str) else value
        self._world.values[key] = value
        self._world.written(key, value)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(key, lambda key: self._set(key, value))

    def get(self, key: str) -> bytes:
        return self._ask(key, lambda key: self._world.values[key])

    def check(self, keys: Sequence[str]) -> bool:
        (key,) = keys
        return self._ask(key, lambda key: key in self._world.values)

    def add(self, key: str, amount: int) -> int:
        def act(key: str) -> int:
            number = int(self._world.values.get(key, b"0")) + amount
            self._set(key, str(number))
            return number

        return self._ask(key, act)

    def append(self, key: str, value: str) -> None:
        self._world.point("append")

        def act(key: str) -> None:
            self._set(key, self._world.values.get(key, b"") + value.encode())

        self._ask(key, act)
        self._world.point("append")

    def delete_key(self, key: str) -> bool:
        return self._ask(key, lambda key: self._world.values.pop(key, None) is not None)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        writes = expected != desired
        if writes:
            self._world.point("compare_set")

        def act(key: str) -> bytes:
            current = self._world.values.get(key)
            if current == expected.encode() or (current is None and not expected):
                self._set(key, desired)
                return desired.encode()
            return expected.encode() if current is None else current

        found: bytes = self._ask(key, act)
        if writes:
            self._world.point("compare_set")
        return found


class Endpoint:
    """A process's connections to the others; a message may take ``timeout`` seconds."""

    def __init__(
        self, world: World, name: str, own: int, members: Sequence[int], timeout: float
    ) -> None:
        self.world = world
        self.name = name
        self.own = own
        self.members = tuple(members)
        self.others = [member for member in members if member != own]
        self.process = world.process
        self._timeout = timeout
        self._is_closed = False
        self._lost: dict[int, Failure] = {}
        self.failure: Failure | None = None  # the first one
        self._came: dict[tuple[int, object], deque[Any]] = {}
        self._sent_at: dict[int, float] = {}  # the arrival of the last message to each member
        self._drops: set[int] = set()  # of these, members whose messages in flight are dropped
        self._rounds = 0

    def size(self) -> int:
        return len(self.members)

    def connect(self, seconds: float) -> None:
        """Connects to all other members, which must do the same in time; else RuntimeError."""
        self.world.point("connect")
        self.world.endpoints[self.name, self.own] = self
        self.process.endpoints.append(self)
        self.world.notify_all()
        begun = self.world.now
        if not self.world.wait_until(lambda: self._is_closed or self._all_there(), seconds):
            self.close()
            raise RuntimeError(f"connecting took more than {seconds:g} s")
        try:
            self.exchange("connect", None, seconds - (self.world.now - begun))
        except RuntimeError:
            self.close()
            raise

    def _all_there(self) -> bool:
        for other in self.others:
            peer = self.world.endpoints.get((self.name, other))
            if peer is None or peer._is_closed:
                return False
            if self.world.are_apart(self.process.host, peer.process.host):
                return False
        return True

    # ---- messages --------------------------------------------------------------------------------

    def send(self, other: int, tag: object, value: Any) -> None:
        """Sends a value to a member; RuntimeError if the connection is lost."""
        self.process.check()
        self._check(other)
        self._post(other, lambda peer: peer._take(self.own, tag, value))

    def _post(self, other: int, act: Callable[[Endpoint], None], *, is_last: bool = False) -> None:
        world = self.world
        takes = world.random.random() * 0.003
        at = self._sent_at[other] = max(self._sent_at.get(other, 0.0), world.now + takes)

        def deliver() -> None:
            peer = world.endpoints.get((self.name, other))
            if peer is None or (other in self._drops and not is_last):
                return
            if world.are_apart(self.process.host, peer.process.host):
                world.delay(deliver)
                return
            act(peer)

        world.after(at - world.now, deliver)

    def _take(self, other: int, tag: object, value: Any) -> None:
        if not self._is_closed and other not in self._lost:
            self._came.setdefault((other, tag), deque()).append(value)
            self.process.notify()

    def _check(self, other: int) -> None:
        if self._is_closed:
            self._fail(Failure(WireFailure.CLOSED, self.own, "this process has left"))
        if other in self._lost:
            self._fail(self._lost[other])

    def _fail(self, failure: Failure) -> NoReturn:
        self.failure = self.failure or failure
        raise RuntimeError(self.failure.text)

    def _fail_late(self, seconds: float) -> NoReturn:
        self._fail(Failure(WireFailure.TIMEOUT, self.own, f"timeout after {seconds:g} s"))

    def receive(self, other: int, tag: object) -> Any:
        """The next value from a member; RuntimeError if the connection is lost or too late."""
        key = other, tag

        def is_there() -> bool:
            return bool(self._came.get(key)) or self._is_closed or other in self._lost

        if not self.world.wait_until(is_there, self._timeout):
            self._fail_late(self._timeout)
        if self._came.get(key):
            return self._came[key].popleft()
        self._check(other)
        raise AssertionError

    def exchange(self, point: str, value: Any, seconds: float | None = None) -> list[Any]:
        """The values of all members, in order of rank.

        Args:
            point: the point at which this process may end, before each message.
            value: this member's, the same for all.
            seconds: the longest wait.
        """
        values = [value] * len(self.members)
        return self.end_exchange(self.begin_exchange(point, values), values, seconds)

    def begin_exchange(self, point: str, values: Sequence[Any]) -> object:
        """Sends one value to each member, as :meth:`exchange` does; returns the tag."""
        self._rounds += 1
        tag = self._rounds
        for member, value in zip(self.members, values, strict=True):
            if member != self.own:
                self.world.point(point)
                self.send(member, tag, (point, value))
        return point, tag

    def end_exchange(
        self, tag: Any, values: Sequence[Any], seconds: float | None = None
    ) -> list[Any]:
        """The values of all members, after :meth:`begin_exchange`."""
        keys = {other: (other, tag[1]) for other in self.others}
        missing = list(self.others)

        def is_there() -> bool:
            missing[:] = [other for other in missing if keys[other] not in self._came]
            return not missing or self._is_closed or any(each in self._lost for each in missing)

        seconds = self._timeout if seconds is None else seconds
        if not self.world.wait_until(is_there, seconds):
            self._fail_late(seconds)
        for other in missing:
            self._check(other)
        found = []
        for member, value in zip(self.members, values, strict=True):
            point, theirs = (tag[0], value)
            if member != self.own:
                ((point, theirs),) = self._came.pop(keys[member])
            if point != tag[0]:
                raise AssertionError(f"{self.own} is at {tag[0]}, {member} at {point}")
            found.append(theirs)
        return found

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, *, silently: bool = False) -> None:
        """Closes the connections: messages in flight may be lost."""
        if self._is_closed:
            return
        self._is_closed = True
        if self in self.process.endpoints:
            self.process.endpoints.remove(self)
        for other in self.others:
            # A socket with unread data loses its unsent data when it is closed.
            unread = self.process.is_dead or any(
                values for (sender, _), values in self._came.items() if sender == other
            )
            if unread and self.world.random.random() < 0.5:
                self._drops.add(other)
            if silently:
                self._drops.add(other)
                self.world.after(LOST_HOST, lambda other=other: self._vanish(other))
            elif other not in self._lost:
                self._post(other, lambda peer: peer.lose(self.own), is_last=True)
        self.process.notify()

    def _vanish(self, other: int) -> None:
        peer = self.world.endpoints.get((self.name, other))
        if peer is not None:
            peer.lose(self.own, is_silent=True)

    def lose(self, other: int, *, is_silent: bool = False) -> None:
        """Marks a connection as lost: the other process has ended, or its host is silent."""
        if self._is_closed or other in self._lost:
            return
        kind = WireFailure.LOST if is_silent else WireFailure.ENDED
        self._lost[other] = Failure(kind, other, f"rank {other}: {kind.name}")
        self.process.notify()
