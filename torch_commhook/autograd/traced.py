"""Autograd hooks for compiled autograd.

The compiler traces these functions with their checks; for eager code
csrc/runtime/autograd/autograd_hook_run.cpp has the same. The checked properties are known when the
hook is traced, and guarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torch_commhook.native.check_ops import size_change, type_change
from torch_commhook.native.runtime import hook_name


def traced(fn: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """A function that calls a hook of a kind and checks its result."""
    name = f"hook '{hook_name(fn)}'"

    def tensor_hook(grad: Tensor) -> Tensor:
        result = fn(grad)
        if result is None or result is grad:
            return grad
        return _checked(result, grad, name)

    def tuple_hook(
        values: Sequence[Tensor | None], *others: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        given = tuple(values)
        result = fn(given, *(tuple(other) for other in others))
        if result is None:
            return given
        if not isinstance(result, tuple):
            raise TypeError(f"{name}: expected tuple, but hook returned '{_type_of(result)}'")
        if len(result) != len(given):
            raise RuntimeError(
                f"{name} has returned an incorrect number of values (got {len(result)}, but "
                f"expected {len(given)})"
            )
        new = []
        for i, (value, was) in enumerate(zip(result, given, strict=True)):
            if value is None or value is was:
                new.append(value)
            else:
                new.append(_checked(value, was, f"{name}, value {i} of {len(given)}"))
        return tuple(new)

    def post_accumulate_hook(parameter: Tensor) -> None:
        result = fn(parameter)
        if result is not None and result is not parameter:
            raise RuntimeError(f"{name}: Tensor post accumulate grad hooks should return None.")

    if kind == "tensor":
        return tensor_hook
    return post_accumulate_hook if kind == "post_accumulate" else tuple_hook


def _checked(value: Any, was: Tensor | None, name: str) -> Tensor:
    if was is None:
        raise RuntimeError(f"{name}: can't replace a None gradient with a non-None value")
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected Variable, but hook returned '{_type_of(value)}'")
    if value.dtype != was.dtype or value.layout != was.layout or value.device != was.device:
        raise RuntimeError(f"{name} {type_change(was, value)}")
    if value.shape != was.shape:
        raise RuntimeError(f"{name} {size_change(was, value)}")
    return value


def _type_of(value: object) -> str:
    return type(value).__name__
