"""Backward in a hook, of a hook and of checkpoints, as PyTorch's own tests of autograd ask for it.

``autograd_suite.json`` tells which of PyTorch's tests is expressed by which of these.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from autograd_apis import both, leaf, note
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

# ---- backward in a hook --------------------------------------------------------------------------


def penalty(grad: Tensor) -> Tensor:
    """Twice the gradient, added up by a backward of its own."""
    with torch.enable_grad():
        given = grad.detach().requires_grad_()
        (2 * given + 5).sum().backward()
    return given.grad + grad


@both
@pytest.mark.parametrize("on", ["leaf", "inner tensor"])
def test_backward_in_a_hook_that_takes_itself_off(api: Any, on: str) -> None:
    x = leaf()
    y = x * x
    handle: list[Any] = []

    def hook(grad: Tensor) -> Tensor:
        handle.pop().remove()
        return penalty(grad)

    handle.append(api.hook(x if on == "leaf" else y, hook))
    y.sum().backward(retain_graph=True)
    expected = 2 * x + 2 if on == "leaf" else 6 * x
    assert torch.equal(x.grad, expected)
    x.grad = None
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x)


@both
def test_backward_in_a_hook_on_the_leaf_that_it_is_on(api: Any) -> None:
    """The inner backward runs the hook too, and accumulates first."""
    depth: list[str] = []
    x = leaf(3.0)

    def hook(grad: Tensor) -> Tensor:
        if depth:
            depth.append("inner")
            return grad
        depth.append("outer")
        with torch.enable_grad():
            (x * 10).sum().backward()
        return grad * 100

    api.hook(x, hook)
    (x * 2).sum().backward()
    assert depth == ["outer", "inner"]
    assert x.grad.item() == 210


@both
@pytest.mark.parametrize("kind", ["prehook", "posthook", "post_accumulate"])
def test_backward_of_another_graph_in_other_kinds(api: Any, kind: str) -> None:
    other = leaf(1.0)

    def hook(*values: object) -> None:
        with torch.enable_grad():
            (other * 3).sum().backward()

    x = leaf()
    y = x * 2
    getattr(api, kind)(x if kind == "post_accumulate" else y.grad_fn, hook)
    y.sum().backward()
    assert other.grad.item() == 3
    assert x.grad.tolist() == [2, 2]


# ---- double backward -----------------------------------------------------------------------------


@both
def test_what_hooks_compute_is_differentiated(api: Any) -> None:
    x = leaf()
    y = x**3
    api.hook(y, lambda grad: grad * x)
    api.prehook(y.grad_fn, lambda grads: (grads[0] * 2,))
    api.posthook(y.grad_fn, lambda inputs, outputs: (inputs[0] + x,))
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.allclose(grad, 6 * x**3 + x)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.allclose(second, 18 * x**2 + 1)


@both
def test_hooks_run_for_the_graph_that_they_are_on(api: Any) -> None:
    calls: list[str] = []
    x = leaf()
    y = x**3
    api.hook(y, note(calls, "y"))
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert calls == ["y"]
    api.hook(grad, note(calls, "grad"))
    torch.autograd.grad(grad.sum(), x)
    assert calls == ["y", "grad"]


@both
def test_batched_gradients(api: Any) -> None:
    shapes: list[torch.Size] = []
    x = leaf()
    y = x.clone()

    def hook(grad: Tensor) -> Tensor:
        shapes.append(grad.shape)
        return grad * 2

    api.hook(y, hook)
    api.prehook(y.grad_fn, lambda grads: (grads[0] + 1,))
    given = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    (grads,) = torch.autograd.grad(y, x, given, is_grads_batched=True)
    assert torch.equal(grads, given * 2 + 1)
    assert shapes == [torch.Size([2])]


# ---- checkpoints ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_parameter_used_in_a_checkpoint_and_outside(api: Any, reentrant: bool) -> None:
    calls: list[str] = []
    weight = leaf()
    api.hook(weight, note(calls, "weight"))
    inner = weight * leaf()
    out = checkpoint(lambda x: weight * x, inner, use_reentrant=reentrant)
    out.sum().backward()
    # A reentrant checkpoint runs a backward of its own.
    assert calls == ["weight"] * (2 if reentrant else 1)


@both
@pytest.mark.parametrize("early_stop", [True, False])
def test_hooks_on_what_a_checkpoint_computed_first(api: Any, early_stop: bool) -> None:
    calls: list[str] = []
    with set_checkpoint_early_stop(early_stop):
        out = checkpoint(lambda x: x.sin().cos().sin(), leaf(1.0), use_reentrant=False)
    inner = out.grad_fn.next_functions[0][0]
    api.posthook(inner, note(calls, "post"))
    api.prehook(inner, note(calls, "pre"))
    out.backward()
    assert calls == ["pre", "post"]


@both
@pytest.mark.parametrize("early_stop", [True, False])
def test_backward_through_a_checkpoint_in_a_hook_on_it(api: Any, early_stop: bool) -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        inner = x.sin().cos()
        return inner, inner.sin()

    x = leaf(1.0)
    with set_checkpoint_early_stop(early_stop):
        inner, out = checkpoint(forward, x, use_reentrant=False)
    api.posthook(out.grad_fn, lambda inputs, outputs: inner.backward(retain_graph=True))
    out.backward(retain_graph=True)
    plain = leaf(1.0)
    inner, out = forward(plain)
    (inner + out).backward()
    assert torch.allclose(x.grad, plain.grad)
