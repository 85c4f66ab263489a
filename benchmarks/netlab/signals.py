"""Turns signals that end a program into one exception, never in the middle of the clean-up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal has asked the program to end.

    Attributes:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise :class:`Stopped` inside a ``with`` block, once.

    Later signals are ignored, so that a second Ctrl-C does not interrupt the clean-up. For the main
    thread of a program.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for other in _ENDING:
            signal.signal(other, signal.SIG_IGN)
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in _ENDING}
    for number in _ENDING:
        # A script's background jobs ignore SIGINT, but an explicit one should still end them.
        if before[number] is not signal.SIG_IGN or number != signal.SIGHUP:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay signals that would raise an exception in a ``with`` block until its end."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs handlers only in the main thread
        return
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if received:
            signal.raise_signal(received[0])
