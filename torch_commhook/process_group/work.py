"""Work in Python: its base class, Work around another Work, and when a Work has completed."""

from __future__ import annotations

import atexit
import functools
import heapq
import itertools
import os
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.collectives.futures import is_driven_by_wait
from torch_commhook.native.runtime import skip_dynamo

# ---- calls functions at given times, on a thread that ends when no call is pending ---------------


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


# ---- the base class of Work in Python, and Work around another Work ------------------------------


#: C++ passes this if no timeout is given.
_NO_TIMEOUT = timedelta(0)


def take_over(
    cls: type,
    base: type,
    methods: Mapping[str, list[str]],
    make: Callable[[types.FunctionType, str], Any],
) -> None:
    """Let Python's own calls of methods that C++ calls take the same path as C++'s calls.

    Args:
        cls: the class, with methods that it inherits from classes that do not derive from ``base``.
        base: our base class.
        methods: the names of each method, the newest first.
        make: returns the class's attribute for a function and a name.
    """
    for names in methods.values():
        own: Any = None
        for name in reversed(names):
            holder = next((each for each in cls.__mro__ if name in vars(each)), None)
            if holder is None or (holder is not cls and issubclass(holder, base)):
                continue
            if isinstance(vars(holder)[name], types.FunctionType):
                own = make(vars(holder)[name], name)
                setattr(cls, name, own)
        # A name in a class overrides all names in its base classes.
        for name in names:
            if own is not None and name not in vars(cls) and _is_python(cls, name):
                setattr(cls, name, own)


def _is_python(cls: type, name: str) -> bool:
    kind = type(getattr(cls, name, None))
    return kind is types.FunctionType or kind.__name__ == "OverrideMethod"


def have_all_names(cls: type, names: list[str], method: Any) -> None:
    """Give a class a method under all its names, whichever a caller or super() uses."""
    for name in names:
        if name not in vars(cls):
            setattr(cls, name, method)


def named(function: Any, owner: str, name: str) -> Any:
    """A function with the name of a class's method, for tracebacks."""
    function.__name__, function.__qualname__ = name, f"{owner}.{name}"
    return function


def called_by_cpp(function: types.FunctionType, name: str) -> Any:
    """The attribute of a class of works for a method that C++ calls too."""
    method = _C.work_method(skip_dynamo(function), name)

    is_wait = name == "wait"
    needs_timeout = is_wait and function.__code__.co_argcount - len(function.__defaults__ or ()) > 1

    # A function, since Dynamo loses `self` of other callables.
    @skip_dynamo
    @functools.wraps(function)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if needs_timeout and not arguments and not keywords:
            arguments = (_NO_TIMEOUT,)
        result = method(self, *arguments, **keywords)
        if is_wait and result is True and isinstance(self, _C.Work):
            self._mark_completed()
        return result

    return call


