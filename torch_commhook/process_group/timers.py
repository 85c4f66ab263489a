"""Calls at given times, on a thread that ends when there are none."""

from __future__ import annotations

import atexit
import heapq
import itertools
import os
import threading
from collections.abc import Callable

from torch_commhook import _C

#: In seconds. Python's own limit is far beyond, and an error.
_LONGEST_WAIT = 3600.0


class Timers:
    """Calls functions at times of ``_C.steady_seconds()``, in their order.

    The functions are short, and what they raise goes to ``sys.unraisablehook``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = itertools.count()
        self._start_anew()
        if hasattr(os, "register_at_fork"):  # the thread is not in the child, its lock may be
            os.register_at_fork(after_in_child=self._start_anew)
        # A thread that is in C++ when the interpreter ends, and then asks for the GIL, aborts.
        atexit.register(self._close)

    def _start_anew(self) -> None:
        self._changed = threading.Condition()
        self._pending: list[tuple[float, int, Callable[[], object]]] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def call_at(self, when: float, function: Callable[[], object]) -> int:
        """Have ``function()`` called; returns what :meth:`cancel` takes."""
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
        """Forget a call; nothing where it has been made."""
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
            del function  # and what it holds, while the next one is waited for
