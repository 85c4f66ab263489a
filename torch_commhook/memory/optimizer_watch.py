"""Detects an optimizer that steps inside backward, and a scaler that a hook does not know.

A hook on all optimizers finds both. A scaler of mixed precision is among the callers of the
optimizer's step(). This costs a microsecond per step.
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
_GRAPH_FILE = torch.autograd.graph.__file__
_NO_BACKWARD = -1

#: The scaler's methods, one of which calls an optimizer's ``step()``.
_STEPS = frozenset(
    method.__code__
    for method in (GradScaler.step, getattr(GradScaler, "_maybe_opt_step", None))
    if method is not None
)
#: Functions between these and the optimizer's hooks: wrappers of ``step()``, such as a scheduler's.
_MOST_FRAMES = 16


class WatchedHook(Protocol):
    """An attached hook.

    Attributes:
        name: the hook's name, for the message.
        memory: its memory of the model.
        keeps_error: whether it remembers errors of gradients.
        minds_scale: whether it depends on the scale of its gradients: it remembers errors or clips.
        follows_scale: whether it knows the scaler.
    """

    name: str
    memory: HookMemory

    @property
    def keeps_error(self) -> bool: ...

    @property
    def minds_scale(self) -> bool: ...

    @property
    def follows_scale(self) -> bool: ...


_watched: weakref.WeakSet[WatchedHook] = weakref.WeakSet()
_without_scaler: weakref.WeakSet[WatchedHook] = weakref.WeakSet()
_handles: list[RemovableHandle] = []
_final_stages = 0


def watch_optimizers(attached: WatchedHook) -> None:
    """Watch the optimizers of a hook's parameters.

    A step inside backward, before the gradients are averaged, raises a RuntimeError. A scaler that
    the hook should know and does not gets one warning in the log.
    """
    if attached not in _watched:
        _watched.add(attached)
        # Of a freed model with an attached hook.
        weakref.finalize(attached, _remove_unneeded_step_hook).atexit = False
    if attached.minds_scale and not attached.follows_scale:
        _without_scaler.add(attached)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))


def stop_watching_optimizers(attached: WatchedHook) -> None:
    """Stop watching for a removed hook."""
    _watched.discard(attached)
    _without_scaler.discard(attached)
    _remove_unneeded_step_hook()


def change_final_stages(by: int) -> None:
    """Count the running stages in which an optimizer may step, since gradients are averaged."""
    # Not a thread's own value: compilers trace this.
    global _final_stages
    _final_stages += by


def check_not_in_backward(name: str) -> None:
    """Refuse an optimizer's step inside backward.

    Args:
        name: the hook's name.

    Raises:
        RuntimeError: this is a step inside backward, and no stage in which it may step.
    """
    if not _final_stages and _is_in_backward():
        raise RuntimeError(
            f"hook '{name}': an optimizer steps inside backward(), before the ranks' gradients are "
            "averaged, as in a hook of a parameter's register_post_accumulate_grad_hook(). Step "
            "after backward(), or in HookHandle.register_post_accumulate_hook(), as in "
            "handle.register_post_accumulate_hook(lambda bucket: step(bucket.parameters()))"
        )


def _is_in_backward() -> bool:
    if torch.compiler.is_compiling():
        return bool(torch._dynamo.compiled_autograd.in_compiled_autograd_region)
    if torch._C._current_graph_task_id() != _NO_BACKWARD:
        return True
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    # The region is another thread's if backward() is not on this one's stack.
    in_region = compiled is not None and compiled.in_compiled_autograd_region
    return in_region and is_inside(_GRAPH_FILE)


@left_to_python
def _remove_unneeded_step_hook() -> None:
    """Remove the hook from all optimizers, if nothing is left to watch."""
    # The garbage collector may call this while an optimizer iterates over its hooks.
    if not list(_watched) and not is_inside(_OPTIMIZER_FILE):  # a set may count a dying object
        while _handles:
            _handles.pop().remove()


@left_to_python
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    in_backward = not _final_stages and _is_in_backward()
    # A compiler that traces step() would break its graph below.
    looks = _without_scaler and not torch.compiler.is_compiling()
    if not in_backward and not (looks and _scaler_calls()):
        return
    own = [p for group in optimizer.param_groups for p in group["params"]]
    for attached in list(_watched):
        if in_backward and attached.memory.store.has_any_of(own):
            check_not_in_backward(attached.name)
    for attached in list(_without_scaler) if not in_backward else ():
        if attached.memory.store.has_any_of(own):
            _without_scaler.discard(attached)  # the hook here stays: optimizers iterate over theirs
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
