"""Backward passes under a GradScaler with a changing scale."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from mode_cases import compiled_backward
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach

SCALES = (65536.0, 65536.0, 4096.0, 4096.0, 8192.0, 8192.0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())


def attached(road: str, hook: Any, **options: Any) -> tuple[nn.Module, Any]:
    if road == "ddp":
        model = DDP(net(), bucket_cap_mb=0.01)
        return model, attach(model, hook, **options)
    options |= {"gradient_as_bucket_view": road == "views", "bucket_cap_mb": 0.01}
    model = net()
    return model, attach(model, hook, **options)


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, 48, generator=torch.Generator().manual_seed(100 * number + rank))


def backward_of(road: str) -> AbstractContextManager[Any]:
    return compiled_backward(road == "compiled", fullgraph=True)


def gradients(model: nn.Module, scale: float) -> list[Tensor]:
    return [parameter.grad / scale for parameter in model.parameters()]


class Steps:
    def __init__(self, road: str, hook: Any, rank: int, *, scaled: bool, told: bool) -> None:
        self.road, self.rank, self.number = road, rank, 0
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALES[0], enabled=scaled)
        self.model, self.handle = attached(road, hook, scaler=self.scaler if told else None)

    def __call__(self, scale: float) -> list[Tensor]:
        """The next step's gradients, unscaled."""
        self.model.zero_grad(set_to_none=False)  # as with gradients as views
        loss = self.model(batch(self.rank, self.number)).square().sum()
        if self.number:
            self.scaler.update(scale)  # between the forward and the backward
        scaled = self.scaler.scale(loss)
        self.number += 1
        with backward_of(self.road):
            scaled.backward()
        return gradients(self.model, self.scaler.get_scale())


class Counted:
    def __init__(self, scale: Any) -> None:
        self.scale, self.asked = scale, 0

    def get_scale(self) -> Any:
        self.asked += 1
        return self.scale
