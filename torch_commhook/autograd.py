"""Hooks of the autograd engine, with the same checks in eager and under compiled autograd.

Each kind runs where PyTorch's own of that kind does, and gets and returns the same. Hooks run in
order of registration, each on what the one before has made of the values; None, or the very object
that was passed in, leaves them as they are. Whoever runs the hooks takes a snapshot first: one that
is removed meanwhile still runs, one that is added does not.

A hook is a Python callable; or an operator (``torch.ops.x.y``), which then runs without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from torch_commhook import _C
from torch_commhook._check_ops import check_finite, size_change, type_change
from torch_commhook._runtime import hook_name


class RemovableHandle:
    """Takes a hook off again, by itself at the end of a ``with`` block.

    Keeps neither the hook nor what it is on alive.
    """

    def __init__(self, registered: _C.Registered) -> None:
        self._registered = registered

    @property
    def is_registered(self) -> bool:
        """Whether the hook has not been removed."""
        return self._registered.is_registered()

    def remove(self) -> None:
        """Take the hook off. Does nothing where it is off already."""
        self._registered.remove()

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def register_hook(tensor: Tensor, fn: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Call ``fn(grad)`` when the gradient of a tensor has been computed.

    As ``torch.Tensor.register_hook``. ``fn`` returns None or another gradient.

    Raises:
        TypeError: no tensor, or no callable.
        RuntimeError: the tensor does not require grad.

    In ``backward()``: ``TypeError`` where ``fn`` returned no tensor, ``RuntimeError`` where its
    dtype, layout, device or size is another one.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"register_hook: tensor must be a torch.Tensor, got {_C.type_name(tensor)}")
    return _register(tensor, "tensor", fn)


def register_prehook(node: Any, fn: Callable[[tuple[Tensor | None, ...]], Any]) -> RemovableHandle:
    """Call ``fn(grad_outputs)`` before a node of the graph runs.

    As ``torch.autograd.graph.Node.register_prehook``. ``fn`` returns None or a tuple; a None in it
    drops that gradient.

    Raises:
        TypeError: no ``torch.autograd.graph.Node``, or no callable.

    In ``backward()``: ``TypeError`` where ``fn`` returned something else than a tuple, or one of
    something else than tensors; ``RuntimeError`` for another number of values, a value in place of
    a None, another dtype, layout, device or size.
    """
    return _register(node, "prehook", fn)


def register_posthook(
    node: Any, fn: Callable[[tuple[Tensor | None, ...], tuple[Tensor | None, ...]], Any]
) -> RemovableHandle:
    """Call ``fn(grad_inputs, grad_outputs)`` when a node of the graph has run.

    As ``torch.autograd.graph.Node.register_hook``. What ``fn`` returns takes the place of
    ``grad_inputs``; for the rest see :func:`register_prehook`.
    """
    return _register(node, "posthook", fn)


def register_post_accumulate_grad_hook(
    tensor: Tensor, fn: Callable[[Tensor], None]
) -> RemovableHandle:
    """Call ``fn(tensor)`` when a leaf's gradient has been accumulated in ``.grad``.

    As ``torch.Tensor.register_post_accumulate_grad_hook``. Hooks that are registered there run too,
    after these.

    Raises:
        TypeError: no tensor, or no callable.
        RuntimeError: the tensor is no leaf that requires grad.

    In ``backward()``: ``RuntimeError`` where ``fn`` returned something.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(
            "register_post_accumulate_grad_hook: tensor must be a torch.Tensor, got "
            f"{_C.type_name(tensor)}"
        )
    if not tensor.requires_grad or tensor.grad_fn is not None:
        raise RuntimeError(
            "register_post_accumulate_grad_hook: tensor must be a leaf that requires grad"
        )
    return _register(tensor, "post_accumulate", fn)


