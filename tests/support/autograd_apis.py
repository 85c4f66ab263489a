"""Registers autograd hooks with PyTorch and with this library; their errors; backward passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from torch_commhook import autograd


class PyTorchs:
    name = "pytorch"
    hook = staticmethod(lambda tensor, fn: tensor.register_hook(fn))
    prehook = staticmethod(lambda node, fn: node.register_prehook(fn))
    posthook = staticmethod(lambda node, fn: node.register_hook(fn))
    post_accumulate = staticmethod(lambda tensor, fn: tensor.register_post_accumulate_grad_hook(fn))


class Ours:
    name = "ours"
    hook = staticmethod(autograd.register_hook)
    prehook = staticmethod(autograd.register_prehook)
    posthook = staticmethod(autograd.register_posthook)
    post_accumulate = staticmethod(autograd.register_post_accumulate_grad_hook)


APIS: list[Any] = [PyTorchs, Ours]


def backward(loss: Tensor, mode: str, **options: Any) -> None:
    context: Any = nullcontext()
    if mode == "compiled":
        torch._dynamo.reset()
        context = torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))
    with context:
        loss.backward(**options)


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), requires_grad=True)


def accumulator(tensor: Tensor) -> Any:
    """The node that accumulates a leaf's gradient. The caller must keep it: the leaf does not."""
    return tensor.view_as(tensor).grad_fn.next_functions[0][0]


def function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """An autograd function of a forward and a backward, which get the context first."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Own", (Function,), methods)


#: Copies a tensor; its backward returns None.
NoGradient = function(lambda ctx, x: x.clone(), lambda ctx, grad: None)


def note(events: list[str], event: str) -> Callable[..., None]:
    """A hook of any kind that records its call."""
    return lambda *values: events.append(event)


MODES = ["eager", "compiled"]
both = pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
in_modes = pytest.mark.parametrize("mode", MODES)


def both_in_modes(test: Callable[..., None]) -> Callable[..., None]:
    """Tests both registrations, each in eager and compiled."""
    return both(in_modes(test))


NODE_ERRORS: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "list": (lambda *v: [v[0][0]], TypeError, "expected tuple, but hook returned 'list'"),
    "tensor": (lambda *v: v[0][0], TypeError, "expected tuple, but hook returned 'Tensor'"),
    "too many": (
        lambda *v: (*v[0], None), RuntimeError,
        r"has returned an incorrect number of values \(got 2, but expected 1\)",
    ),
    "a number": (lambda *v: (3,), TypeError, "expected Variable, but hook returned 'int'"),
    "dtype": (lambda *v: (v[0][0].double(),), RuntimeError, "has changed the type of value"),
    "size": (lambda *v: (v[0][0][:1],), RuntimeError, "has changed the size of value"),
    "broadcast": (lambda *v: (v[0][0][None],), RuntimeError, "has changed the size of value"),
    "layout": (lambda *v: (v[0][0].to_sparse(),), RuntimeError, "has changed the type of value"),
    "device": (lambda *v: (v[0][0].to("meta"),), RuntimeError, "has changed the type of value"),
}  # fmt: skip
TENSOR_ERRORS: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "a tuple": (lambda g: (g,), TypeError, "expected Variable, but hook returned 'tuple'"),
    "a number": (lambda g: 3, TypeError, "expected Variable, but hook returned 'int'"),
    "dtype": (lambda g: g.double(), RuntimeError, "has changed the type of value"),
    "size": (lambda g: g[:1], RuntimeError, "has changed the size of value"),
    "broadcast": (lambda g: g[None], RuntimeError, "has changed the size of value"),
    "layout": (lambda g: g.to_sparse(), RuntimeError, "has changed the type of value"),
    "device": (lambda g: g.to("meta"), RuntimeError, "has changed the type of value"),
}


def runs(api: Any, mode: str) -> bool:
    """Whether results are checked: PyTorch does not check them under compiled autograd."""
    return api is Ours or mode == "eager"


CHECKED = [(api, mode) for api in APIS for mode in MODES if runs(api, mode)]
checked = pytest.mark.parametrize(
    ("api", "mode"), CHECKED, ids=[f"{api.name}-{mode}" for api, mode in CHECKED]
)


class WholeGraph:
    """Compiles each backward as one graph without breaks, and counts the graphs."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: torch.fx.GraphModule) -> Callable[..., Any]:
        def backend(compiled: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            self.compiled += 1
            return compiled

        return torch.compile(graph, backend=backend, fullgraph=True, dynamic=True)

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        with torch._dynamo.compiled_autograd._enable(self):
            loss.backward(*arguments, **options)
