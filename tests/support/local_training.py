"""Training with a hook that trains ranks apart: models on each execution path, and steps."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
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


def resumable(hook: Any, road: str, dtype: torch.dtype) -> Any:
    """A model on an execution path, its hook's handle, and an optimizer with a state.

    All such models have the same buckets, so that training can continue from another's state.
    """
    model: nn.Module = net(dtype)
    if road == "ddp":
        model = DDP(model, bucket_cap_mb=BUCKET_CAP_MB)
        for _ in range(2):  # so that DDP orders its buckets
            backward(model, 0, 0)
        handle = attach(model, hook)
    else:
        handle = attach(model, hook, bucket_cap_mb=BUCKET_CAP_MB)
    return model, handle, torch.optim.AdamW(model.parameters(), lr=0.01)


def saved(model: nn.Module, optimizer: torch.optim.Optimizer, hook_state: Any) -> io.BytesIO:
    """A checkpoint for this rank, with rank 0's model. All ranks must save."""
    whole = [model.state_dict()]
    dist.broadcast_object_list(whole, src=0)
    stream = io.BytesIO()
    torch.save((whole[0], optimizer.state_dict(), hook_state), stream)
    return stream


def load(
    stream: io.BytesIO, model: nn.Module, handle: HookHandle, optimizer: torch.optim.Optimizer
) -> None:
    """Load a checkpoint of :func:`saved`."""
    stream.seek(0)
    whole_model, own_optimizer, own_hook = torch.load(stream, weights_only=True)
    model.load_state_dict(whole_model)
    optimizer.load_state_dict(own_optimizer)
    handle.load_state_dict(own_hook)


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


def steps_done(handle: HookHandle) -> int:
    """The steps since the last exchange of all ranks."""
    assert handle._attached.local_steps is not None
    return handle._attached.local_steps.done
