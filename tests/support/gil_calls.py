"""Counts how often threads take the GIL, by function, by the library that asked, and by thread::

    with count_gil_calls() as calls:
        loss.backward()
    print(calls.acquired, calls.by_library)

It counts all libraries' calls of `PyGILState_Ensure`, `PyEval_RestoreThread` (the end of
`Py_BEGIN_ALLOW_THREADS`), `PyEval_AcquireThread` (pybind11's `gil_scoped_acquire`),
`PyEval_AcquireLock` and, from Python 3.12 on, `PyThreadState_Swap`. A thread outside of the
interpreter has no other way to get the GIL. Not counted:

- calls inside the interpreter: `time.sleep`, a lock, the switch between two threads that both run
  Python. Only a thread that had the GIL before takes it again in these ways;
- calls of a function that was looked up by name (`dlsym`, `ctypes.pythonapi`);
- calls of a library that is loaded while counting. This is an error at the end.

A tail call counts for the library of the caller's caller.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cpp_compiler import NoCompilerError, build_once, cpp_compiler

SOURCE = Path(__file__).with_suffix(".cpp")


class CannotCountError(RuntimeError):
    """This machine lacks something that counting needs; tests may skip then."""


class Call(NamedTuple):
    """A kind of call: its function, library and thread."""

    function: str
    library: str  # the path of the library, or "unknown" if it has been unloaded
    thread: int  # as of threading.get_native_id()
    already_held: bool  # the thread had the GIL: this call did not take it


class GilCalls:
    """The counts; read them after the counting has ended.

    Attributes:
        calls: the number of each call, including calls of threads that had the GIL.
    """

    def __init__(self) -> None:
        self._calls: Counter[Call] | None = None

    @property
    def calls(self) -> Counter[Call]:
        if self._calls is None:
            raise RuntimeError("gil calls: the counting must have ended")
        return self._calls

    @property
    def acquired(self) -> int:
        """How often a thread without the GIL took it."""
        return self._sum(lambda call: "").total()

    @property
    def already_held(self) -> int:
        """How often a thread that had the GIL called `PyGILState_Ensure`."""
        return sum(count for call, count in self.calls.items() if call.already_held)

    @property
    def by_function(self) -> dict[str, int]:
        """`acquired`, by the name of the called function."""
        return dict(self._sum(lambda call: call.function))

    @property
    def by_library(self) -> dict[str, int]:
        """`acquired`, by the file of the calling library, with its folder."""
        return dict(self._sum(lambda call: "/".join(Path(call.library).parts[-2:])))

    @property
    def by_thread(self) -> dict[int, int]:
        """`acquired`, by `threading.get_native_id()`."""
        return dict(self._sum(lambda call: call.thread))

    def _sum(self, key: Callable[[Call], object]) -> Counter:
        sums: Counter = Counter()
        for call, count in self.calls.items():
            if not call.already_held:
                sums[key(call)] += count
        return sums


@contextmanager
def count_gil_calls() -> Iterator[GilCalls]:
    """Counts in all threads of this process. May be nested, and used by several threads.

    Raises:
        CannotCountError: there is no compiler, or this is not Linux on x86_64 or aarch64.
        RuntimeError: something cannot be counted; its message says what.
    """
    library = _library()
    result = GilCalls()
    _check(library.gil_calls_start())
    try:
        loaded = library.gil_calls_objects_loaded()
        before = _read(library)
        yield result
        result._calls = _read(library) - before
        loaded = library.gil_calls_objects_loaded() - loaded
    finally:
        error = library.gil_calls_stop()
    _check(error)
    if loaded:
        result._calls = None
        raise RuntimeError(
            f"gil calls: {loaded} libraries were loaded while counting, and their calls are not "
            "counted: load them before"
        )


def installed() -> int:
    """The number of addresses in loaded libraries that lead to the counter: 0 without a user."""
    return _library().gil_calls_installed()


def build() -> Path:
    """Compiles the counter, unless that was done before, and returns the library."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        raise CannotCountError(
            f"gil calls: the system must be Linux on x86_64 or aarch64, got {sys.platform} on "
            f"{machine}"
        )
    try:
        command = [*cpp_compiler(), "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    except NoCompilerError as error:
        raise CannotCountError(f"gil calls: {error}") from None
    return build_once(f"gil_calls-{machine}", [*command, str(SOURCE), "-ldl"], [SOURCE])


class _Row(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_char_p),
        ("library", ctypes.c_char_p),
        ("thread", ctypes.c_int64),
        ("already_held", ctypes.c_int64),
        ("count", ctypes.c_int64),
    )


@functools.cache
def _library() -> ctypes.PyDLL:
    library = ctypes.PyDLL(str(build()))  # unlike a CDLL's, its calls keep the GIL
    library.gil_calls_start.restype = ctypes.c_char_p
    library.gil_calls_stop.restype = ctypes.c_char_p
    library.gil_calls_installed.restype = ctypes.c_int64
    library.gil_calls_objects_loaded.restype = ctypes.c_uint64
    library.gil_calls_read.restype = ctypes.c_int64
    library.gil_calls_read.argtypes = [ctypes.POINTER(_Row), ctypes.c_int64]
    return library


def _check(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode(errors="replace"))


def _read(library: ctypes.PyDLL) -> Counter[Call]:
    number, capacity = 1, 0
    while number > capacity:  # other threads may add rows in between
        capacity = number + 100
        rows = (_Row * capacity)()
        number = library.gil_calls_read(rows, capacity)
    calls: Counter[Call] = Counter()
    for row in rows[:number]:
        path = (row.library or b"unknown").decode(errors="replace")
        calls[Call(row.function.decode(), path, row.thread, bool(row.already_held))] += row.count
    return calls
