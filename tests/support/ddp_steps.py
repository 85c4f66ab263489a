"""A small model with several buckets under DDP, and its step."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

BUCKET_CAP_MB = 0.001


def small_model(**options: object) -> DDP:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16) for _ in range(4)]
    return DDP(torch.nn.Sequential(*layers), bucket_cap_mb=BUCKET_CAP_MB, **options)


def backward_step(model: torch.nn.Module, rank: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