class Work(_C.Work):
    """The base class of Work in Python.

    A subclass defines ``wait(timeout)``, ``get_future()``, or both; the base class derives the
    other methods from the Future. See ``docs/process_groups.md``.

    Args:
        rank: the rank that the work receives from, for ``source_rank()``.
        op_type: its operation, a ``torch.distributed.OpType``.

    Example:
        >>> class Done(Work):
        ...     def wait(self, timeout=None):
        ...         return True
        >>> Done().wait()
        True
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        take_over(cls, Work, _C.work_methods(), called_by_cpp)


class WrapperWork(Work):
    """Work around another Work, for subclasses that change a part.

    Args:
        work: a ``torch.distributed.Work``.

    Example:
        >>> class Loud(process_group.WrapperWork):
        ...     def wait(self, *timeout):
        ...         print("waits")
        ...         return super().wait(*timeout)
        >>> run_ranks(lambda rank: Loud(dist.group.WORLD.allreduce([torch.ones(2)])).wait(), 1)
        waits
        [True]
    """

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work

    def exception(self) -> BaseException | None:
        # PyTorch's binding cannot convert it up to torch 2.12.
        return _C.work_exception(self.work)


def _delegate(names: list[str]) -> Any:
    def method(self: WrapperWork, *arguments: Any) -> Any:
        for name in names:
            own = getattr(self.work, name, None)
            if own is not None:
                return own(*arguments)
        return getattr(super(WrapperWork, self), names[0])(*arguments)

    return named(method, "WrapperWork", names[0])


for _names in _C.work_methods().values():
    _is_known = any(hasattr(work, name) for work in (dist.Work, _C.Work) for name in _names)
    if _is_known and _names[0] not in vars(WrapperWork):
        have_all_names(WrapperWork, _names, called_by_cpp(_delegate(_names), _names[0]))


class FollowedWork(WrapperWork):
    """Work that calls a function once, before anybody sees that it has completed.

    Args:
        work: the Work.
        then: called once. This Work's Future holds its result, or if that is None the result of
            ``work``. If it raises, this Work fails with its error.

    Example:
        >>> def reduce(rank):
        ...     values = torch.ones(2)
        ...     work = dist.group.WORLD.allreduce([values])
        ...     followed = process_group.FollowedWork(work, lambda: values.div_(2))
        ...     followed.wait()
        ...     return values
        >>> run_ranks(reduce, 2)[0]
        tensor([1., 1.])
    """

    def __init__(self, work: Any, then: Callable[[], Any]) -> None:
        super().__init__(work)
        self._then = then
        self._lock = threading.Lock()
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def _outcome_of_then(self) -> tuple[Any, BaseException | None]:
        with self._lock:
            if self._outcome is None:
                try:
                    self._outcome = self._then(), None
                except Exception as error:
                    self._outcome = None, error
        return self._outcome

    def _follow(self) -> Any:
        result, failure = self._outcome_of_then()
        if failure is not None:
            raise failure
        return result

    def wait(self, *timeout: Any) -> bool:
        completed = self.work.wait(*timeout)
        self._follow()
        return bool(completed)

    def synchronize(self) -> None:
        self.work.synchronize()
        self._follow()

    def is_completed(self) -> bool:
        if not self.work.is_completed():
            return False
        if self.work.is_success():
            self._outcome_of_then()  # exception() returns its error
        return True

    def is_success(self) -> bool:
        return bool(self.is_completed() and self.work.is_success() and self.exception() is None)

    def exception(self) -> BaseException | None:
        if self._outcome is not None and self._outcome[1] is not None:
            return self._outcome[1]
        return super().exception()

    def result(self) -> Any:
        result = self._follow()
        return self.work.result() if result is None else result

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._future = self.work.get_future().then(self._value)
        return self._future

    def _value(self, done: torch.futures.Future[Any]) -> Any:
        value = done.value()  # raises the work's error
        result = self._follow()
        return value if result is None else result


# ---- detects when a Work has completed -----------------------------------------------------------


#: Called with the time of completion, in seconds of ``_C.steady_seconds()``, and the error or None.
Done = Callable[[float, BaseException | None], None]

_POLL_SECONDS, _LONGEST_PAUSE = 5e-4, 2e-2
_TIMERS = Timers("commhook-completion")


def on_completion(work: Any, tensors: Sequence[Tensor], done: Done) -> Any:
    """Call ``done(end, error)`` once a Work has completed.

    A Work with a Future calls from the thread that completes it. On an accelerator a Future is
    complete once the operation is queued, so a thread polls the Work instead; it lives only while
    there is such Work. A Work without a Future calls when it is waited for.

    Args:
        work: a Work; anything else counts as complete.
        tensors: the tensors that it reads and writes.
        done: called once. Its exceptions go to ``sys.unraisablehook``.

    Returns:
        The Work to return in its place.
    """
    if not isinstance(work, dist.Work):
        done(_C.steady_seconds(), None)
        return work
    if any(tensor.device.type != "cpu" for tensor in tensors):
        _TIMERS.call_at(0.0, lambda: _watch(work, done))
        return work
    try:
        future = work.get_future()
    except (RuntimeError, NotImplementedError):  # backends raise these, and our own Work
        return _ObservedWork(work, done)
    if not isinstance(future, torch._C.Future):
        raise TypeError(
            f"{_C.type_name(work)}.get_future: must return a torch.futures.Future, got "
            f"{_C.type_name(future)}"
        )
    if is_driven_by_wait(future):
        return _ObservedWork(work, done)
    _C.on_completion(future, done)
    return work


def error_of(work: Any) -> BaseException | None:
    """The error of a completed Work, or None."""
    if work.is_success():
        return None
    return _C.work_exception(work) or RuntimeError("the work has failed")


class _ObservedWork(WrapperWork):
    def __init__(self, work: Any, done: Done) -> None:
        super().__init__(work)
        self._done: Done | None = done

    def _finish(self, error: BaseException | None) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(_C.steady_seconds(), error)

    def wait(self, *timeout: Any) -> bool:
        try:
            result = self.work.wait(*timeout)
        except BaseException as error:
            self._finish(error)
            raise
        self._finish(None)
        return bool(result)

    def synchronize(self) -> None:
        self.work.synchronize()
        self._finish(None)

    def is_completed(self) -> bool:
        completed = self.work.is_completed()
        if completed:
            self._finish(error_of(self.work))
        return bool(completed)


def _watch(work: Any, done: Done, pause: float = _POLL_SECONDS) -> None:
    """Poll a Work until it has completed."""
    try:
        if not work.is_completed():
            longer = min(1.1 * pause, _LONGEST_PAUSE)
            _TIMERS.call_at(_C.steady_seconds() + pause, lambda: _watch(work, done, longer))
            return
        error = error_of(work)
    except Exception as raised:
        error = raised
    done(_C.steady_seconds(), error)
