"""Detects a scaler of mixed precision that a hook does not know.

A scaler calls the optimizer's step(): a hook on all optimizers finds it among the callers. This
costs a microsecond per step.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any, Protocol

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from torch_commhook.autograd.running_backward import is_inside
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.native.dynamo import left_to_python

_log = logging.getLogger(__name__)

_OPTIMIZER_FILE = register_optimizer_step_pre_hook.__code__.co_filename

#: The scaler's methods, one of which calls an optimizer's ``step()``.
_STEPS = frozenset(
    method.__code__
    for method in (GradScaler.step, getattr(GradScaler, "_maybe_opt_step", None))
    if method is not None
)
#: Functions between these and the optimizer's hooks: wrappers of ``step()``, such as a scheduler's.
_MOST_FRAMES = 16


class ScaledHook(Protocol):
    """An attached hook that depends on the scale of its gradients.

    Attributes:
        name: the hook's name, for the message.
        memory: its memory of the model.
        keeps_error: whether it remembers errors of gradients; otherwise it clips.
    """

    name: str
    memory: HookMemory

    @property
    def keeps_error(self) -> bool: ...


_watched: weakref.WeakSet[ScaledHook] = weakref.WeakSet()
_handles: list[RemovableHandle] = []


def watch_for_scaler(attached: ScaledHook) -> None:
    """Warn once, in the log, if a scaler appears that the hook does not know."""
    if attached not in _watched:
        _watched.add(attached)
        # Of a freed model with an attached hook.
        weakref.finalize(attached, _remove_unneeded_step_hook).atexit = False
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))


def stop_watching_for_scaler(attached: ScaledHook) -> None:
    """Stop watching for a removed hook."""
    _watched.discard(attached)
    _remove_unneeded_step_hook()


@left_to_python
def _remove_unneeded_step_hook() -> None:
    """Remove the hook from all optimizers, if nothing is left to watch."""
    # The garbage collector may call this while an optimizer iterates over its hooks.
    if not list(_watched) and not is_inside(_OPTIMIZER_FILE):  # a set may count a dying object
        while _handles:
            _handles.pop().remove()


@left_to_python
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # A compiler that traces step() would break its graph here.
    if torch.compiler.is_compiling() or not _scaler_calls():
        return
    own = [p for group in optimizer.param_groups for p in group["params"]]
    for attached in list(_watched):
        if attached.memory.store.has_any_of(own):
            _watched.discard(attached)  # the hook here stays: optimizers iterate over theirs
            attached.memory.jump_watch = None
            _log.warning(
                "hook '%s' was not told of the GradScaler that scales its gradients: %s; use "
                "attach(model, hook, scaler=scaler)",
                attached.name,
                "its error memory is in units of the old scale when the scale changes"
                if attached.keeps_error
                else "it clips by the norm of scaled gradients",
            )


def _scaler_calls() -> bool:
    """Whether a scaler is calling the optimizer's step()."""
    frame: Any = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        if frame.f_code in _STEPS:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False
