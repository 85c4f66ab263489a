"""Compiles backward as one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import compiled_autograd


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
        with compiled_autograd._enable(self):
            loss.backward(*arguments, **options)
