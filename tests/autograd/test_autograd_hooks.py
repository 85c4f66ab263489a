"""Hooks of the autograd engine: errors, beside PyTorch's hooks, and calls without the engine."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_apis import (
    NODE_ERRORS,
    TENSOR_ERRORS,
    Ours,
    PyTorchs,
    backward,
    checked,
    in_modes,
    leaf,
)
from on_ranks import on_ranks
from sharded_models import batch, local, loss_of, sharded
from torch import Tensor

from torch_commhook import attach, autograd

# ---- errors --------------------------------------------------------------------------------------


@checked
@pytest.mark.parametrize("error", TENSOR_ERRORS)
def test_errors_of_tensor_hooks(api: Any, mode: str, error: str) -> None:
    hook, kind, message = TENSOR_ERRORS[error]
    named = f"hook '.*<lambda>' {message}" if kind is RuntimeError else message
    for leaves in (True, False):
        x = leaf()
        y = x * 1
        api.hook(x if leaves else y, hook)
        with pytest.raises(kind, match=named):
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


def halving(*values: Any) -> tuple[Any, ...]:
    """Changes the second of two values."""
    return (None, values[0][1].half())


class Halving:
    def __call__(self, *values: Any) -> tuple[Any, ...]:
        return halving(*values)

    def method(self, *values: Any) -> tuple[Any, ...]:
        return self(*values)


NAMED: dict[str, Callable[..., Any]] = {
    "test_autograd_hooks.halving": halving,
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


# ---- beside PyTorch's hooks ----------------------------------------------------------------------


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


# ---- parameters that fully_shard() or replicate() writes -----------------------------------------

SHARDED = pytest.mark.parametrize("place", ["fsdp-2", "hsdp-2", "replicate-2"])


@SHARDED
@pytest.mark.parametrize("hook", [None, "allreduce()", "error_feedback(blockwise(bits=8))"])
@on_ranks(2)
def test_a_hook_of_a_sharded_parameter(rank: int, place: str, hook: str | None) -> None:
    """It is called once, with this rank's shard of the mean, and may change it."""
    gradients = []
    for registers in (False, True):
        model = sharded(place)
        if hook is not None:
            attach(model, hook)
        calls: list[Tensor] = []

        def triple(parameter: Tensor, calls: list[Tensor] = calls) -> None:
            calls.append(parameter)
            parameter.grad.mul_(3)

        for parameter in model.parameters() if registers else ():
            autograd.register_post_accumulate_grad_hook(parameter, triple)
        loss_of(model(batch(rank, 0))).backward()
        assert {id(each) for each in calls} == {id(p) for p in model.parameters() if registers}
        gradients.append([local(p.grad) for p in model.parameters()])
    for plain, tripled in zip(*gradients, strict=True):
        assert torch.equal(plain * 3, tripled)


@SHARDED
@on_ranks(2)
def test_hooks_that_autograd_would_never_call_are_refused(rank: int, place: str) -> None:
    weight = next(sharded(place).parameters())
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    for name, on in (("hook", weight), ("prehook", node), ("posthook", node)):
        message = f"register_{name}: .* use autograd.register_post_accumulate_grad_hook"
        with pytest.raises(RuntimeError, match=message):
            getattr(autograd, f"register_{name}")(on, lambda *values: None)


@on_ranks(2)
def test_hooks_of_a_sharded_parameter_are_called_as_others(rank: int) -> None:
    """In order, before PyTorch's own; a hook may remove itself; a result is an error."""
    model = sharded("fsdp-2")
    weight = next(model.parameters())
    calls: list[str] = []

    def once(parameter: Tensor) -> None:
        calls.append("once")
        first.remove()

    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("PyTorch's"))
    first = autograd.register_post_accumulate_grad_hook(weight, once)
    second = autograd.register_post_accumulate_grad_hook(weight, lambda _: calls.append("second"))
    for _ in range(2):
        loss_of(model(batch(rank, 0))).backward()
    assert calls == ["once", "second", "PyTorch's", "second", "PyTorch's"]
    assert not first.is_registered and second.is_registered
    autograd.register_post_accumulate_grad_hook(weight, lambda parameter: parameter.grad)
    with pytest.raises(RuntimeError, match="should return None"):
        loss_of(model(batch(rank, 0))).backward()


# ---- inside one graph ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("on", ["leaf", "intermediate"])
def test_a_hook_registered_in_one_graph(on: str, backend: str) -> None:
    """As by the method of tensors; one on an input can be removed afterwards."""
    torch._dynamo.reset()

    def loss(x: Tensor, register: Any) -> tuple[Tensor, Any]:
        y = x * x
        handle = register(x if on == "leaf" else y, lambda grad: 3.0 * grad)
        return (y * x).sum(), handle if on == "leaf" else None

    wanted = torch.arange(1.0, 5.0, requires_grad=True)
    loss(wanted, Tensor.register_hook)[0].backward()
    got = torch.arange(1.0, 5.0, requires_grad=True)
    compiled = torch.compile(
        lambda x: loss(x, autograd.register_hook), backend=backend, fullgraph=True
    )
    value, handle = compiled(got)
    value.backward()
    assert got.grad.equal(wanted.grad)  # type: ignore[union-attr, arg-type]
    if handle is not None:
        assert handle.is_registered
        handle.remove()
        got.grad = None
        (got**3).sum().backward()
        assert got.grad.allclose(3 * got.detach() ** 2)  # type: ignore[attr-defined]
