"""Decides which rank runs: one at a time, in an order that depends on a seed.

Each rank is a thread. The running rank yields where it waits for another rank, and wherever it
issues a collective. The next rank is drawn among those that can continue, so each seed gives one
order of events.

Each thread has a lock of its own that it waits for, and the running thread releases that of the
next. When no thread can continue, the scheduler knows why each waits.

The ranks of a group share a ``Link`` (``link.py``). The last rank to reach a collective carries it
out for all (``data.py``), on the tensors of the others. The arguments that must agree are compared
when the second rank comes. A Future is completed on its own rank's thread, when that runs next,
because its callbacks see that rank's ``torch.distributed``.

A thread that waits for a Future in C++ blocks while it is its turn. So ``get_future()`` lets the
others run until the Future is complete, or none can run; only then does it return an incomplete
Future. If the thread that has it then uses no processor time, the scheduler takes it for blocked,
and the others continue.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

READY, WAITS, ASKS, AWAY, ENDED = "ready", "waits", "asks", "away", "ended"

#: How often the thread that started the ranks checks them, in seconds.
_LOOK = 0.02
#: A rank counts as blocked outside of Python if it used no processor time in this many checks.
_IDLE_LOOKS = 3
#: The same for the verdict that it will never continue, if no other rank can either. It might be
#: waiting for a file, or for a process that compiles.
_LOST_LOOKS = 250
#: How long to wait at the end for threads that are blocked outside of Python, in seconds.
_GRACE = 1.0

_here = threading.local()


class DeadlockError(RuntimeError):
    """No rank can continue. The message says what each rank waits for.

    Example:
        >>> run_ranks(lambda rank: rank == 0 and dist.barrier(), 2)
        Traceback (most recent call last):
            ...
        torch_commhook...DeadlockError: run_ranks: no rank can go on:
          rank 0 waits for barrier 1 on group '0'; not there: rank 1
          rank 1 has returned
    """


class RunEndedError(BaseException):
    """Ends a rank because another one has failed.

    Not an Exception, so that handlers of a rank's own errors do not catch it.
    """


class Awaited:
    """An event that a rank can wait for: the base class of all of them.

    Attributes:
        is_done: whether it has happened.
        owner: the rank that may wait for it.
    """

    is_done = False
    owner: int

    def describe(self) -> str:
        """Its description, for a report."""
        raise NotImplementedError

    def is_hopeless(self, ended: Collection[int]) -> bool:
        """Whether it can never happen, given the ranks that have ended."""
        return False

    def deliver(self) -> None:
        """Complete its Future, if it has one: on the owner's thread, or while it is blocked."""


class Rank:
    """A rank and its thread."""

    def __init__(self, scheduler: Scheduler, number: int) -> None:
        self.scheduler = scheduler
        self.number = number
        self.state = READY
        self.awaited: Awaited | None = None
        self.done: deque[Awaited] = deque()  # and not delivered
        self.released: list[Awaited] = []  # with Futures that were returned incomplete
        self.inside = False  # in our own code, which must not count as blocked
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread: threading.Thread | None = None
        self.clock: int | None = None  # the thread's; may be read after the thread has ended
        self.result: Any = None
        self.error: BaseException | None = None

    def processor_time(self) -> float:
        """The processor time of its thread, in seconds."""
        try:
            return -1.0 if self.clock is None else time.clock_gettime(self.clock)
        except OSError:  # the thread has just ended
            return -1.0

    def deliver(self) -> None:
        """Complete the Futures of finished work."""
        while True:
            try:
                done = self.done.popleft()
            except IndexError:
                return
            done.deliver()

    def held(self) -> list[Awaited]:
        """The events of the incomplete Futures that it holds."""
        return [awaited for awaited in self.released if not awaited.is_done]

    def report(self) -> str:
        """Its state, in a few words."""
        if self.state == ENDED:
            if self.error is None:
                return "has returned"
            return f"has raised {type(self.error).__name__}: {self.error}"
        if self.awaited is not None:
            return f"waits for {self.awaited.describe()}"
        if held := self.held():
            names = ", ".join(awaited.describe() for awaited in held)
            return f"is blocked outside of Python, and has not got {names}"
        return "runs"