def call_hooks(
    hooks: Iterable[Callable[..., Any]], args: Sequence[Any], kind: str = "tensor"
) -> tuple[Tensor | None, ...]:
    """Call hooks one after another as the engine does, and give what they have made of the values.

    Args:
        hooks: the hooks, or a dict of them.
        args: the values; for ``posthook`` two sequences of values, of which the first is changed.
        kind: ``tensor``, ``prehook``, ``posthook`` or ``post_accumulate``.

    Raises:
        TypeError, RuntimeError: as in ``backward()``; see the functions that register.
        ValueError: another kind.
    """
    callables = list(hooks.values()) if isinstance(hooks, dict) else list(hooks)
    others: Sequence[Tensor | None] = ()
    values: Sequence[Tensor | None] = args
    if kind == "posthook":
        values, others = args
    elif kind != "prehook" and len(args) != 1:
        raise ValueError(
            f"call_hooks: args must hold one tensor for kind {kind!r}, got {len(args)}"
        )
    made = [_hook(fn, kind, traced=False) for fn in callables]
    return tuple(_C.call_autograd_hooks(made, kind, list(values), list(others)))


class cpp:  # noqa: N801 (named and written as hooks.cpp)
    """A hook that is written in C++ and registered by name, for the functions of this module.

    It runs without the GIL. Under compiled autograd it interrupts the compiled graph.
    :func:`torch_commhook.load_cpp_hooks` takes in such hooks; ``docs/cpp_hooks.md`` says how to
    write one. May be called as a hook in Python of its kind.

    Args:
        name: of the hook.
        options: those that the hook was registered with, checked as it says there.

    Raises:
        ValueError: there is no such hook, or an option breaks a rule of its own.
        TypeError: an option is unknown, missing, or of another type.
        RuntimeError: what makes the hook raises that.
    """

    def __init__(self, name: str, /, **options: Any) -> None:
        if not isinstance(name, str):
            raise TypeError(f"cpp: name must be a str, got {_C.type_name(name)}")
        self.native = _C.CppAutogradHook(name, options)

    @property
    def kind(self) -> str:
        """``tensor``, ``prehook``, ``posthook`` or ``post_accumulate``."""
        return self.native.kind

    @torch._disable_dynamo
    def __call__(self, value: Any, *others: Any) -> Any:
        hook = _C.AutogradHook(self, None, "", self.native, None, self.kind)
        several = self.kind in ("prehook", "posthook")
        values = list(value) if several else [value]
        results = _C.call_autograd_hooks(
            [hook], self.kind, values, list(others[0]) if others else []
        )
        if self.kind == "post_accumulate":
            return None
        return tuple(results) if several else results[0]

    def __repr__(self) -> str:
        return self.native.name


@torch._disable_dynamo  # which knows nothing of C++
def _register(on: Any, kind: str, fn: Callable[..., Any]) -> RemovableHandle:
    return RemovableHandle(_C.register_autograd_hook(on, kind, _hook(fn, kind, traced=True)))


def _hook(fn: Any, kind: str, *, traced: bool) -> _C.AutogradHook:
    operator = fn
    if isinstance(operator, OpOverloadPacket):
        overloads = operator.overloads()
        if "default" not in overloads:
            raise TypeError(f"a hook must be one operator, got {fn} with overloads {overloads}")
        operator = operator.default
    if isinstance(operator, OpOverload):
        schema = operator._schema
        return _C.AutogradHook(
            operator, schema.name, schema.overload_name, None, _traced(operator, kind), kind
        )
    if not callable(fn):
        raise TypeError(f"a hook must be callable, got {_C.type_name(fn)}")
    native = fn.native if isinstance(fn, cpp) else None
    return _C.AutogradHook(fn, None, "", native, _traced(fn, kind) if traced else None, kind)


# ---- gradients that must be finite ---------------------------------------------------------------


