"""Detects when a Work has completed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_commhook import _C
from torch_commhook.collectives.futures import is_driven_by_wait
from torch_commhook.process_group.timers import Timers
from torch_commhook.process_group.work import WrapperWork

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
    if not isinstance(work, torch.distributed.Work):
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
    if not _ask(work, done):
        longer = min(1.1 * pause, _LONGEST_PAUSE)
        _TIMERS.call_at(_C.steady_seconds() + pause, lambda: _watch(work, done, longer))


def _ask(work: Any, done: Done) -> bool:
    """Whether a Work needs no more polling."""
    try:
        if not work.is_completed():
            return False
        error = error_of(work)
    except Exception as raised:
        error = raised
    done(_C.steady_seconds(), error)
    return True
