"""Training with a hook that trains ranks apart: models on each execution path, and steps."""

from __future__ import annotations

from typing import Any

import torch
from layered_net import BUCKET_CAP_MB, Net, batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach
from torch_commhook.attachment.handle import HookHandle
from torch_commhook.hooks import outer_sgd

MEAN = outer_sgd(1.0, 0.0)
ROADS = ["module", "ddp", "python_reducer"]


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def attached(hook: Any, road: str = "module", model: nn.Module | None = None) -> Any:
    """A model on an execution path, and the handle of its hook."""
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


class Training:
    """A rank's training in plain SGD, with a hook on an execution path.

    Attributes:
        done: the steps so far, which select the batches.
    """

    def __init__(
        self,
        rank: int,
        hook: Any,
        road: str = "module",
        model: nn.Module | None = None,
        *,
        lr: float = 0.01,
        momentum: float = 0.0,
    ) -> None:
        self.rank, self.done = rank, 0
        self.model, self.handle = attached(hook, road, model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum)

    def train(self, steps: int = 1) -> None:
        train(self.model, self.optimizer, self.rank, range(self.done, self.done + steps))
        self.done += steps

    @property
    def parameters(self) -> list[Tensor]:
        return parameters_of(self.model)

    @property
    def exchanges(self) -> int:
        return self.handle.stats().steps

    @property
    def anchors(self) -> dict[str, Tensor]:
        return self.handle.state_dict()["shared"]["local_sgd_anchor"]

    def end(self) -> None:
        """Brings the ranks together, and removes the hook."""
        self.handle.synchronize()
        self.handle.remove()


def steps_done(handle: HookHandle) -> int:
    """The steps since the last exchange of all ranks."""
    assert handle._attached.local_steps is not None
    return handle._attached.local_steps.done
