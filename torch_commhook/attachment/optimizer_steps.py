"""Notifies subscribers of optimizers' steps.

An optimizer reports its steps only to hooks, of one optimizer or of all. So the library registers
one hook for all optimizers while there are subscribers. An optimizer may consist of others, and
step by their steps; only the outer step counts then.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle


class StepCounter(Protocol):
    """A subscriber. Each call gets the ids of the stepping optimizer's parameters."""

    def before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, parameters: frozenset[int]
    ) -> None:
        """Called before an optimizer steps.

        Raises:
            RuntimeError: it must not step these parameters.
        """

    def count_optimizer_step(self, parameters: frozenset[int]) -> None:
        """Called after an optimizer has stepped."""

    def after_optimizer_step(self, parameters: frozenset[int]) -> None:
        """Called when all subscribers have counted the step."""


#: In the order in which hooks were attached; all ranks run exchanges in this order.
_counters: weakref.WeakValueDictionary[int, StepCounter] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_handles: list[RemovableHandle] = []


class _Begun(threading.local):
    """The optimizers of this thread whose steps have begun and not ended, or have raised."""

    def __init__(self) -> None:
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []


_begun = _Begun()


def add_step_counter(counter: StepCounter) -> None:
    """Notify a subscriber of steps, while it exists."""
    _counters[next(_numbers)] = counter
    if not _handles:
        # Compilers must not trace when a rank sends messages.
        before, after = map(torch.compiler.disable, (_before_step, _after_step))
        _handles.append(register_optimizer_step_pre_hook(before))
        _handles.append(register_optimizer_step_post_hook(after))


def remove_step_counter(counter: StepCounter) -> None:
    """Stop notifying a subscriber."""
    for number, other in list(_counters.items()):
        if other is counter:
            del _counters[number]
    if not _counters:
        while _handles:
            _handles.pop().remove()


def _parameters_of(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _begun.optimizers.append(weakref.ref(optimizer))
    parameters = _parameters_of(optimizer)
    for _, counter in sorted(_counters.items()):
        counter.before_optimizer_step(optimizer, parameters)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    parameters = _parameters_of(optimizer)
    if _is_part_of_a_step(optimizer, parameters):
        return
    counters = [counter for _, counter in sorted(_counters.items())]
    # A failed exchange must not keep other subscribers from counting.
    for counter in counters:
        counter.count_optimizer_step(parameters)
    for counter in counters:
        counter.after_optimizer_step(parameters)


def _is_part_of_a_step(optimizer: torch.optim.Optimizer, parameters: frozenset[int]) -> bool:
    """Whether this step is part of the step of another optimizer with the same parameters."""
    others = [other for other in (ref() for ref in _begun.optimizers) if other is not None]
    others = [other for other in others if other is not optimizer and _is_stepping(other)]
    _begun.optimizers = [weakref.ref(other) for other in others]
    return any(not _parameters_of(other).isdisjoint(parameters) for other in others)


def _is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a method of the optimizer is on the call stack. A step that raised never ends."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            return True
    return False
