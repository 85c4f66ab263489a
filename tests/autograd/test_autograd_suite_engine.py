"""Hooks that ask the engine, are beside others of its hooks, or run in several threads.

``autograd_suite.json`` tells which of PyTorch's tests is expressed by which of these.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from autograd_apis import backward, both, both_in_modes, leaf, note
from gloo_threads import in_threads
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import register_multi_grad_hook

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
    with pytest.raises(RuntimeError, match="multithreading disabled"):
        (x.sin() * 1 + _with_hook_that_asks(api, x)).backward()


def _with_hook_that_asks(api: Any, x: Tensor) -> Tensor:
    y = x * 2
    api.hook(y, lambda grad: torch._C._current_graph_task_execution_order() and None)
    return y


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
    class Product(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad * ctx.saved_tensors[0], None

    order: list[str] = []
    x, weight = leaf() * 1, leaf()
    api.prehook(x.grad_fn, note(order, "x"))
    api.hook(weight, note(order, "weight"))
    Product.apply(x, weight).sum().backward()
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
