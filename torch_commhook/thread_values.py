"""Values that code sets for what the same thread calls inside."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class ThreadValue(threading.local, Generic[T]):
    """A value of each thread: None, unless the thread is inside :class:`setting`."""

    value: T | None = None


class setting(Generic[T]):  # noqa: N801 (a context manager)
    """Gives this thread's ``of`` a value inside, and its earlier value back afterwards."""

    __slots__ = ("_before", "_of", "_value")

    def __init__(self, of: ThreadValue[T], value: T) -> None:
        self._of = of
        self._value = value

    def __enter__(self) -> None:
        self._before = self._of.value
        self._of.value = self._value

    def __exit__(self, *error: object) -> None:
        self._of.value = self._before
