"""Registering autograd hooks with PyTorch and with us, and backward in eager and compiled."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

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


def backward(loss: Tensor, mode: str) -> None:
    context: Any = nullcontext()
    if mode == "compiled":
        torch._dynamo.reset()
        context = torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))
    with context:
        loss.backward()


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), requires_grad=True)


MODES = ["eager", "compiled"]
both = pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
in_modes = pytest.mark.parametrize("mode", MODES)
