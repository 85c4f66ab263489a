"""Hooks as PyTorch's own tests of compiled autograd ask for them, on its registration and ours.

``autograd_suite.json`` tells which of PyTorch's tests is expressed by which of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autograd_apis import (
    Ours,
    PyTorchs,
    WholeGraph,
    accumulator,
    backward,
    both,
    both_in_modes,
    in_modes,
    leaf,
)
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import trace_wrapped
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.autograd import Function
from torch_releases import closures_fail

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
        ("posthook", _puts_gradient(weight, lambda grad: grad / 4))
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


# ---- gradients that hooks keep -------------------------------------------------------------------


class Fives(Function):
    """Whose gradient is a tensor that nobody else has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sparse: bool) -> Tensor:
        ctx.sparse = sparse
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        fives = torch.full_like(grad, 5)
        return fives.to_sparse() if ctx.sparse else fives, None


def _storage(grad: Tensor) -> int:
    return (grad._values() if grad.is_sparse else grad).data_ptr()


@both
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_a_gradient_that_a_hook_only_looked_at_is_not_copied(api: Any, sparse: bool) -> None:
    storages: list[int] = []
    x = leaf()
    api.hook(x, lambda grad: storages.append(_storage(grad)))
    Fives.apply(x, sparse).sum().backward()
    assert _storage(x.grad) == storages[0]


@both_in_modes
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_gradient_that_a_hook_keeps_is_copied(api: Any, mode: str, contiguous: bool) -> None:
    kept: list[Tensor] = []

    def keep(grad: Tensor) -> Tensor:
        kept.append(grad)
        return grad

    x = (torch.ones(2, 2) if contiguous else torch.ones(4, 4)[::2, ::2]).requires_grad_()
    api.hook(x, keep)
    backward(Fives.apply(x, False).sum(), mode)
    assert x.grad.is_contiguous()
    assert torch.equal(x.grad, torch.full((2, 2), 5.0))
    x.grad.zero_()
    assert torch.equal(kept[0], torch.full((2, 2), 5.0))


@both
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_sparse_gradient_is_copied_where_a_graph_is_made(api: Any) -> None:
    kept: list[Tensor] = []
    x = leaf()
    api.hook(x, kept.append)
    Fives.apply(x, True).sum().backward(create_graph=True)
    assert _storage(x.grad) != _storage(kept[0])
    assert x.grad.to_dense().tolist() == [5, 5]


# ---- registered in what is compiled --------------------------------------------------------------


@pytest.mark.parametrize(
    "api",
    [
        pytest.param(PyTorchs, marks=closures_fail, id=PyTorchs.name),
        pytest.param(Ours, id=Ours.name),
    ],
)
@in_modes
def test_registered_in_a_compiled_function(api: Any, mode: str) -> None:
    class Settings:
        factor = torch.tensor(88.0)

    def forward(x: Tensor, settings: Settings) -> Tensor:
        y = x.sin()
        more = y + 1
        api.hook(y, lambda grad: grad + settings.factor + more)
        return y.sin()

    expected, x = leaf(), leaf()
    forward(expected, Settings()).sum().backward()
    backward(torch.compile(forward, backend="eager")(x, Settings()).sum(), mode)
    assert torch.allclose(x.grad, expected.grad)


def squared(grad: Tensor) -> Tensor:
    return grad * grad


def squared_as_one_call(grad: Tensor) -> Tensor:
    return trace_wrapped(grad, fn=squared)


@both
@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager"])
def test_a_hook_that_is_traced_as_one_call(api: Any, backend: str) -> None:
    """Registered in the function that is compiled."""

    def forward(x: Tensor, y: Tensor) -> Tensor:
        api.hook(x, squared_as_one_call)
        return x * y

    x, y = leaf(), leaf(0.5, 1.0)
    function = forward if backend == "none" else torch.compile(forward, backend=backend)
    function(x, y).backward(torch.tensor([4.0, 3.0]))
    assert x.grad.tolist() == [4, 9]


@both
def test_a_hook_that_is_traced_as_one_call_and_counts(api: Any) -> None:
    class Counter:
        count = 0

    def counts(grad: Tensor, counter: Counter) -> Tensor:
        counter.count = counter.count + 1
        return squared(grad)

    counter = Counter()
    x, y = leaf(), leaf()
    traced = functools.partial(counts, counter=counter)
    api.hook(x, functools.partial(trace_wrapped, fn=traced))
    function = torch.compile(lambda x, y: x + y, backend="aot_eager", fullgraph=True)
    for count in (1, 2):
        x.grad = None
        WholeGraph().backward(function(x, y), torch.full((2,), 3.0))
        assert x.grad.tolist() == [9, 9]
        assert counter.count == count
    function(x, y).backward(torch.full((2,), 3.0))  # in eager
    assert counter.count == 3


@both
def test_a_hook_that_breaks_the_graph_is_an_error_where_one_is_asked_for(api: Any) -> None:
    def breaks(grad: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return grad * 2

    x = leaf()
    api.hook(x, breaks)
    with pytest.raises(Unsupported):
        WholeGraph().backward(x.sum())
    x.grad = None
    backward(x.sum(), "compiled")
    assert x.grad.tolist() == [2, 2]
