"""Hooks on tensors and post-accumulate-grad hooks, on PyTorch's registration and ours.

``autograd_suite.json`` tells which of PyTorch's tests is expressed by which of these.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from autograd_apis import (
    NoGradient,
    accumulator,
    backward,
    both,
    both_in_modes,
    function,
    leaf,
    note,
)
from torch import Tensor, nn


def double(grad: Tensor) -> Tensor:
    return grad * 2


# ---- registration --------------------------------------------------------------------------------


@both_in_modes
def test_hooks_come_and_go_between_backwards(api: Any, mode: str) -> None:
    calls: list[str] = []
    weight, x = leaf(), leaf(4.0, 4.0)
    z = weight * x + weight

    def run() -> list[str]:
        calls.clear()
        x.grad = None
        backward(z.sum(), mode, retain_graph=True)
        return list(calls)

    api.hook(weight, note(calls, "weight"))
    first = api.hook(z, note(calls, "first"))
    assert run() == ["first", "weight"]
    second = api.hook(z, note(calls, "second"))
    assert run() == ["first", "second", "weight"]
    first.remove()
    assert run() == ["second", "weight"]
    second.remove()
    api.hook(z, double)
    assert run() == ["weight"]
    assert torch.equal(x.grad, 2 * weight)
    api.hook(x, double)
    run()
    assert torch.equal(x.grad, 4 * weight)


@both_in_modes
def test_callables_without_a_name(api: Any, mode: str) -> None:
    class Tripling:
        def __call__(self, grad: Tensor) -> Tensor:
            return grad * 3

    x = leaf()
    y = x.clone()
    api.hook(y, Tripling())
    api.hook(y, functools.partial(torch.add, 1))
    backward(y.sum(), mode)
    assert x.grad.tolist() == [4, 4]


@both
def test_one_function_registered_twice(api: Any) -> None:
    calls: list[Tensor] = []
    x = leaf()
    handles = [api.hook(x, calls.append) for _ in range(2)]
    for left in (1, 0):
        handles.pop().remove()
        calls.clear()
        x.sum().backward()
        assert len(calls) == left


@both
def test_requires_grad_switched_off_and_on(api: Any) -> None:
    x = leaf()
    api.hook(x, double)
    x.requires_grad_(False).requires_grad_(True)
    x.sum().backward()
    assert x.grad.tolist() == [2, 2]


@both
def test_detached_in_place(api: Any) -> None:
    y = leaf() * 2
    api.hook(y, double)
    y.detach_().requires_grad_()
    y.sum().backward()
    assert y.grad.tolist() == [2, 2]


# ---- what a hook sees ----------------------------------------------------------------------------


@both_in_modes
def test_output_of_a_module(api: Any, mode: str) -> None:
    norm = torch.nn.BatchNorm1d(2, eps=1e-12, affine=False).eval()
    x = torch.ones(3, 2, requires_grad=True)
    z = norm(x)
    calls: list[str] = []
    api.hook(z, note(calls, "z"))
    api.hook(z, double)
    backward(z.sum(), mode)
    assert calls == ["z"]
    assert torch.allclose(x.grad, torch.full((3, 2), 2.0))


@both_in_modes
def test_a_function_that_drops_the_gradient_of_one_input(api: Any, mode: str) -> None:
    both_inputs = function(lambda ctx, x, y: (x, y), lambda ctx, x, y: (x, None))
    seen: list[Tensor] = []
    x = leaf()
    first, second = both_inputs.apply(x, torch.ones(2))
    api.hook(first, lambda grad: seen.append(grad * 1))
    api.hook(second, lambda grad: seen.append(grad * 2))
    backward((first + second).sum(), mode)
    assert sorted(grad.tolist() for grad in seen) == [[1, 1], [2, 2]]


@both_in_modes
def test_a_function_that_returns_its_input(api: Any, mode: str) -> None:
    """The hook on the output does not see what comes from uses of the input."""
    with_sum = function(lambda ctx, a, b: (a, a + b), lambda ctx, a, total: (a + total, total))
    seen: list[Tensor] = []
    x, y = leaf(), leaf()
    same, total = with_sum.apply(x, y)
    api.hook(same, lambda grad: seen.append(grad * 1))
    backward((same + total + x).sum(), mode)
    assert [grad.tolist() for grad in seen] == [[1, 1]]
    assert x.grad.tolist() == [3, 3]
    assert y.grad.tolist() == [1, 1]


@both
def test_order_follows_the_sequence_numbers(api: Any) -> None:
    order: list[str] = []

    def named(grad: Tensor, name: str) -> Tensor:
        order.append(name)
        return grad

    x = leaf()
    a, b = x + 1, x + 2
    c = a + b
    for number, (name, tensor) in enumerate({"c": c, "b": b, "a": a}.items()):
        tensor.grad_fn._set_sequence_nr(1000 + number)
        api.hook(tensor, functools.partial(named, name=name))
    c.sum().backward()
    assert order == ["c", "a", "b"]  # c feeds the others


# ---- retain_grad, and autograd.grad --------------------------------------------------------------


@both
@pytest.mark.parametrize("retained", [0, 1, 2])
def test_retain_grad_sees_all_hooks(api: Any, retained: int) -> None:
    """Whether it was asked for before, between or after them."""
    x = leaf()
    y = x.clone()
    for step in range(3):
        if step == retained:
            y.retain_grad()
        if step < 2:
            api.hook(y, double)
    y.clone().sum().backward()
    assert y.grad.tolist() == [4, 4]


@both
def test_retain_grad_does_not_see_hooks_of_the_node(api: Any) -> None:
    x = leaf(1.0)
    y = x.clone()
    y.retain_grad()
    events: list[str] = []
    node = accumulator(x)
    api.prehook(y.grad_fn, lambda grads: (grads[0] * 2,))
    api.hook(y, lambda grad: grad * 3)
    api.prehook(y.grad_fn, note(events, "y node"))
    api.hook(x, note(events, "x"))
    api.prehook(node, note(events, "x node"))
    y.sum().backward(retain_graph=True)
    assert events == ["y node", "x", "x node"]
    assert (y.grad.item(), x.grad.item()) == (3, 6)
    events.clear()
    torch.autograd.grad(y.sum(), x, retain_graph=True)  # accumulates nothing
    assert events == ["y node", "x"]
    events.clear()
    y.grad = None
    y.sum().backward(inputs=[y])
    assert events == ["y node"]
    assert y.grad.item() == 3


@both
def test_gradients_of_chunks_do_not_reach_what_was_cut(api: Any) -> None:
    calls: list[str] = []
    x = leaf(1.0, 2.0, 3.0, 4.0)
    api.hook(x, note(calls, "x"))
    first, second = x.chunk(2)
    grads = torch.autograd.grad(
        first + 2 * second, [first, second], torch.tensor([3.0, 5.0]), create_graph=True
    )
    assert [grad.tolist() for grad in grads] == [[3, 5], [6, 10]]
    assert calls == []
    assert x.grad is None
    first.sum().backward()
    assert calls == ["x"]


# ---- no gradient ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("inner", [False, True], ids=["leaf", "inner tensor"])
def test_told_that_there_is_no_gradient(api: Any, inner: bool) -> None:
    seen: list[Tensor | None] = []
    x = leaf()
    y = x.clone()
    api.hook(y if inner else x, seen.append)
    NoGradient.apply(y).sum().backward()
    assert seen == [None]
    assert x.grad is None


@both
def test_one_of_several_outputs(api: Any) -> None:
    """The hook gets None if only another output has a gradient."""
    seen: list[Tensor | None] = []
    x = leaf()
    outputs = x.unbind()
    api.hook(outputs[0], seen.append)
    outputs[0].backward(retain_graph=True)
    assert [grad.item() for grad in seen] == [1]
    assert x.grad.tolist() == [1, 0]
    outputs[1].backward()
    assert seen[1:] == [None]
    assert x.grad.tolist() == [1, 1]


@both
def test_no_gradient_is_not_replaced(api: Any) -> None:
    y = leaf().clone()
    api.hook(y, lambda grad: torch.ones(2))
    with pytest.raises(RuntimeError, match="can't replace a None gradient with a non-None value"):
        NoGradient.apply(y).sum().backward()


# ---- post-accumulate-grad hooks ------------------------------------------------------------------


def step(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad)


def forget(parameter: Tensor) -> None:
    parameter.grad = None


@both
def test_leaves_that_require_grad_only(api: Any) -> None:
    for tensor, message in ((leaf() * 2, "leaf"), (torch.ones(2), "require")):
        with pytest.raises(RuntimeError, match=message):
            api.post_accumulate(tensor, step)


@both_in_modes
def test_a_hook_that_returns_a_tensor(api: Any, mode: str) -> None:
    x = leaf()
    api.post_accumulate(x, lambda parameter: parameter.grad)
    with pytest.raises(RuntimeError, match="post accumulate grad hooks should return None"):
        backward(x.sum(), mode)


@both
def test_a_hook_that_returns_a_number(api: Any) -> None:
    """PyTorch says that it expected a tensor, which it does not."""
    x = leaf()
    api.post_accumulate(x, lambda parameter: 3)
    with pytest.raises((RuntimeError, TypeError), match=r"should return None|expected Variable"):
        x.sum().backward()


# ---- when they run -------------------------------------------------------------------------------


@both_in_modes
def test_between_the_accumulation_and_hooks_after_the_node(api: Any, mode: str) -> None:
    x = leaf()
    node = accumulator(x)

    def add(parameter: Tensor) -> None:
        parameter.grad.add_(3)

    def double(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        x.grad.mul_(2)

    api.posthook(node, double)
    api.post_accumulate(x, add)
    api.prehook(node, lambda grads: (grads[0] * 5,))
    api.hook(x, lambda grad: grad + 1)
    backward(x.sum(), mode)
    assert x.grad.tolist() == [26, 26]  # ((1 + 1) * 5 + 3) * 2


@both
def test_a_posthook_of_the_node_may_put_another_gradient(api: Any) -> None:
    x = leaf()
    node = accumulator(x)

    def replaces(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        x.grad = outputs[0] * 10

    api.posthook(node, replaces)
    api.post_accumulate(x, forget)
    api.hook(x, lambda grad: grad - 3)
    x.sum().backward()
    assert x.grad.tolist() == [-20, -20]


@both_in_modes
def test_they_see_the_sum_with_what_was_there(api: Any, mode: str) -> None:
    seen: list[Tensor] = []
    x = leaf()
    x.grad = torch.tensor([100.0, 200.0])
    api.post_accumulate(x, lambda parameter: seen.append(parameter.grad + 0))
    backward((x * 2 + x).sum(), mode)
    assert [grad.tolist() for grad in seen] == [[103, 203]]  # once


@both
def test_without_a_gradient(api: Any) -> None:
    seen: list[tuple[bool, Tensor | None]] = []
    x = leaf()
    api.post_accumulate(x, lambda parameter: seen.append((parameter is x, parameter.grad)))
    NoGradient.apply(x).sum().backward()
    assert seen == [(True, None)]


@both
@pytest.mark.filterwarnings("ignore:Using backward")
def test_grad_mode(api: Any) -> None:
    """On in all kinds where a graph of the backward is made, off where not."""
    modes: list[bool] = []

    def hook(*values: object) -> None:
        modes.append(torch.is_grad_enabled())

    x = leaf()
    y = x * x
    node = accumulator(x)
    for on in (y, x):
        api.hook(on, hook)
    for on in (y.grad_fn, node):
        api.prehook(on, hook)
        api.posthook(on, hook)
    api.post_accumulate(x, hook)
    for create_graph in (False, True):
        modes.clear()
        y.sum().backward(retain_graph=True, create_graph=create_graph)
        assert modes == [create_graph] * 7
    x.grad = None  # it holds the graph that holds x


@both
def test_sparse_gradients(api: Any) -> None:
    layouts: list[torch.layout] = []
    table = nn.Embedding(3, 2, sparse=True)

    def doubles(grad: Tensor) -> Tensor:
        layouts.append(grad.layout)
        return grad * 2

    api.hook(table.weight, doubles)
    api.post_accumulate(table.weight, lambda weight: layouts.append(weight.grad.layout))
    table(torch.tensor([1, 1])).sum().backward()
    assert layouts == [torch.sparse_coo] * 2
    assert table.weight.grad.to_dense().tolist() == [[0, 0], [4, 4], [0, 0]]


# ---- an optimizer in backward --------------------------------------------------------------------


@both
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_an_optimizer_for_each_parameter(api: Any, kind: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    own = {id(parameter): kind([parameter], lr=0.1) for parameter in model.parameters()}

    def hook(parameter: Tensor) -> None:
        own[id(parameter)].step()
        own[id(parameter)].zero_grad()

    handles = [api.post_accumulate(parameter, hook) for parameter in model.parameters()]
    optimizer = kind(plain.parameters(), lr=0.1)
    data = torch.rand(2, 3)

    def train() -> None:
        for _ in range(3):
            model(data).square().sum().backward()
            optimizer.zero_grad()
            plain(data).square().sum().backward()
            optimizer.step()

    train()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is None
    for handle in handles:
        handle.remove()
    before = copy.deepcopy(model)
    train()
    for now, was in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(now, was)
        assert now.grad is not None


@both_in_modes
def test_a_step_of_gradient_descent(api: Any, mode: str) -> None:
    x, y = leaf(), leaf(3.0, 4.0)
    for tensor in (x, y):
        api.post_accumulate(tensor, step)
        api.post_accumulate(tensor, forget)
    backward((x * 3 + y).sum(), mode)
    assert (x.tolist(), y.tolist()) == ([-2, -1], [2, 3])
    assert x.grad is None and y.grad is None
