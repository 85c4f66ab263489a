"""Excludes functions from torch's compiler. Does not import the compiler, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def left_to_python(function: _Function, *, with_callees: bool = True) -> _Function:
    """Let Python run a function and all that it calls, wherever it is called.

    For functions that C++ (autograd, the garbage collector) calls while compiled code runs. The
    compiler would compile them separately, without benefit. They can still be traced as part of
    their caller.

    Args:
        function: a Python function.
        with_callees: whether this also applies to the functions that it calls.
    """
    callees = _FrameAction.SKIP if with_callees else _FrameAction.DEFAULT
    strategy = _FrameExecStrategy(_FrameAction.SKIP, callees)
    set_code_exec_strategy(function.__code__, strategy)
    return function
