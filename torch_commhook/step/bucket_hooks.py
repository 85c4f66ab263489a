"""Hooks around the communication hook, which run in this order:

    buffer pre-hooks, pre-hooks, the communication hook, post-hooks, gradients written,
    post-accumulate hooks

Their results are checked as autograd checks those of its own, in every mode.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torch_commhook import _C
from torch_commhook.autograd.registration import is_inside
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.native.runtime import hook_name

_Hooks = OrderedDict[int, tuple[Callable[..., Any], str]]

_GRAPH_FILE = torch.autograd.graph.__file__
_NO_BACKWARD = -1
#: The running calls of :meth:`BucketHooks.done`: gradients are averaged, so that optimizers may
#: step. Not a thread's own value: compilers trace this.
_done_calls = 0


class BucketHooks:
    """The hooks of each kind, in order of registration."""

    def __init__(self) -> None:
        self.buffer_prehooks: _Hooks = OrderedDict()
        self.prehooks: _Hooks = OrderedDict()
        self.posthooks: _Hooks = OrderedDict()
        self.post_accumulate_hooks: _Hooks = OrderedDict()

    def register(self, kind: str, hook: Callable[..., Any]) -> RemovableHandle:
        """Add a hook of a kind."""
        if not callable(hook):
            raise TypeError(f"a hook must be callable, got {_C.type_name(hook)}")
        hooks: _Hooks = getattr(self, kind)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook, hook_name(hook)
        return handle

    @property
    def is_empty(self) -> bool:
        return not (
            self.buffer_prehooks or self.prehooks or self.posthooks or self.post_accumulate_hooks
        )

    @property
    def has_post_accumulate_hooks(self) -> bool:
        """Whether :meth:`done` has work to do."""
        return bool(_hooks(self.post_accumulate_hooks))

    def before(self, bucket: GradBucket, where: str) -> tuple[Tensor, ...] | None:
        """Run the hooks before the communication hook.

        Returns:
            The gradients after these hooks, if post-hooks need them.
        """
        with torch.no_grad():
            for hook, name in _hooks(self.buffer_prehooks):
                result = hook(bucket)
                buffer = bucket.buffer()
                if result is None or result is buffer:
                    continue
                _check_value(result, buffer, f"{where}: buffer pre-hook '{name}'")
                bucket.set_buffer(result)
            if _hooks(self.prehooks):
                values = list(bucket.gradients())
                _write(bucket, values, self._run_all(self.prehooks, values, (), where, "pre-hook"))
            if not _hooks(self.posthooks):
                return None
            return tuple(gradient.clone() for gradient in bucket.gradients())

    def after(
        self, bucket: GradBucket, result: Tensor, local: tuple[Tensor, ...], where: str
    ) -> Tensor:
        """Run the post-hooks on a result that has been checked.

        Returns:
            The result, in the bucket's dtype.
        """
        with torch.no_grad():
            result = result.to(bucket.dtype())
            reduced = bucket.pieces(result)
            new = self._run_all(self.posthooks, reduced, (local,), where, "post-hook")
            if bucket.is_sparse():
                return new[0]
            for before, after in zip(reduced, new, strict=True):
                if after is not before:
                    before.copy_(after)
            return result

    def done(self, bucket: GradBucket, where: str) -> None:
        """Run the post-accumulate hooks, when all gradients are written."""
        global _done_calls
        _done_calls += 1
        try:
            with torch.no_grad():
                for hook, name in _hooks(self.post_accumulate_hooks):
                    result = hook(bucket)
                    if result is not None:
                        raise RuntimeError(
                            f"{where}: post-accumulate hook '{name}' should return None, "
                            f"but returned '{type(result).__name__}'"
                        )
        finally:
            _done_calls -= 1

    @staticmethod
    def _run_all(
        hooks: _Hooks, values: Sequence[Tensor], others: tuple[Any, ...], where: str, kind: str
    ) -> list[Tensor]:
        current = list(values)
        for hook, name in _hooks(hooks):
            given = tuple(current)
            result = hook(given, *others)
            if result is None:
                continue
            which = f"{where}: {kind} '{name}'"
            if not isinstance(result, tuple):
                raise TypeError(
                    f"{which}: expected tuple, but hook returned '{type(result).__name__}'"
                )
            if len(result) != len(given):
                raise RuntimeError(
                    f"{which}: hook has returned an incorrect number of values (got "
                    f"{len(result)}, but expected {len(given)})"
                )
            for i, value in enumerate(result):
                if value is None or value is given[i]:
                    continue
                _check_value(value, given[i], f"{which}, value {i}")
                current[i] = value
        return current


def _hooks(kind: _Hooks) -> list[tuple[Callable[..., Any], str]]:
    """The present hooks of a kind: one that is removed meanwhile still runs.

    Also used to test whether there are any: torch 2.13's compiler guards the values of an ordered
    dict, but not whether it is empty.
    """
    return list(kind.values())


def _write(bucket: GradBucket, before: list[Tensor], after: list[Tensor]) -> None:
    if bucket.is_sparse():
        bucket.set_buffer(after[0])
        return
    for old, new in zip(before, after, strict=True):
        if new is not old:
            old.copy_(new)


def _check_value(value: object, was: Tensor, which: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{which}: expected Tensor, but hook returned '{type(value).__name__}'")
    for what in ("dtype", "layout", "device"):
        if getattr(value, what) != getattr(was, what):
            raise RuntimeError(
                f"{which}: hook has changed the type of value ({what} was {getattr(was, what)}, "
                f"got {getattr(value, what)})"
            )
    if value.shape != was.shape:
        raise RuntimeError(
            f"{which}: hook has changed the size of value (was {tuple(was.shape)}, "
            f"got {tuple(value.shape)})"
        )


def check_not_in_backward(name: str) -> None:
    """Refuse an optimizer's step inside backward."""
    if is_in_backward():
        raise RuntimeError(
            f"hook '{name}': an optimizer steps inside backward(), before the ranks' gradients are "
            "averaged, as in a hook of a parameter's register_post_accumulate_grad_hook(). Step "
            "after backward(), or in HookHandle.register_post_accumulate_hook(), as in "
            "handle.register_post_accumulate_hook(lambda bucket: step(bucket.parameters()))"
        )


def is_in_backward() -> bool:
    """Whether this code runs inside backward, before the gradients are averaged."""
    if _done_calls:
        return False
    if torch.compiler.is_dynamo_compiling():
        return bool(torch._dynamo.compiled_autograd.in_compiled_autograd_region)
    if torch._C._current_graph_task_id() != _NO_BACKWARD:
        return True
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    # The region is another thread's if backward() is not on this one's stack.
    in_region = compiled is not None and compiled.in_compiled_autograd_region
    return in_region and is_inside(_GRAPH_FILE)
