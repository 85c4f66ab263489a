"""The order in which later stages are issued.

All ranks must issue the same collectives on one group in the same order, and the first stages of
two buckets may end in another order on each.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any


class Turn:
    """A place in the order. It ends with :meth:`take` or :meth:`give_up`, called once."""

    __slots__ = ("_failed", "_is_over", "_issue", "_order")

    def __init__(self, order: Turns, failed: Callable[[BaseException], None]) -> None:
        self._order = order
        self._failed = failed
        self._issue: Callable[[], None] | None = None
        self._is_over = False

    def take(self, issue: Callable[[], None]) -> None:
        """Have ``issue`` called when all turns before this one are over.

        By this thread, or by one that ends such a turn. It must not wait.
        """
        self._issue = issue
        self._order._drain()

    def give_up(self, error: BaseException) -> None:
        """Let this turn and those after it fail: the other ranks may not be where this one is."""
        if not self._is_over:  # it may have failed with an earlier one, and others have come since
            self._order._fail(error)


class Turns:
    """Turns in the order in which they were announced."""

    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()
        self._lock = threading.Lock()
        self._is_draining = False

    def announce(self, failed: Callable[[BaseException], None]) -> Turn:
        """The next turn. ``failed`` is called with the error where it does not come."""
        turn = Turn(self, failed)
        with self._lock:
            self._waiting.append(turn)
        return turn

    def _drain(self) -> None:
        while True:
            with self._lock:
                # One thread at a time; it sees what becomes ready meanwhile.
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

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            failed, self._waiting = self._waiting, deque()
            for turn in failed:
                turn._is_over = True
        for turn in failed:
            turn._failed(error)


_of_group: weakref.WeakKeyDictionary[Any, Turns] = weakref.WeakKeyDictionary()


def turns_of(group: Any) -> Turns:
    """The turns on a process group."""
    return _of_group.setdefault(group, Turns())
