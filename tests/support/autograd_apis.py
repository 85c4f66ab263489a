"""Registers autograd hooks with PyTorch and with this library; backward in eager and compiled."""

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


class NoGradient(Function):
    """Copies a tensor; its backward returns None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def note(events: list[str], event: str) -> Callable[..., None]:
    """A hook of any kind that records its call."""
    return lambda *values: events.append(event)


MODES = ["eager", "compiled"]
both = pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
in_modes = pytest.mark.parametrize("mode", MODES)


def both_in_modes(test: Callable[..., None]) -> Callable[..., None]:
    """Tests both registrations, each in eager and compiled."""
    return both(in_modes(test))
