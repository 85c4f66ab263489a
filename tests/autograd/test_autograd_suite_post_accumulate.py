"""Post-accumulate-grad hooks as PyTorch's own tests ask for them, on its registration and ours.

``autograd_suite.json`` tells which of PyTorch's tests is expressed by which of these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_apis import NoGradient, accumulator, backward, both, both_in_modes, leaf
from torch import Tensor, nn


def step(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad)


def forget(parameter: Tensor) -> None:
    parameter.grad = None


# ---- registration --------------------------------------------------------------------------------


@both
def test_leaves_that_require_grad_only(api: Any) -> None:
    for tensor, message in (
        (leaf() * 2, "leaf"),
        (torch.ones(2), "require"),
    ):
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


def optimizers(parameters: list[Tensor], kind: str) -> Callable[[Tensor], None]:
    made = {
        id(parameter): torch.optim.Adam([parameter], lr=0.1)
        if kind == "adam"
        else torch.optim.SGD([parameter], lr=0.1)
        for parameter in parameters
    }

    def hook(parameter: Tensor) -> None:
        made[id(parameter)].step()
        made[id(parameter)].zero_grad()

    return hook


@both
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_an_optimizer_for_each_parameter(api: Any, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    hook = optimizers(list(model.parameters()), kind)
    handles = [api.post_accumulate(parameter, hook) for parameter in model.parameters()]
    optimizer = (torch.optim.Adam if kind == "adam" else torch.optim.SGD)(
        plain.parameters(), lr=0.1
    )
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
