"""Tells subscribers of the steps of optimizers.

An optimizer tells nobody of its steps but hooks that are registered with it, or with all of them.
So there is one of ours with all optimizers as long as somebody counts. An optimizer may be made of
others, and step by their steps; only the step of the whole counts then.
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
    """Who is told of each optimizer's step, with the ids of the optimizer's parameters."""

    def before_optimizer_step(self, parameters: frozenset[int]) -> None:
        """An optimizer is about to step."""

    def count_optimizer_step(self, parameters: frozenset[int]) -> None:
        """An optimizer has stepped."""

    def after_optimizer_step(self, parameters: frozenset[int]) -> None:
        """All have counted the step."""


#: In the order in which the hooks were attached, which is that of the exchanges on all ranks.
_counters: weakref.WeakValueDictionary[int, StepCounter] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_handles: list[RemovableHandle] = []


class _Begun(threading.local):
    """The optimizers whose steps have begun in this thread, and not ended; or have raised."""

    def __init__(self) -> None:
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []


_begun = _Begun()


def add_step_counter(counter: StepCounter) -> None:
    """Tell a subscriber of steps, as long as it lives."""
    _counters[next(_numbers)] = counter
    if not _handles:
        # What a rank sends, and when, is for no compiler.
        before, after = map(torch.compiler.disable, (_before_step, _after_step))
        _handles.append(register_optimizer_step_pre_hook(before))
        _handles.append(register_optimizer_step_post_hook(after))


def remove_step_counter(counter: StepCounter) -> None:
    """Tell a subscriber of no more steps."""
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
        counter.before_optimizer_step(parameters)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    parameters = _parameters_of(optimizer)
    if _is_part_of_a_step(optimizer, parameters):
        return
    counters = [counter for _, counter in sorted(_counters.items())]
    # An exchange that fails must not keep the others from counting.
    for counter in counters:
        counter.count_optimizer_step(parameters)
    for counter in counters:
        counter.after_optimizer_step(parameters)


def _is_part_of_a_step(optimizer: torch.optim.Optimizer, parameters: frozenset[int]) -> bool:
    """Whether another optimizer, of the same parameters, is stepping by this one's step."""
    others = [other for other in (ref() for ref in _begun.optimizers) if other is not None]
    others = [other for other in others if other is not optimizer and _is_stepping(other)]
    _begun.optimizers = [weakref.ref(other) for other in others]
    return any(not _parameters_of(other).isdisjoint(parameters) for other in others)


def _is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a method of an optimizer calls this: a step that has raised never ends."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            return True
    return False
