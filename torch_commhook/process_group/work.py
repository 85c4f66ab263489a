"""Work that a Python class does, and Work around another."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from torch_commhook import _C
from torch_commhook._dynamo import left_to_python


def take_over(
    cls: type, methods: Mapping[str, list[str]], make: Callable[[types.FunctionType, str], Any]
) -> None:
    """Have Python's own calls of what a class defines for C++ pass where those of C++ do."""
    for names in methods.values():
        for name in names:
            function = cls.__dict__.get(name)
            if isinstance(function, types.FunctionType):
                setattr(cls, name, make(function, name))


def called_by_cpp(function: types.FunctionType, name: str) -> Any:
    """What a class of works has for a method of that name, which C++ calls too."""
    return _C.work_method(left_to_python(function), name)


class Work(_C.Work):
    """Work that a Python class does: a base class.

    A subclass defines ``wait(timeout)``, ``get_future()``, or both; what it leaves out follows from
    the Future. See ``docs/process_groups.md``.

    Args:
        rank: the rank that the work is received from, for ``source_rank()``.
        op_type: what it does, a ``torch.distributed.OpType``.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        take_over(cls, _C.work_methods(), called_by_cpp)


class WrapperWork(Work):
    """Work that leaves everything to another Work, for subclasses that change a part.

    Args:
        work: a ``torch.distributed.Work``.
    """

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work

    def exception(self) -> BaseException | None:
        # PyTorch's binding cannot convert it, up to torch 2.12.
        return _C.ask_work(self.work, "exception")


def _delegate(names: list[str]) -> Any:
    def method(self: WrapperWork, *arguments: Any) -> Any:
        for name in names:
            own = getattr(self.work, name, None)
            if own is not None:
                return own(*arguments)
        return getattr(super(WrapperWork, self), names[0])(*arguments)

    method.__name__ = names[0]
    method.__qualname__ = f"WrapperWork.{names[0]}"
    return method


def _delegate_all() -> None:
    for names in _C.work_methods().values():
        if names[0] in vars(WrapperWork):
            continue
        if any(hasattr(work, name) for work in (dist.Work, _C.Work) for name in names):
            setattr(WrapperWork, names[0], called_by_cpp(_delegate(names), names[0]))


_delegate_all()


class FollowedWork(WrapperWork):
    """Work after which something is done once, before anybody sees that it has completed.

    Args:
        work: the Work.
        then: called once. The own Future holds what it returns, or where that is None what the
            Future of ``work`` holds. What it raises is this Work's error.
    """

    def __init__(self, work: Any, then: Callable[[], Any]) -> None:
        super().__init__(work)
        self._then = then
        self._lock = threading.Lock()
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def _follow(self) -> Any:
        with self._lock:
            if self._outcome is None:
                try:
                    self._outcome = self._then(), None
                except Exception as error:
                    self._outcome = None, error
        result, failure = self._outcome
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
            try:
                self._follow()
            except Exception:  # for exception() to tell
                pass
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
        value = done.value()  # raises what the work has failed with
        result = self._follow()
        return value if result is None else result