class FiniteCheck:
    """Counts the infinities and NaNs in gradients, on their device, until it is asked for them.

    ::

        check = FiniteCheck()
        check.watch(model)  # all parameters, by name
        register_hook(activation, check)  # one tensor: the check is a hook
        loss.backward()
        check.raise_if_nonfinite()  # the host waits for the device here, once

    As a hook it looks at the gradient that it is given, or, after accumulation, at the parameter's
    ``.grad`` (so at any leaf's that requires grad and has one). It runs in eager, in compiled code
    and in CUDA graphs, and leaves the gradient as it is.

    Args:
        device: of what is checked; by default torch's default device.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._own = _new_count(device)
        self._watched: dict[str, Tensor] = {}

    @property
    def count(self) -> Tensor:
        """How many values were not finite since the last :meth:`reset`: int64, 0-dimensional.

        On the device of the check; the host waits for nothing.
        """
        return torch.stack(self._counts()).sum()

    def __call__(self, tensor: Tensor) -> None:
        if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None:
            tensor = tensor.grad
        check_finite([tensor], self._own)

    def watch(
        self, tensors: torch.nn.Module | Iterable[tuple[str, Tensor]]
    ) -> list[RemovableHandle]:
        """Check each gradient of these tensors as it is computed, before it is accumulated.

        Args:
            tensors: a module, for those of its parameters that require grad; or names and tensors.
                Tensors of one name have one count.

        Returns:
            A handle for each tensor, in order.

        Raises:
            ValueError: a tensor is on another device than the check.
            RuntimeError: a tensor does not require grad.
        """
        named: list[tuple[str, Tensor]]
        if isinstance(tensors, torch.nn.Module):
            named = [(name, p) for name, p in tensors.named_parameters() if p.requires_grad]
        else:
            named = list(tensors)
        for name, tensor in named:
            if tensor.device != self._own.device:
                raise ValueError(
                    f"FiniteCheck.watch: {name!r} must be on the device of the check, "
                    f"{self._own.device}, got {tensor.device}; make a check for each device"
                )
        return [register_hook(tensor, self._hook_of(name)) for name, tensor in named]

    def raise_if_nonfinite(self) -> None:
        """Wait for the device, once, and raise if a value was not finite.

        Counts stay as they are until :meth:`reset`.

        Raises:
            RuntimeError: how many values were not finite, and of which watched tensors.
        """
        own, *watched = torch.stack(self._counts()).tolist()
        parts = [f"{n} of {name!r}" for name, n in zip(self._watched, watched, strict=True) if n]
        if own:
            parts.append(f"{own} of tensors that are not watched by name")
        if not parts:
            return
        if len(parts) > _NAMED_AT_MOST:
            parts[_NAMED_AT_MOST:] = [f"and of {len(parts) - _NAMED_AT_MOST} more"]
        raise RuntimeError(
            "FiniteCheck: gradients must be finite, got "
            f"{own + sum(watched)} infinite or NaN values: {', '.join(parts)}"
        )

    def reset(self) -> None:
        """Set all counts to zero. The host waits for nothing."""
        torch._foreach_zero_(self._counts())

    def _counts(self) -> list[Tensor]:
        return [self._own, *self._watched.values()]

    def _hook_of(self, name: str) -> Callable[[Tensor], None]:
        count = self._watched.get(name)
        if count is None:
            count = self._watched[name] = _new_count(self._own.device)

        def check_finite_hook(grad: Tensor) -> None:
            check_finite([grad], count)

        return check_finite_hook


_NAMED_AT_MOST = 10


def _new_count(device: torch.device | str | None) -> Tensor:
    with torch.inference_mode(False):  # or it could only be written there
        count = torch.zeros((), dtype=torch.int64, device=device)
    if count.is_cuda:
        # Without this, compiled code that writes it would not be put into a CUDA graph.
        torch._dynamo.mark_static_address(count, guard=False)
    return count


# ---- under compiled autograd ---------------------------------------------------------------------
# The compiler sees these functions, with the checks in them; csrc/runtime/autograd_hook_run.cpp has
# the same for eager. What is checked is known when the hook is traced, and guarded.


def _traced(fn: Callable[..., Any], kind: str) -> Callable[..., Any]:
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
