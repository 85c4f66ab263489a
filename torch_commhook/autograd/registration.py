"""Registers hooks with the autograd engine, for all modes."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle as TorchHandle

from torch_commhook import _C
from torch_commhook.native.bucket_ops import size_change, type_change
from torch_commhook.native.runtime import hook_name


def is_inside(file: str) -> bool:
    """Whether a function of a file is on this thread's stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


# ---- hooks on parameters whose gradients fully_shard() or replicate() writes ---------------------


def is_fully_sharded(tensor: Tensor) -> bool:
    """Whether ``fully_shard()`` or ``replicate()`` writes a tensor's gradient.

    Autograd computes gradients of the whole parameters instead. It never calls a hook of this one.
    """
    module = sys.modules.get("torch.distributed._composable_state")
    if module is None or not hasattr(tensor, "device_mesh"):
        return False
    # Other threads may shard a model meanwhile; this copy is atomic.
    for reference in list(module._module_state_mapping.data.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.13, or another state
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            if group is not None and any(
                tensor is each.sharded_param for each in group.fsdp_params
            ):
                return True
    return False


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; other tensors unchanged."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


class _Hooks:
    """The library's post-accumulate hooks of one parameter: one of PyTorch's hooks calls them.

    So a hook may remove hooks, as with the engine; ``fully_shard`` itself refuses it.
    """

    def __init__(self) -> None:
        self.hooks: OrderedDict[int, Callable[[Tensor], None]] = OrderedDict()

    def __call__(self, parameter: Tensor) -> None:
        for hook in list(self.hooks.values()):
            hook(parameter)


class RegisteredHook:
    """A hook of a sharded parameter; has the methods of ``_C.Registered``."""

    def __init__(self, parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
        theirs: Any = parameter._post_accumulate_grad_hooks or {}
        ours = next((each for each in theirs.values() if isinstance(each, _Hooks)), None)
        if ours is None:
            ours = _Hooks()
            handle: Any = parameter.register_post_accumulate_grad_hook(ours)
            handle.hooks_dict_ref().move_to_end(handle.id, last=False)  # before PyTorch's own
        self._handle = TorchHandle(ours.hooks)
        ours.hooks[self._handle.id] = hook

    def is_registered(self) -> bool:
        hooks = self._handle.hooks_dict_ref()
        return hooks is not None and self._handle.id in hooks

    def remove(self) -> None:
        self._handle.remove()


# ---- autograd hooks in C++ -----------------------------------------------------------------------


class cpp:  # noqa: N801 (named and written as hooks.cpp)
    """A hook that is written in C++ and registered by name, for the functions of this module.

    It runs without the GIL. Under compiled autograd it interrupts the compiled graph.
    :func:`torch_commhook.load_cpp_hooks` loads such hooks; ``docs/cpp_hooks.md`` explains how to
    write one. The object may also be called like a Python hook of its kind.

    Args:
        name: the hook's name.
        options: the hook's options, checked against its registration.

    Raises:
        ValueError: there is no such hook, or an option breaks the hook's own rule.
        TypeError: an option is unknown, missing, or of another type.
        RuntimeError: the hook's factory threw it.

    Example:
        >>> autograd.cpp("no_such_hook")
        Traceback (most recent call last):
            ...
        ValueError: cpp: there is no autograd hook 'no_such_hook' in C++, ...
    """

    def __init__(self, name: str, /, **options: Any) -> None:
        if not isinstance(name, str):
            raise TypeError(f"cpp: name must be a str, got {_C.type_name(name)}")
        self.native = _C.CppAutogradHook(name, options)

    @property
    def kind(self) -> str:
        """Return ``tensor``, ``prehook``, ``posthook`` or ``post_accumulate``."""
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


# ---- autograd hooks for compiled autograd --------------------------------------------------------
#
# The compiler traces these functions with their checks; for eager code
# csrc/runtime/autograd/autograd_hook_run.cpp has the same. The checked properties are known when
# the hook is traced, and guarded.


def traced(fn: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """A function that calls a hook of a kind and checks its result."""
    name = f"hook '{hook_name(fn)}'"

    def tensor_hook(grad: Tensor) -> Tensor:
        result = fn(grad)
        return grad if result is None else _checked(result, grad, name)

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


def _checked(value: Any, was: Tensor | None, name: str) -> Any:
    if value is None or value is was:
        return value
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


# ---- registers hooks with the autograd engine ----------------------------------------------------
#
# ``torch_commhook.autograd`` puts one object on a tensor or node. The object holds all hooks of a
# kind in a list, which is copied when it changes. Code that runs the hooks takes a snapshot by
# copying one pointer. For Python hooks it takes the GIL once, wraps values once, and checks results
# in C++. Compiled autograd gets a Python function for each hook with the same checks, because
# PyTorch checks nothing there.


class RemovableHandle:
    """A handle that removes a hook; at the end of a ``with`` block it does so automatically.

    It keeps neither the hook nor its tensor or node alive.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with autograd.register_hook(x, lambda grad: 10 * grad) as handle:
        ...     x.sum().backward()
        >>> x.grad, handle.is_registered
        (tensor([10., 10.]), False)
    """

    def __init__(self, registered: _C.Registered | RegisteredHook | TracedHook) -> None:
        self._registered = registered

    @property
    def is_registered(self) -> bool:
        """Whether the hook has not been removed."""
        return self._registered.is_registered()

    def remove(self) -> None:
        """Remove the hook. Does nothing if it was removed before."""
        self._registered.remove()

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def register_hook(tensor: Tensor, fn: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Call ``fn(grad)`` when the gradient of a tensor has been computed.

    As ``torch.Tensor.register_hook``. Inside ``torch.compile`` this is a graph break. With
    ``fullgraph=True`` it calls that method, whose limits then hold: the compiler traces the hook,
    and in PyTorch 2.13 the handle of an intermediate value cannot remove it.

    Args:
        tensor: any tensor that requires grad.
        fn: the hook. It returns None, or a new gradient of the same dtype, layout, device and size.

    Returns:
        A handle that removes the hook.

    Raises:
        TypeError: ``tensor`` is not a tensor, or ``fn`` not callable. In ``backward()``: ``fn``
            returned no tensor.
        RuntimeError: the tensor does not require grad, or is a parameter that ``fully_shard()`` or
            ``replicate()`` has made: they write its gradient themselves, and
            :func:`register_post_accumulate_grad_hook` takes it. In ``backward()``: the new gradient
            has another dtype, layout, device or size.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> handle = autograd.register_hook(x, lambda grad: 3 * grad)
        >>> x.sum().backward()
        >>> x.grad
        tensor([3., 3.])
    """
    _check_tensor("register_hook", tensor)
    return _register(tensor, "tensor", fn)


def register_prehook(node: Node, fn: Callable[[tuple[Tensor | None, ...]], Any]) -> RemovableHandle:
    """Call ``fn(grad_outputs)`` before a node of the graph runs.

    As ``torch.autograd.graph.Node.register_prehook``.

    Args:
        node: a node, such as the ``grad_fn`` of a tensor.
        fn: the hook. It returns None, or a tuple of new gradients; a None in it drops that
            gradient.

    Returns:
        A handle that removes the hook.

    Raises:
        TypeError: ``node`` is no ``torch.autograd.graph.Node``, or ``fn`` not callable. In
            ``backward()``: ``fn`` returned no tuple, or one with other values than tensors.
        RuntimeError: the node accumulates the gradient of a sharded parameter, as for
            :func:`register_hook`. In ``backward()``: ``fn`` returned another number of values, a
            value in place of a None, or a gradient of another dtype, layout, device or size.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = x * 2
        >>> handle = autograd.register_prehook(y.grad_fn, lambda outputs: (3 * outputs[0],))
        >>> y.sum().backward()
        >>> x.grad
        tensor([6., 6.])
    """
    return _register(node, "prehook", fn)


def register_posthook(
    node: Node, fn: Callable[[tuple[Tensor | None, ...], tuple[Tensor | None, ...]], Any]
) -> RemovableHandle:
    """Call ``fn(grad_inputs, grad_outputs)`` when a node of the graph has run.

    As ``torch.autograd.graph.Node.register_hook``.

    Args:
        node: as for :func:`register_prehook`.
        fn: the hook. It returns None, or a tuple that replaces ``grad_inputs``.

    Returns:
        A handle that removes the hook.

    Raises:
        TypeError, RuntimeError: as :func:`register_prehook`, also in ``backward()``.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = x * 2
        >>> def scaled(grad_inputs, grad_outputs):
        ...     return 5 * grad_inputs[0], grad_inputs[1]
        >>> handle = autograd.register_posthook(y.grad_fn, scaled)
        >>> y.sum().backward()
        >>> x.grad
        tensor([10., 10.])
    """
    return _register(node, "posthook", fn)


def register_post_accumulate_grad_hook(
    tensor: Tensor, fn: Callable[[Tensor], None]
) -> RemovableHandle:
    """Call ``fn(tensor)`` when a leaf's gradient has been accumulated in ``.grad``.

    As ``torch.Tensor.register_post_accumulate_grad_hook``. PyTorch's own hooks of this kind run
    afterwards. Inside ``torch.compile`` it is as :func:`register_hook`.

    On a parameter that ``fully_shard()`` or ``replicate()`` has made, the gradient is this rank's
    shard of the mean. Register after sharding: ``fully_shard()`` replaces the parameter, and drops
    the hooks of the old one.

    Args:
        tensor: a leaf that requires grad.
        fn: the hook. It must return None.

    Returns:
        A handle that removes the hook.

    Raises:
        TypeError: ``tensor`` is not a tensor, or ``fn`` not callable.
        RuntimeError: the tensor is not a leaf that requires grad. In ``backward()``: ``fn``
            returned a value.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> handle = autograd.register_post_accumulate_grad_hook(x, lambda leaf: print(leaf.grad))
        >>> x.sum().backward()
        tensor([1., 1.])
    """
    _check_tensor("register_post_accumulate_grad_hook", tensor)
    if not tensor.requires_grad or tensor.grad_fn is not None:
        raise RuntimeError(
            "register_post_accumulate_grad_hook: tensor must be a leaf that requires grad"
        )
    return _register(tensor, "post_accumulate", fn)


def call_hooks(
    hooks: Iterable[Callable[..., Any]], args: Sequence[Any], kind: str = "tensor"
) -> tuple[Tensor | None, ...]:
    """Call hooks one after another, as the engine does, and return the resulting values.

    Args:
        hooks: the hooks, or a dict of them.
        args: the values; for ``posthook`` two sequences of values, of which hooks change the first.
        kind: ``tensor``, ``prehook``, ``posthook`` or ``post_accumulate``.

    Raises:
        TypeError: a hook is not callable, or a value is not a tensor.
        ValueError: ``kind`` is another text, or the number of values is wrong.
        TypeError, RuntimeError: as in ``backward()``; see the functions that register.

    Example:
        >>> autograd.call_hooks([lambda grad: 2 * grad, lambda grad: grad + 1], [torch.ones(2)])
        (tensor([3., 3.]),)
    """
    if isinstance(hooks, dict):
        hooks = hooks.values()
    if kind not in _KINDS:
        raise ValueError(
            "call_hooks: kind must be 'tensor', 'prehook', 'posthook' or 'post_accumulate', got "
            f"{kind!r}"
        )
    made = [_hook(fn, kind, with_traced=False) for fn in _list("hooks", hooks)]
    if kind != "posthook":
        values, others = _values("args", args), []
    else:
        both = _list("args", args)
        if len(both) != 2:
            raise ValueError(
                "call_hooks: args must be two sequences of tensors for kind 'posthook', got "
                f"{len(both)}"
            )
        values, others = _values("args[0]", both[0]), _values("args[1]", both[1])
    if kind not in ("prehook", "posthook") and len(values) != 1:
        raise ValueError(
            f"call_hooks: args must hold one tensor for kind {kind!r}, got {len(values)}"
        )
    return tuple(_C.call_autograd_hooks(made, kind, values, others))


_KINDS = ("tensor", "prehook", "posthook", "post_accumulate")
_FUNCTIONS = {
    "tensor": "register_hook",
    "prehook": "register_prehook",
    "posthook": "register_posthook",
}


def _list(name: str, values: Any) -> list[Any]:
    # A tensor is also a sequence of its rows, which is never intended.
    if isinstance(values, (Tensor, str)) or not isinstance(values, Iterable):
        raise TypeError(f"call_hooks: {name} must be a sequence, got {_C.type_name(values)}")
    return list(values)


def _values(name: str, values: Any) -> list[Tensor | None]:
    listed: list[Tensor | None] = _list(name, values)
    for i, value in enumerate(listed):
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(
                f"call_hooks: {name}[{i}] must be a tensor or None, got {_C.type_name(value)}"
            )
    return listed


def _check_tensor(op: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: tensor must be a torch.Tensor, got {_C.type_name(tensor)}")


def _register(on: Tensor | Node, kind: str, fn: Callable[..., Any]) -> RemovableHandle:
    if (
        torch.compiler.is_dynamo_compiling()
        and needs_one_graph()
        and isinstance(on, Tensor)
        and not hasattr(on, "device_mesh")
    ):
        return RemovableHandle(TracedHook(on, kind, fn))
    return _register_with_engine(on, kind, fn)


@torch._disable_dynamo  # Dynamo cannot trace C++
def _register_with_engine(on: Tensor | Node, kind: str, fn: Callable[..., Any]) -> RemovableHandle:
    hook = _hook(fn, kind, with_traced=True)
    leaf = on if isinstance(on, Tensor) else getattr(on, "variable", None)
    if leaf is not None and is_fully_sharded(leaf):
        if kind != "post_accumulate":
            raise RuntimeError(
                f"{_FUNCTIONS[kind]}: fully_shard() or replicate() writes the gradient of this "
                "parameter itself, so the hook would never be called; use "
                "autograd.register_post_accumulate_grad_hook, which is called with this rank's "
                "shard of the mean in .grad"
            )
        return RemovableHandle(RegisteredHook(leaf, traced(fn, kind)))
    return RemovableHandle(_C.register_autograd_hook(on, kind, hook))


def _hook(fn: Any, kind: str, *, with_traced: bool) -> _C.AutogradHook:
    operator = fn
    if isinstance(operator, OpOverloadPacket):
        overloads = operator.overloads()
        if "default" not in overloads:
            raise TypeError(f"a hook must be one operator, got {fn} with overloads {overloads}")
        operator = operator.default
    if isinstance(operator, OpOverload):
        schema = operator._schema
        return _C.AutogradHook(
            operator, schema.name, schema.overload_name, None, traced(operator, kind), kind
        )
    if not callable(fn):
        raise TypeError(f"a hook must be callable, got {_C.type_name(fn)}")
    native = fn.native if isinstance(fn, cpp) else None
    return _C.AutogradHook(fn, None, "", native, traced(fn, kind) if with_traced else None, kind)
