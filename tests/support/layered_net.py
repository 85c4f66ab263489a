"""A model with several buckets, its training and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BUCKET_CAP_MB = 0.004


class Net(nn.Module):
    """Several buckets of linear layers, with variants of the forward."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: Tensor, skip: tuple[int, ...] = (), way: str = "plain") -> Tensor:
        for number, layer in enumerate(self.layers):
            if number in skip:
                continue
            if way == "plain":
                x = layer(x).relu()
            else:
                x = checkpoint(layer, x, use_reentrant=way == "reentrant").relu()
        return x


def batch(rank: int, number: int = 0, width: int = 24) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * number + rank))


def train(model: nn.Module, rank: int, steps: int = 5) -> list[Tensor | None]:
    """The gradients after the last of some steps, each on the rank's own batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()
    return gradients_of(model)


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def differing(a: list[Tensor | None], b: list[Tensor | None]) -> list[int]:
    return [
        i
        for i, (x, y) in enumerate(zip(a, b, strict=True))
        if (x is None) != (y is None) or (x is not None and not torch.equal(x, y))
    ]
