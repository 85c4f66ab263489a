"""Hooks that ask the engine, run beside its others, in several threads, or run a backward.

``autograd_suite.json`` tells which of PyTorch's tests is expressed by which of these.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from autograd_apis import backward, both, both_in_modes, function, leaf, note
from gloo_threads import in_threads
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

# ---- what the engine tells -----------------------------------------------------------------------


@both
def test_number_of_the_backward(api: Any) -> None:
    numbers: list[int] = []
    y = leaf(1.0).clone()
    api.hook(y, lambda grad: numbers.append(torch._C._current_graph_task_id()))
    for _ in range(3):
        y.backward(retain_graph=True)
    assert [number - numbers[0] for number in numbers] == [0, 1, 2]
    assert torch._C._current_graph_task_id() == -1


@both
def test_order_that_the_engine_foretells(api: Any) -> None:
    foretold: list[list[Any]] = []
    ran: list[Any] = []
    x = leaf(1.0)
    a, b = x.sin(), x.cos()
    out = a * b
    for tensor in (a, b, out):
        api.hook(tensor, lambda grad, node=tensor.grad_fn: ran.append(node))
    api.hook(out, lambda grad: foretold.append(torch._C._current_graph_task_execution_order()))
    with torch.autograd.set_multithreading_enabled(False):
        out.backward()
    assert foretold[0][:3] == ran == [out.grad_fn, b.grad_fn, a.grad_fn]
    again = x * 2
    api.hook(again, lambda grad: torch._C._current_graph_task_execution_order() and None)
    with pytest.raises(RuntimeError, match="multithreading disabled"):
        (x.sin() * 1 + again).backward()


@both
def test_which_nodes_will_run(api: Any) -> None:
    answers: list[tuple[bool, bool]] = []
    x, y = leaf(), leaf()
    a, b = x * 2, y * 2
    out = a * b

    def ask(grad: Tensor) -> None:
        will_run = torch._C._will_engine_execute_node
        answers.append((will_run(a.grad_fn), will_run(b.grad_fn)))

    api.hook(out, ask)
    out.sum().backward(inputs=[x], retain_graph=True)
    out.sum().backward()
    assert answers == [(True, False), (True, True)]


@both
def test_a_callback_queued_by_a_hook(api: Any) -> None:
    def fails() -> None:
        raise KeyError("callback")

    def queue(*values: object) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(fails)

    x = leaf()
    api.hook(x, queue)
    with pytest.raises(KeyError, match="callback"):
        (x * x).sum().backward()
    assert torch.equal(x.grad, 2 * x)  # it came last


@both
def test_order_where_a_function_gives_none(api: Any) -> None:
    product = function(lambda ctx, x, weight: x * weight, lambda ctx, grad: (grad, None))
    order: list[str] = []
    x, weight = leaf() * 1, leaf()
    api.prehook(x.grad_fn, note(order, "x"))
    api.hook(weight, note(order, "weight"))
    product.apply(x, weight).sum().backward()
    assert order == ["weight", "x"]


@both_in_modes
def test_hooks_come_before_saved_tensors_are_unpacked(api: Any, mode: str) -> None:
    unpacked: list[int] = []
    at_hook: list[int] = []

    def unpack(saved: Tensor) -> Tensor:
        unpacked.append(1)
        return saved

    x = leaf()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        loss = (x * torch.ones(2)).sum()
    api.hook(loss, lambda grad: at_hook.append(len(unpacked)))
    backward(loss, mode)
    assert (at_hook, unpacked) == ([0], [1])


# ---- beside others, and in threads ---------------------------------------------------------------


@both
def test_beside_hooks_on_several_gradients(api: Any) -> None:
    order: list[str] = []

    def block(x: Tensor, name: str) -> Tensor:
        inner = x * 3
        outputs = (inner.sin(), inner.cos())
        api.hook(inner, note(order, f"{name} inner"))
        register_multi_grad_hook(outputs, note(order, f"{name} any"), mode="any")
        register_multi_grad_hook(outputs, note(order, f"{name} all"))
        return outputs[0] + outputs[1]

    block(block(leaf(), "first"), "second").sum().backward()
    assert order == [
        "second any", "second all", "second inner", "first any", "first all", "first inner",
    ]  # fmt: skip


@both
def test_one_graph_in_several_threads(api: Any) -> None:
    calls: list[str] = []
    x = leaf()
    y = x * 2
    api.hook(y, note(calls, "tensor"))
    api.hook(y, lambda grad: grad * 5)
    api.prehook(y.grad_fn, note(calls, "pre"))
    api.posthook(y.grad_fn, note(calls, "post"))

    def run() -> None:
        for _ in range(10):
            (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            assert grad.tolist() == [10, 10]

    assert in_threads([run] * 4) == []
    assert Counter(calls) == {"tensor": 40, "pre": 40, "post": 40}


@both
def test_an_error_in_one_thread_alone(api: Any) -> None:
    barrier = threading.Barrier(3)

    def run(fails: bool) -> None:
        x = leaf()
        y = x * 2

        def hook(grad: Tensor) -> Tensor:
            barrier.wait(60)
            if fails:
                raise KeyError("boo")
            return grad * 3

        api.hook(y, hook)
        y.sum().backward()
        assert x.grad.tolist() == [6, 6]

    raised = in_threads([functools.partial(run, number == 1) for number in range(3)])
    assert [type(error) for error in raised] == [KeyError]


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
