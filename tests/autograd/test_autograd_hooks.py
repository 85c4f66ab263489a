"""Hooks of the autograd engine: PyTorch's semantics, with the same checks in every mode."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_apis import (
    Ours,
    PyTorchs,
    accumulator,
    backward,
    both,
    in_modes,
    leaf,
    note,
)
from autograd_errors import NODE_ERRORS, TENSOR_ERRORS, checked
from torch import Tensor

from torch_commhook import autograd

# ---- values --------------------------------------------------------------------------------------


@both
@in_modes
def test_each_hook_gets_what_the_one_before_has_made(api: Any, mode: str) -> None:
    x = leaf()
    y = x * 1
    for tensor in (x, y):
        api.hook(tensor, lambda grad: grad + 1)
        api.hook(tensor, lambda grad: None)
        api.hook(tensor, lambda grad: grad)
        api.hook(tensor, lambda grad: grad * 10)
    backward(y.sum(), mode)
    assert x.grad.tolist() == [210, 210]  # ((1 + 1) * 10 + 1) * 10


@both
@in_modes
def test_node_hooks_change_values(api: Any, mode: str) -> None:
    a, b = leaf(), leaf()
    out = a * b
    node = out.grad_fn
    api.prehook(node, lambda grads: (grads[0] * 2,))
    api.posthook(node, lambda inputs, outputs: (inputs[0] + 1, None))  # drops the second
    backward(out.sum(), mode)
    assert a.grad.tolist() == [3, 5]  # 2 * b + 1
    assert b.grad is None


@both
@in_modes
def test_order_on_one_tensor(api: Any, mode: str) -> None:
    events: list[str] = []
    x = leaf()
    y = x * 1
    node = accumulator(x)
    api.post_accumulate(x, note(events, "leaf: accumulated"))
    api.posthook(node, note(events, "leaf: post"))
    api.prehook(node, note(events, "leaf: pre"))
    api.hook(x, note(events, "leaf: tensor"))
    api.posthook(y.grad_fn, note(events, "node: post"))
    api.prehook(y.grad_fn, note(events, "node: pre"))
    api.hook(y, note(events, "node: tensor"))
    backward(y.sum(), mode)
    assert events == [
        "node: tensor", "node: pre", "node: post",
        "leaf: tensor", "leaf: pre", "leaf: accumulated", "leaf: post",
    ]  # fmt: skip


@both
@in_modes
def test_post_accumulate_hooks_see_the_gradient(api: Any, mode: str) -> None:
    x = leaf()
    seen = []

    def hook(parameter: Tensor) -> None:
        seen.append(parameter is x or mode == "compiled")
        parameter.grad.mul_(3)

    api.post_accumulate(x, hook)
    backward((x * 2).sum(), mode)
    assert x.grad.tolist() == [6, 6]
    assert all(seen)


# ---- errors --------------------------------------------------------------------------------------


@checked
@pytest.mark.parametrize("error", TENSOR_ERRORS)
def test_errors_of_tensor_hooks(api: Any, mode: str, error: str) -> None:
    hook, kind, message = TENSOR_ERRORS[error]
    for leaves in (True, False):
        x = leaf()
        y = x * 1
        api.hook(x if leaves else y, hook)
        with pytest.raises(kind, match=message):
            backward(y.sum(), mode)


@checked
@pytest.mark.parametrize("stage", ["prehook", "posthook"])
@pytest.mark.parametrize("error", NODE_ERRORS)
def test_errors_of_node_hooks(api: Any, mode: str, stage: str, error: str) -> None:
    hook, kind, message = NODE_ERRORS[error]
    y = leaf().exp()
    getattr(api, stage)(y.grad_fn, hook)
    with pytest.raises(kind, match=message):
        backward(y.sum(), mode)


@checked
def test_a_none_is_not_replaced(api: Any, mode: str) -> None:
    a, b = leaf(), leaf().detach()
    y = a * b
    api.posthook(y.grad_fn, lambda inputs, outputs: (None, torch.ones(2)))
    with pytest.raises(RuntimeError, match="can't replace a None gradient with a non-None value"):
        backward(y.sum(), mode)


@both
@in_modes
def test_post_accumulate_hooks_return_none(api: Any, mode: str) -> None:
    x = leaf()
    api.post_accumulate(x, lambda parameter: parameter * 1)
    with pytest.raises(RuntimeError, match="post accumulate grad hooks should return None"):
        backward(x.sum(), mode)


class Halving:
    """Changes the second of two values."""

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        return (None, values[0][1].half())

    def method(self, *values: Any) -> tuple[Any, ...]:
        return self(*values)


NAMED: dict[str, Callable[..., Any]] = {
    "partial of test_autograd_hooks.Halving object": functools.partial(Halving()),
    "test_autograd_hooks.Halving object": Halving(),
    "test_autograd_hooks.Halving.method": Halving().method,
}


@in_modes
@pytest.mark.parametrize("name", NAMED)
def test_errors_name_hook_and_value(mode: str, name: str) -> None:
    y = leaf() * leaf()
    autograd.register_posthook(y.grad_fn, NAMED[name])
    changed = (
        f"hook '{name}', value 1 of 2 has changed the type of value "
        "(was torch.float32, torch.strided, cpu, got torch.float16, torch.strided, cpu)"
    )
    with pytest.raises(RuntimeError, match=re.escape(changed)):
        backward(y.sum(), mode)


def test_errors_of_registration() -> None:
    x = leaf()
    with pytest.raises(TypeError, match=r"tensor must be a torch.Tensor, got int"):
        autograd.register_hook(3, print)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="tensor must require grad"):
        autograd.register_hook(torch.ones(1), print)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="must be a leaf that requires grad"):
        autograd.register_post_accumulate_grad_hook(x * 1, print)
    with pytest.raises(TypeError, match=r"node must be a torch.autograd.graph.Node, got .*Tensor"):
        autograd.register_prehook(x, print)
    with pytest.raises(TypeError, match="a hook must be callable, got int"):
        autograd.register_hook(x, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must take and return \(Tensor\) -> Tensor or \(\), got"):
        autograd.register_hook(x, torch.ops.aten.add.Tensor)
    with pytest.raises(TypeError, match=r"must be one operator, got aten::add, which the disp"):
        autograd.register_hook(x, torch.ops.aten.add)
    with pytest.raises(ValueError, match="kind must be 'tensor', 'prehook', 'posthook' or 'post_"):
        autograd.call_hooks([print], (x,), "forward")


# ---- beside PyTorch's hooks, and on other nodes --------------------------------------------------


def _add_ten(parameter: Tensor) -> None:
    parameter.grad.add_(10)


def test_pytorchs_hooks_on_the_same_tensor() -> None:
    """In either order, on a leaf, an inner tensor and a parameter whose gradient is there."""
    for ours_first in (True, False):
        x = leaf()
        y = x * 1
        for api in (Ours, PyTorchs) if ours_first else (PyTorchs, Ours):
            api.hook(x, lambda grad: grad + 1)
            api.hook(y, lambda grad: grad * 2)
            api.post_accumulate(x, _add_ten)
        y.sum().backward()
        assert x.grad.tolist() == [26, 26]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


@both
@in_modes
def test_nodes_of_functions_in_python(api: Any, mode: str) -> None:
    x = leaf()
    y = Square.apply(x)
    api.prehook(y.grad_fn, lambda grads: (grads[0] * 3,))
    api.posthook(y.grad_fn, lambda inputs, outputs: (inputs[0] + 1,))
    backward(y.sum(), mode)
    assert x.grad.tolist() == [7, 13]


@both
@in_modes
def test_outputs_of_one_node_have_hooks_of_their_own(api: Any, mode: str) -> None:
    x = leaf(1.0, 2.0, 3.0, 4.0)
    first, second = x.split(2)
    api.hook(second, lambda grad: grad * 5)
    api.hook(first, lambda grad: grad * 3)
    backward(first.sum() + second.sum(), mode)
    assert x.grad.tolist() == [3, 3, 5, 5]


# ---- operators, and calls without the engine -----------------------------------------------------


@in_modes
def test_operators(mode: str) -> None:
    x = leaf()
    y = x * 1
    autograd.register_hook(y, torch.ops.aten.neg.default)
    autograd.register_hook(y, lambda grad: grad * 2)
    autograd.register_hook(y, torch.ops.aten.exp)
    backward(y.sum(), mode)
    assert torch.allclose(x.grad, torch.full((2,), -2.0).exp())


def test_call_hooks() -> None:
    x = torch.ones(2)
    assert autograd.call_hooks([lambda g: g + 1, torch.neg], (x,))[0].tolist() == [-2, -2]
    values = autograd.call_hooks(
        {1: lambda inputs, outputs: (outputs[0], None)}, ((x, None), (x * 3,)), "posthook"
    )
    assert values[0].tolist() == [3, 3]
    assert values[1] is None
    assert autograd.call_hooks([], (x, None), "prehook")[0] is x
    with pytest.raises(ValueError, match="args must hold one tensor for kind 'tensor', got 2"):
        autograd.call_hooks([], (x, x))


@in_modes
@pytest.mark.parametrize("kind", ["prehook", "posthook"])
def test_hooks_of_a_node_run_in_order_of_registration(kind: str, mode: str) -> None:
    """Whoever's they are; PyTorch finds ours by the class that they are derived from."""
    calls: list[str] = []

    def noting(name: str) -> Any:
        def hook(*values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            calls.append(name)
            return (values[0][0] * 2, *values[0][1:])

        return hook

    x = leaf(1.0)
    y = x * 3
    theirs, ours = getattr(PyTorchs, kind), getattr(Ours, kind)
    handles = [
        register(y.grad_fn, noting(name))
        for name, register in (("a", ours), ("b", theirs), ("c", ours), ("d", theirs))
    ]
    backward(y.sum(), mode)
    assert calls == ["a", "b", "c", "d"] and x.grad.item() == 48
    for handle in handles:
        calls.clear()
        handle.remove()
    z = x * 3
    theirs(z.grad_fn, noting("b"))
    ours(z.grad_fn, noting("a"))
    theirs(z.grad_fn, noting("c"))
    x.grad = None
    backward(z.sum(), mode)
    assert sorted(calls) == ["a", "b", "c"] and x.grad.item() == 24
