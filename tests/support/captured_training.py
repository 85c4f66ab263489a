"""Training in a CUDA graph: the hooks, the model, and its batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nested_values import different_paths
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks

CAPTURED: dict[str, Callable[[], Any]] = {
    "allreduce": hooks.allreduce,
    "cast": hooks.cast,
    "blockwise": lambda: hooks.error_feedback(hooks.blockwise(8)),
    "stochastic": lambda: hooks.error_feedback(hooks.blockwise(4, rounding="stochastic", seed=3)),
    "int2": lambda: hooks.error_feedback(hooks.blockwise(2)),
    "fp8": lambda: hooks.error_feedback(hooks.fp8()),
    "sign": lambda: hooks.error_feedback(hooks.sign()),
    "topk": lambda: hooks.error_feedback(hooks.topk(0.1), dtype=torch.bfloat16),
    "momentum": lambda: hooks.momentum(hooks.topk(0.1), 0.9, dtype=torch.bfloat16),
    "decay": lambda: hooks.error_feedback(hooks.blockwise(4), 0.75),
    "chunk_topk": lambda: hooks.error_feedback(hooks.chunk_topk(8, 64)),
    "randomk": lambda: hooks.randomk(0.2),
    "powersgd": lambda: hooks.error_feedback(hooks.powersgd(2)),
    "policy": lambda: hooks.policy([("dim <= 1", hooks.allreduce())], hooks.blockwise(8)),
    "after": lambda: hooks.after(2, hooks.error_feedback(hooks.blockwise(8))),
    "clip": lambda: hooks.clip(0.05, hooks.randomk(0.5)),
}


class Training:
    """Trains a model with a hook. Copies each batch into the same memory."""

    def __init__(self, road: str, hook: Any, device: str = "cpu", **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4)]
        self.model: nn.Module = nn.Sequential(*layers).to(device)
        if road == "ddp":
            self.model = DDP(self.model, bucket_cap_mb=0.002)
        else:
            options["bucket_cap_mb"] = 0.002
        self.handle = attach(self.model, hook, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.x = torch.zeros(8, 16, device=device)
        self.parameters = list(self.model.parameters())

    def give(self, number: int) -> None:
        self.x.copy_(torch.randn(8, 16, generator=torch.Generator().manual_seed(number)))

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def run(self, first: int, count: int, step: Callable[[], None]) -> None:
        for number in range(first, first + count):
            self.give(number)
            step()

    def found(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def assert_ends_as(self, other: Training) -> None:
        """Compares parameters, states and statistics; then removes both hooks."""
        assert all(map(torch.equal, self.found(), other.found()))
        assert different_paths(self.handle.state_dict(), other.handle.state_dict()) == []
        got, want = self.handle.stats(), other.handle.stats()
        assert (got.steps, got.bytes_sent) == (want.steps, want.bytes_sent)
        self.handle.remove()
        other.handle.remove()
