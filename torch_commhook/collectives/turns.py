"""The order in which later stages are issued.

All ranks must issue the same collectives on one group in the same order, but the first stages of
two buckets may end in a different order on each. If a rank omits one, Gloo takes its next
collective for the missing one, and ends the process if their sizes differ. So a rank issues nothing
on the same connections after an omitted collective.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch.distributed as dist


class Turn:
    """A place in the order. It ends with one call of :meth:`take` or :meth:`give_up`."""

    __slots__ = ("_failed", "_is_over", "_issue", "_order")

    def __init__(self, order: Turns, failed: Callable[[BaseException], None]) -> None:
        self._order = order
        self._failed = failed
        self._issue: Callable[[], None] | None = None
        self._is_over = False

    def take(self, issue: Callable[[], None]) -> None:
        """Call ``issue`` when all earlier turns are over.

        On this thread, or on the one that ends such a turn. It must not wait.
        """
        self._issue = issue
        self._order._drain()

    def give_up(self, error: BaseException) -> None:
        """Fail this turn and all later ones, announced or not."""
        self._order._fail(error, self)


class Turns:
    """Turns in the order in which they were announced."""

    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()
        self._lock = threading.Lock()
        self._is_draining = False
        self._error: BaseException | None = None  # of all turns from now on

    def announce(self, failed: Callable[[BaseException], None]) -> Turn:
        """Return the next turn. ``failed`` is called with the error if it does not come."""
        turn = Turn(self, failed)
        with self._lock:
            error = self._error
            if error is None:
                self._waiting.append(turn)
            else:
                turn._is_over = True
        if error is not None:
            failed(error)
        return turn

    def close(self, error: BaseException) -> None:
        """Fail all turns that have not come yet."""
        self._fail(error)

    def _drain(self) -> None:
        while True:
            with self._lock:
                # One thread at a time; it handles turns that become ready meanwhile.
                if self._is_draining or not self._waiting or self._waiting[0]._issue is None:
                    return
                turn = self._waiting.popleft()
                turn._is_over = True
                self._is_draining = True
            try:
                assert turn._issue is not None
                turn._issue()
            except BaseException as error:
                turn._failed(error)
                self._fail(error)
            finally:
                with self._lock:
                    self._is_draining = False

    def _fail(self, error: BaseException, first: Turn | None = None) -> None:
        """Fail turns: ``first`` if it is not over, or else all, and those after it."""
        with self._lock:
            if first is not None and first._is_over:
                return
            if self._error is None:
                self._error = error
            failed: list[Turn] = []
            while self._waiting and (not failed or failed[-1] is not first):
                failed.append(self._waiting.pop())
                failed[-1]._is_over = True
        for turn in reversed(failed):
            turn._failed(error)


_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Turns] = weakref.WeakKeyDictionary()


def turns_of(group: dist.ProcessGroup) -> Turns:
    """The turns on a process group."""
    return _of_group.setdefault(group, Turns())


def renew_turns(group: dist.ProcessGroup) -> None:
    """Start a new order: the group has a new channel. Turns announced before are over."""
    before = _of_group.pop(group, None)
    if before is not None:
        before.close(RuntimeError("the step of this collective has failed"))
