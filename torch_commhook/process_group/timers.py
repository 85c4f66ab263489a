"""Calls functions at given times, on a thread that ends when no call is pending."""

from __future__ import annotations

import atexit
import heapq
import itertools
import os
import threading
from collections.abc import Callable

from torch_commhook import _C

#: In seconds. A wait beyond Python's own, much higher limit raises an error.
_LONGEST_WAIT = 3600.0


class Timers:
    """Calls functions at times of ``_C.steady_seconds()``, in order.

    Functions must be short. Their exceptions go to ``sys.unraisablehook``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = itertools.count()
        self._start_anew()
        if hasattr(os, "register_at_fork"):  # a child has no such thread, but maybe a held lock
            os.register_at_fork(after_in_child=self._start_anew)
        # A thread that is in C++ when the interpreter ends, and then asks for the GIL, aborts.
        atexit.register(self._close)

    def _start_anew(self) -> None:
        self._changed = threading.Condition()
        self._pending: list[tuple[float, int, Callable[[], object]]] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def call_at(self, when: float, function: Callable[[], object]) -> int:
        """Call ``function()`` at a time. Returns a number for :meth:`cancel`."""
        number = next(self._numbers)
        with self._changed:
            if self._is_closed:
                return number
            heapq.heappush(self._pending, (when, number, function))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            elif self._pending[0][1] == number:
                self._changed.notify()
        return number

    def cancel(self, number: int) -> None:
        """Cancel a call; do nothing if it was made already."""
        with self._changed:
            self._pending = [entry for entry in self._pending if entry[1] != number]
            heapq.heapify(self._pending)
            self._changed.notify()

    def _close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._pending.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._pending:
                    wait = self._pending[0][0] - _C.steady_seconds()
                    if wait <= 0:
                        break
                    self._changed.wait(min(wait, _LONGEST_WAIT))
                if not self._pending:
                    self._thread = None
                    return
                function = heapq.heappop(self._pending)[2]
            try:
                function()
            except Exception as error:
                _C.report_unraisable(error, function)
            del function  # and its references, before the wait for the next one
