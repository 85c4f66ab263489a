"""Values that code sets for functions that it calls on the same thread."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadValue(threading.local, Generic[T]):
    """A value of each thread: None, unless the thread is inside :class:`setting`."""

    value: T | None = None


class setting(Generic[T]):  # noqa: N801 (a context manager)
    """Sets this thread's value of ``of`` inside a block, and restores the earlier one after it."""

    __slots__ = ("_before", "_of", "_value")

    def __init__(self, of: ThreadValue[T], value: T) -> None:
        self._of = of
        self._value = value

    def __enter__(self) -> None:
        self._before = self._of.value
        self._of.value = self._value

    def __exit__(self, *error: object) -> None:
        self._of.value = self._before
