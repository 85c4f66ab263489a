"""Hooks that keep gradients, or are registered in what is compiled, as PyTorch's own tests do it.

``autograd_suite.json`` tells which of PyTorch's tests is expressed by which of these.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from autograd_apis import Ours, PyTorchs, WholeGraph, backward, both, both_in_modes, in_modes, leaf
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import trace_wrapped
from torch._dynamo.exc import Unsupported
from torch.autograd import Function
from torch_releases import closures_fail

pytestmark = pytest.mark.usefixtures("fresh_compiler")


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
