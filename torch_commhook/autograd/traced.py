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


def needs_one_graph() -> bool:
    """Whether the compiler that traces the caller takes no graph break."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer: Any = InstructionTranslator.current_tx()
    return bool(tracer.one_graph or tracer.error_on_graph_break)


# As torch.compiler.assume_constant_result, without the import of the compiler.
needs_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


class TracedHook:
    """A hook in one graph with its tensor's computation; has the methods of ``_C.Registered``.

    The compiler takes PyTorch's own methods there, which check the hook's result.

    Args:
        tensor: the tensor.
        kind: ``tensor`` or ``post_accumulate``.
        fn: the hook.
    """

    def __init__(self, tensor: Tensor, kind: str, fn: Callable[..., Any]) -> None:
        self._is_registered = True
        if kind == "tensor":
            self._handle: Any = tensor.register_hook(fn)
        else:
            self._handle = tensor.register_post_accumulate_grad_hook(fn)

    def is_registered(self) -> bool:
        return self._is_registered

    def remove(self) -> None:
        if self._is_registered:
            self._is_registered = False
            self._handle.remove()


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