def current_rank() -> Rank | None:
    """The rank of the calling thread."""
    return getattr(_here, "rank", None)


class Scheduler:
    """Runs a function on all ranks, one at a time.

    Args:
        world_size: the number of ranks.
        seed: the seed of the order in which they run.
        timeout: seconds that a rank may run before it issues a collective or waits for one.
    """

    def __init__(self, world_size: int, seed: int, timeout: float) -> None:
        self.ranks = [Rank(self, number) for number in range(world_size)]
        self.failure: BaseException | None = None
        self.first_to_fail: Rank | None = None
        self._timeout = timeout
        self._random = random.Random(seed)
        self._ready = list(self.ranks)
        self._running: Rank | None = None
        self._progress = 0
        self._idle_polls = 0
        self._all_ended = threading.Event()
        #: Protects the choice of the running rank, since the thread that started them may step in.
        self._lock = threading.Lock()

    def threads(self) -> list[threading.Thread]:
        """The ranks' threads, once they run."""
        return [rank.thread for rank in self.ranks if rank.thread is not None]

    # ---- on the thread of a rank -----------------------------------------------------------------

    def enter(self, owner: int, what: str) -> Rank:
        """Begin an operation of a rank's group.

        Raises:
            RuntimeError: this is not the thread of that rank.
            BaseException: the run has failed.
        """
        rank = current_rank()
        if rank is None or not self.is_on_thread_of(owner):
            where = f"rank {rank.number}" if rank is not None else "no rank"
            raise RuntimeError(
                f"{what}: a group of rank {owner} must be used on that rank's own thread, while "
                f"run_ranks() is running, got a call from the thread of {where}"
            )
        rank.inside = True
        if self._running is not rank:
            self._come_back(rank)
        self._raise_failure(rank)
        return rank

    def is_on_thread_of(self, owner: int) -> bool:
        """Whether this thread belongs to a rank."""
        rank = current_rank()
        return rank is not None and rank.scheduler is self and rank.number == owner

    def switch(self, rank: Rank) -> None:
        """Let another rank run, if the seed says so."""
        self._progress += 1
        self._idle_polls = 0
        self._hand_over(rank, self._ready)
        self._resume(rank)

    def wait(self, rank: Rank, awaited: Awaited, state: str = WAITS) -> None:
        """Let others run until the awaited event has happened.

        In the state ``ASKS``, also until no rank can continue.

        Raises:
            DeadlockError: it never will happen; not in the state ``ASKS``.
        """
        if not awaited.is_done:
            with self._lock:
                rank.awaited, rank.state = awaited, state
                self._ready.remove(rank)
                self._progress += 1
                self._idle_polls = 0
            self._hand_over(rank, self._ready)
        self._resume(rank)

    def poll(self, rank: Rank, awaited: Awaited) -> bool:
        """Whether the awaited event has happened; if not, others run first."""
        if not awaited.is_done:
            self._idle_polls += 1
            others = [other for other in self._ready if other is not rank]
            if not others or self._idle_polls > 2 * len(self._ready):
                with self._lock:
                    self._release_one()
                self._idle_polls = 0
                others = [other for other in self._ready if other is not rank]
            if others:
                self._hand_over(rank, others)
        self._resume(rank)
        return awaited.is_done

    def complete(self, awaited: Awaited) -> None:
        """Note that an event has happened which a rank may be waiting for."""
        with self._lock:
            awaited.is_done = True
            owner = self.ranks[awaited.owner]
            owner.done.append(awaited)
            if owner.awaited is awaited:
                owner.awaited = None
                owner.state = READY
                self._ready.append(owner)
            elif owner.state == AWAY and awaited in owner.released and owner not in self._ready:
                self._ready.append(owner)

    def fail(self, error: BaseException) -> None:
        """End the run: all ranks get such an error, wherever they wait."""
        with self._lock:
            self._fail(error)
        self._let_go()

    def _hand_over(self, rank: Rank, among: list[Rank]) -> None:
        with self._lock:
            chosen = self._choose(among)
        if chosen is not rank:
            self._start(chosen)
            rank.baton.acquire()

    def _resume(self, rank: Rank) -> None:
        rank.inside = False
        self._raise_failure(rank)
        rank.deliver()

    def _come_back(self, rank: Rank) -> None:
        """Let a rank continue that counted as blocked."""
        with self._lock:
            if self._running is rank:
                return
            rank.state = READY
            if rank not in self._ready:
                self._ready.append(rank)
            if self._running is None:
                self._running = rank
                return
        rank.baton.acquire()

    def _raise_failure(self, rank: Rank) -> None:
        if self.failure is not None:
            rank.inside = False
            raise type(self.failure)(*self.failure.args)  # each rank needs its own traceback

    # ---- the choice ------------------------------------------------------------------------------

    def _choose(self, among: list[Rank]) -> Rank | None:
        """The next rank, which runs from now on. Under the lock."""
        if not self._ready:
            self._unblock()
        among = among or self._ready
        if len(among) > 1:
            self._running = among[int(self._random.random() * len(among))]
        else:
            self._running = among[0] if among else None
        return self._running

    def _start(self, rank: Rank | None) -> None:
        if rank is None:
            return
        if rank.state == AWAY:  # blocked in C++ on a Future that can be completed now
            rank.state = READY
            rank.deliver()
        else:
            rank.baton.release()

    def _unblock(self) -> None:
        """Handle the case that no rank can continue. Under the lock."""
        if self.failure is not None or self._release_one():
            return
        if all(rank.state == ENDED for rank in self.ranks):
            return
        if any(rank.state == AWAY for rank in self.ranks):
            return  # it may continue by itself; the thread that started it checks
        self._fail(DeadlockError(self._report("no rank can go on:")))

    def _release_one(self) -> bool:
        """Return an incomplete Future to one rank: it may then do what the others wait for."""
        if self.failure is not None:
            return False
        ended = {rank.number for rank in self.ranks if rank.state == ENDED}
        asking = [
            rank
            for rank in self.ranks
            if rank.state == ASKS and rank.awaited and not rank.awaited.is_hopeless(ended)
        ]
        if not asking:
            return False
        rank = asking[int(self._random.random() * len(asking))]
        assert rank.awaited is not None
        rank.released = [*rank.held(), rank.awaited]
        rank.awaited, rank.state = None, READY
        self._ready.append(rank)
        return True

    def _report(self, said: str, besides: Rank | None = None) -> str:
        """A text with the states of the ranks."""
        ranks = [rank for rank in self.ranks if rank is not besides]
        states = [f"rank {rank.number} {rank.report()}" for rank in ranks]
        return "\n  ".join([f"run_ranks: {said}", *states])

    def _fail(self, error: BaseException) -> None:
        if self.failure is not None:
            return
        self.failure = error
        for rank in self.ranks:
            if rank.state in (WAITS, ASKS):
                rank.state = READY
                self._ready.append(rank)

    def _let_go(self) -> None:
        """Wake ranks that are blocked in C++ and hold our Futures.

        The Futures are completed with values, since results of the run no longer count: a C++ wait
        for a Python Future would take an exception in it for a value.
        """
        for rank in self.ranks:
            if rank.state == AWAY:
                for awaited in rank.released:
                    awaited.deliver()

    # ---- on the thread that starts them ----------------------------------------------------------

    def run(self, function: Callable[[int], Any]) -> None:
        """Run a function on each rank; results are in :attr:`ranks` and :attr:`failure`.

        Threads that are still blocked when the time is up cannot be ended, and keep running.
        """
        for rank in self.ranks:
            rank.thread = threading.Thread(
                target=self._run_rank,
                args=(rank, function),
                name=f"rank {rank.number}",
                daemon=True,
            )
        try:
            self._start_threads()
            with self._lock:
                first = self._choose(self._ready)
            self._start(first)
            self._look_after()
        except BaseException as error:  # such as Ctrl-C
            ended = RunEndedError(f"run_ranks was left by {type(error).__name__}")
            self._do_without_the_rest(ended)
            self._step_in(ended)
            self._all_ended.wait(_GRACE)
            self._join_ended()
            raise
        self._join_ended()

    def _join_ended(self) -> None:
        for rank in self.ranks:
            assert rank.thread is not None
            if rank.state == ENDED and rank.thread.ident is not None:
                rank.thread.join()

    def _start_threads(self) -> None:
        for rank in self.ranks:
            assert rank.thread is not None
            try:
                rank.thread.start()
            except RuntimeError as error:  # the system has no more threads
                self._do_without_the_rest(error)
                return

    def _do_without_the_rest(self, error: BaseException) -> None:
        """End the run, without the ranks whose threads have not started."""
        with self._lock:
            self._fail(error)
            for rank in self.ranks:
                if rank.thread is not None and rank.thread.ident is None and rank.state != ENDED:
                    rank.state = ENDED
                    self._ready.remove(rank)
                    rank.baton.release()  # in case its thread is about to begin
            if all(rank.state == ENDED for rank in self.ranks):
                self._all_ended.set()

    def _run_rank(self, rank: Rank, function: Callable[[int], Any]) -> None:
        rank.baton.acquire()
        _here.rank = rank
        rank.clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self._raise_failure(rank)
            rank.result = function(rank.number)
        except BaseException as error:
            rank.error = error
        finally:
            self._end(rank)

    def _end(self, rank: Rank) -> None:
        with self._lock:
            self._progress += 1
            rank.state = ENDED
            if rank in self._ready:
                self._ready.remove(rank)
            if rank.error is not None and self.failure is None:
                self.first_to_fail = rank
                self._fail(RunEndedError(f"rank {rank.number} has failed"))
            chosen = None
            if self._running is rank or self._running is None:
                chosen = self._choose(self._ready)
            if all(other.state == ENDED for other in self.ranks):
                self._all_ended.set()
        if self.failure is not None:
            self._let_go()
        self._start(chosen)

    def _look_after(self) -> None:
        progress, since, idle, used = -1, time.monotonic(), 0, -1.0
        while not self._all_ended.wait(_LOOK):
            now = time.monotonic()
            if self._progress != progress:
                progress, since, idle = self._progress, now, 0
                continue
            if self.failure is not None:
                blocked = all(rank.state in (AWAY, ENDED) for rank in self.ranks)
                if now - since > (_GRACE if blocked else self._timeout):
                    return
                continue
            rank = self._running or next((r for r in self.ranks if r.state == AWAY), None)
            if rank is None:  # it has just changed
                continue
            before, used = used, rank.processor_time()
            idle = idle + 1 if used == before else 0
            if idle >= _IDLE_LOOKS and rank.held() and not rank.inside:
                self._step_around(rank, lost=idle >= _LOST_LOOKS)
            elif now - since > self._timeout:
                said = (
                    f"rank {rank.number} has run for {self._timeout:g} s and neither ended nor "
                    "reached a collective"
                )
                self._step_in(TimeoutError(self._report(said, besides=rank)))

    def _step_around(self, rank: Rank, lost: bool) -> None:
        """Let others run if possible: a rank holds an incomplete Future and is blocked."""
        with self._lock:
            if self._running is rank and rank.state == READY and not rank.inside:
                rank.state = AWAY
                self._ready.remove(rank)
            elif self._running is not None or not lost:
                return
            if lost and not self._ready:
                self._fail(DeadlockError(self._report("no rank can go on:")))
            chosen = self._choose(self._ready)
        if self.failure is not None:
            self._let_go()
        self._start(chosen)

    def _step_in(self, error: BaseException) -> None:
        """Continue without the running rank, to end the others."""
        with self._lock:
            stuck = self._running
            if stuck is not None:
                stuck.state = AWAY
                if stuck in self._ready:
                    self._ready.remove(stuck)
            self._fail(error)
            chosen = self._choose(self._ready)
        self._let_go()
        self._start(chosen)
