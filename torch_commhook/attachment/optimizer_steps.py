"""Tells subscribers of the steps of optimizers.

An optimizer tells nobody of its steps but hooks that are registered with it, or with all of them.
So there is one of ours with all optimizers as long as somebody counts.
"""

from __future__ import annotations

import itertools
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
    parameters = _parameters_of(optimizer)
    for _, counter in sorted(_counters.items()):
        counter.before_optimizer_step(parameters)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    parameters = _parameters_of(optimizer)
    counters = [counter for _, counter in sorted(_counters.items())]
    # An exchange that fails must not keep the others from counting.
    for counter in counters:
        counter.count_optimizer_step(parameters)
    for counter in counters:
        counter.after_optimizer_step(parameters)
