"""Training with a hook that keeps ranks apart, for its tests: models on each road, and steps."""

from __future__ import annotations

from typing import Any

import torch
from layered_net import BUCKET_CAP_MB, Net, batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach
from torch_commhook.hooks import outer_sgd

MEAN = outer_sgd(1.0, 0.0)
ROADS = ["module", "ddp", "python_reducer"]


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def attached(hook: Any, road: str = "module", model: nn.Module | None = None) -> Any:
    """A model on a road, and the handle of a hook on it."""
    model = net() if model is None else model
    if road == "module":
        return model, attach(model, hook, bucket_cap_mb=BUCKET_CAP_MB)
    reducer = "python_reducer" if road == "python_reducer" else "ddp_optimizer"
    with torch._dynamo.config.patch(optimize_ddp=reducer):
        model = DDP(model, bucket_cap_mb=BUCKET_CAP_MB)
    return model, attach(model, hook)


def backward(model: nn.Module, rank: int, step: int) -> None:
    first = next(model.parameters())
    model(batch(rank, step).to(first.dtype)).square().sum().backward()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range | int
) -> None:
    for step in range(steps) if isinstance(steps, int) else steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def farthest(a: list[Tensor], b: list[Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def all_same(results: list[list[Tensor]]) -> bool:
    return all(same(results[0], other) for other in results[1:])
