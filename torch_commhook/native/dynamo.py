"""What torch's compiler must not take in. Does not import the compiler, which takes seconds."""

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
    """Let Python run a function, wherever it is called, and all that it calls.

    For what is called from C++ (autograd, the garbage collector) while compiled code runs, which
    would be compiled on its own, for nothing. It can still be traced as part of what calls it.

    Args:
        function: a Python function.
        with_callees: so for what it calls.
    """
    callees = _FrameAction.SKIP if with_callees else _FrameAction.DEFAULT
    strategy = _FrameExecStrategy(_FrameAction.SKIP, callees)
    set_code_exec_strategy(function.__code__, strategy)
    return function
