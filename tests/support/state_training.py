"""A model with a hook: its steps, its saved and loaded state, and its error memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from mode_cases import Mode
from remembering_hooks import batch, hook_of, model_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import HookHandle, attach
from torch_commhook.hooks.expressions import parse_hook

Context = Callable[[], AbstractContextManager[Any]]


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(48, 48) for _ in range(4)]
    return nn.Sequential(
        nn.Conv2d(3, 48, 3).to(memory_format=torch.channels_last), nn.Flatten(2), Mean(), *layers
    )


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(2)


def attached(model: nn.Module, hook: str, on_ddp: bool) -> tuple[nn.Module, HookHandle]:
    if not on_ddp:
        return model, attach(model, parse_hook(hook), bucket_cap_mb=0.02)
    ddp = DDP(model, bucket_cap_mb=0.02)
    ddp(torch.zeros(1, 3, 6, 6)).sum().backward()  # so that DDP orders its buckets
    ddp.zero_grad()
    return ddp, attach(ddp, parse_hook(hook))


def train(model: nn.Module, rank: int, steps: range) -> None:
    for step in steps:
        model.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(4, 3, 6, 6, generator=generator)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad


#: How a model runs: its mode, and the options of DDP, or of ``attach`` without it.
ROADS: dict[str, tuple[Mode, dict[str, Any]]] = {
    "module": (Mode("module", "eager"), {}),
    "views": (Mode("module", "eager"), {"gradient_as_bucket_view": True}),
    "ddp": (Mode("ddp", "eager"), {}),
    "ddp-views": (Mode("ddp", "eager"), {"gradient_as_bucket_view": True}),
    "ddp-unused": (Mode("ddp", "eager"), {"find_unused_parameters": True}),
    "compiled": (Mode("module", "context", backend="aot_eager"), {}),
}


class Run:
    """A model of :mod:`remembering_hooks`, its training, and the gradients of all steps."""

    def __init__(self, rank: int, hook: str, road: str) -> None:
        torch._dynamo.reset()
        self.rank, self.hook = rank, hook
        self.mode, options = ROADS[road]
        self.module = self.model = model_of()
        self.options: dict[str, Any] = {"bucket_cap_mb": 0.005, **options}
        if self.mode.model == "ddp":
            self.model: nn.Module = DDP(self.module, **self.options)
            self.options = {}
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05)
        self.found: list[torch.Tensor] = []
        self.number = 0

    def attach(self, hook: str | None = None) -> HookHandle:
        return attach(self.model, hook_of(hook or self.hook), **self.options)

    def train(self, steps: int, around_optimizer: Context = nullcontext) -> None:
        with self.mode.step_function(self.model) as step:
            for _ in range(steps):
                self.optimizer.zero_grad()
                step(batch(self.rank, self.number))
                self.number += 1
                self.found += [parameter.grad.clone() for parameter in self.module.parameters()]
                with around_optimizer():
                    self.optimizer.step()

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.module.parameters()]


def mean_error(state: dict[str, Any], rank: int) -> torch.Tensor:
    """The error that all ranks together have not sent yet, by parameter and element."""
    own = state[f"rank{rank}"]
    names = sorted(own["error"])
    total = torch.cat(
        [
            own["error"][name].permute(*range(own["error"][name].dim())).reshape(-1) / 2
            + in_rows(own["shard_error"].get(name), own["error"][name])
            for name in names
        ]
    )
    dist.all_reduce(total)
    return total


def in_rows(flat: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if flat is None:
        return torch.zeros(like.numel())
    as_it_lies = torch.empty_like(like)
    order = sorted(range(like.dim()), key=lambda d: like.stride(d), reverse=True)
    as_it_lies.permute(order).view(-1).copy_(flat)
    return as_it_lies.reshape(-1)
