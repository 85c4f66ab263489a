"""Work that a Python class does, and Work around another."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from torch_commhook import _C


def take_over(
    cls: type, methods: Mapping[str, list[str]], make: Callable[[types.FunctionType, str], Any]
) -> None:
    """Have Python's own calls of what a class defines for C++ pass where those of C++ do."""
    for names in methods.values():
        for name in names:
            function = cls.__dict__.get(name)
            if isinstance(function, types.FunctionType):
                setattr(cls, name, make(function, name))


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
        take_over(cls, _C.work_methods(), _C.work_method)


class WrapperWork(Work):
    """Work that leaves everything to another Work, for subclasses that change a part.

    Args:
        work: a ``torch.distributed.Work``.
    """

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work


def _delegate(names: list[str]) -> Callable[..., Any]:
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
        if any(hasattr(work, name) for work in (dist.Work, _C.Work) for name in names):
            setattr(WrapperWork, names[0], _C.work_method(_delegate(names), names[0]))


_delegate_all()
