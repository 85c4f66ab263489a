"""Determines which ``backward()`` Python code is a part of.

The autograd engine only reports the number of the innermost backward; the stack shows outer ones.
"""

from __future__ import annotations

import sys
import threading
import weakref
from contextlib import suppress
from typing import Any

import torch

_FUNCTION_FILE = torch.autograd.function.__file__
_GRAPH_FILE = torch.autograd.graph.__file__


def is_inside(file: str) -> bool:
    """Whether a function of a file is on this thread's stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


class RunningBackward:
    """The outermost ``backward()`` on this thread's stack.

    Attributes:
        is_nested: whether another one runs inside a node of its graph, as in reentrant activation
            checkpointing.
        thread: the thread's number.
    """

    def __init__(self) -> None:
        frame: Any = sys._getframe(1)
        outermost: Any = None
        self.is_nested = False
        while frame is not None:
            code = frame.f_code
            if code.co_name == "_engine_run_backward" and code.co_filename == _GRAPH_FILE:
                outermost = frame
            elif (
                outermost is not None
                and code.co_name == "apply"
                and code.co_filename == _FUNCTION_FILE
                # A node's method; a function's own, which runs its forward, is a class method.
                and code.co_varnames[0] == "self"
            ):
                self.is_nested = True
            frame = frame.f_back
        self.thread = threading.get_ident()
        self._frame_id = id(outermost)
        self._output: weakref.ref[Any] | None = None
        if outermost is not None:
            with suppress(LookupError, TypeError):  # no tensor, or one without a weak reference
                self._output = weakref.ref(outermost.f_locals["t_outputs"][0])

    def has_left(self, earlier: RunningBackward | None) -> bool:
        """Whether an earlier one on this thread has ended, possibly by an exception."""
        return earlier is not None and earlier.thread == self.thread and not earlier.is_same(self)

    def is_same(self, other: RunningBackward) -> bool:
        """Whether two are the same. Frames are reused; tensors seldom are."""
        if self.thread != other.thread or self._frame_id != other._frame_id:
            return False
        if self._output is None or other._output is None:
            return self._output is other._output
        output = self._output()
        return output is not None and output is other._output()
