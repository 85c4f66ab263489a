"""Hooks as PyTorch's own tests of compiled autograd ask for them, on its registration and ours.

``autograd_suite.json`` tells which of PyTorch's tests is expressed by which of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_apis import Ours, PyTorchs, WholeGraph, accumulator, backward, both, leaf
from torch import Tensor, nn
from torch._dynamo.utils import counters

pytestmark = pytest.mark.usefixtures("fresh_compiler")


# ---- one graph -----------------------------------------------------------------------------------


def doubled(grad: Tensor) -> Tensor:
    return grad * 2


def increased(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (grads[0] + 1,)


def mixed(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.sin(inputs[0]) + outputs[0],)


def scaled(parameter: Tensor) -> None:
    parameter.grad.mul_(3)


KINDS: dict[str, Callable[..., Any]] = {
    "hook": doubled,
    "prehook": increased,
    "posthook": mixed,
    "post_accumulate": scaled,
}


def _gradients(api: Any, kind: str, run: Callable[[Tensor], None]) -> list[Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)
    loss = nn.functional.relu(linear(torch.rand(1, 4))).sum()
    on_tensor = kind in ("hook", "post_accumulate")
    getattr(api, kind)(linear.weight if on_tensor else loss.grad_fn, KINDS[kind])
    run(loss)
    return [linear.weight.grad, linear.bias.grad]


@pytest.mark.parametrize("kind", KINDS)
@both
def test_captured_and_compiled_once(api: Any, kind: str) -> None:
    """For three models, each with a hook that is registered anew."""
    whole = WholeGraph()
    expected = _gradients(PyTorchs, kind, Tensor.backward)
    for _ in range(3):
        got = _gradients(api, kind, whole.backward)
        assert all(torch.allclose(a, b) for a, b in zip(got, expected, strict=True))
    assert (counters["compiled_autograd"]["captures"], whole.compiled) == (1, 1)


# ---- many hooks, against eager -------------------------------------------------------------------


class TwoLayers:
    """Two convolutions, their weights, and the nodes that accumulate the weights' gradients."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Conv2d(2, 2, 2, bias=False) for _ in range(2)))
        self.weights = [layer.weight for layer in self.layers]
        self.nodes = [accumulator(weight) for weight in self.weights]
        self.x = torch.rand(1, 2, 4, 4)

    def gradients(self, run: Callable[[Tensor], None]) -> list[Tensor]:
        run(self.layers(self.x).sum())
        return [weight.grad for weight in self.weights]


def _changes_gradient(weight: Tensor, change: Callable[[Tensor], object]) -> Callable[..., None]:
    def hook(inputs: object, outputs: object) -> None:
        change(weight.grad)

    return hook


def _puts_gradient(weight: Tensor, change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def hook(inputs: object, outputs: object) -> None:
        weight.grad = change(weight.grad)

    return hook


#: The hooks of a weight and of its node, by kind.
ON_WEIGHTS: dict[str, Callable[[Tensor], list[tuple[str, Callable[..., Any]]]]] = {
    "all_kinds": lambda weight: [
        ("hook", lambda grad: grad - 2),
        ("post_accumulate", scaled),
        ("prehook", lambda grads: (grads[0] / 5,)),
        ("posthook", _changes_gradient(weight, lambda grad: grad.add_(7))),
    ],
    "two_tensor_hooks": lambda _: [
        ("hook", lambda grad: grad - 2),
        ("hook", lambda grad: grad / 2),
    ],
    "two_prehooks": lambda _: [
        ("prehook", lambda grads: (grads[0] / 5,)),
        ("prehook", lambda grads: (grads[0] - 3,)),
    ],
    "two_posthooks": lambda weight: [
        ("posthook", _changes_gradient(weight, lambda grad: grad.mul_(4))),
        ("posthook", _changes_gradient(weight, lambda grad: grad.sub_(3))),
    ],
    "posthooks_that_put_gradients": lambda weight: [
        ("posthook", _puts_gradient(weight, lambda grad: grad / 4)),
    ],
}


def on_weights(name: str, api: Any, run: Callable[[Tensor], None]) -> list[Tensor]:
    model = TwoLayers()
    for weight, node in zip(model.weights, model.nodes, strict=True):
        for kind, hook in ON_WEIGHTS[name](weight):
            on_node = kind in ("prehook", "posthook")
            getattr(api, kind)(node if on_node else weight, hook)
    return model.gradients(run)


def posthooks_along_a_chain(api: Any, run: Callable[[Tensor], None]) -> list[Tensor]:
    x = leaf()
    y = torch.sigmoid(x)
    z = torch.tanh(y)
    api.posthook(z.grad_fn, lambda inputs, outputs: (outputs[0] * 2,))
    api.posthook(y.grad_fn, lambda inputs, outputs: (inputs[0] * 3,))
    run(z.sum())
    return [x.grad]


def posthook_beside_a_none(api: Any, run: Callable[[Tensor], None]) -> list[Tensor]:
    model = TwoLayers()
    out = model.layers[0](model.x)  # wants no gradient of x
    api.posthook(out.grad_fn, lambda inputs, outputs: (inputs[0], inputs[1] * 2, inputs[2]))
    run(out.sum())
    return [model.weights[0].grad]


SCENARIOS: dict[str, Callable[..., list[Tensor]]] = {
    **{name: functools.partial(on_weights, name) for name in ON_WEIGHTS},
    "posthooks_along_a_chain": posthooks_along_a_chain,
    "posthook_beside_a_none": posthook_beside_a_none,
}
WITH_TUPLES = ["all_kinds", "two_prehooks", "posthooks_along_a_chain", "posthook_beside_a_none"]


@pytest.mark.parametrize("scenario", WITH_TUPLES)
def test_as_in_eager_with_graph_breaks(scenario: str) -> None:
    expected = SCENARIOS[scenario](PyTorchs, Tensor.backward)
    got = SCENARIOS[scenario](Ours, functools.partial(backward, mode="compiled"))
    assert all(torch.allclose(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("scenario", SCENARIOS)
@both
def test_as_in_eager_in_one_graph(api: Any, scenario: str) -> None:
    expected = SCENARIOS[scenario](PyTorchs, Tensor.backward)
    got = SCENARIOS[scenario](api, WholeGraph().backward)
    assert all(torch.allclose(a, b) for a, b in zip(got, expected, strict=True))
