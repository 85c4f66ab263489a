"""The first backward of a DDP with a static graph, when it is left by an exception."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mode_cases import OwnError
from on_ranks import of_all_ranks, on_processes, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import PeerError, attach, hooks

LOST = (
    "an exception ended the first backward.. of this DistributedDataParallel with static_graph=True"
)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def _static(net: nn.Module, group: dist.ProcessGroup | None = None) -> DDP:
    return DDP(net, static_graph=True, bucket_cap_mb=0.0001, process_group=group)


def _loss(rank: int, model: nn.Module) -> torch.Tensor:
    return model(torch.full((2, 4), 1.0 + rank)).square().sum()


def _fail(rank: int, model: nn.Module, parameter: torch.Tensor) -> None:
    def fails(_: torch.Tensor) -> None:
        raise OwnError("here")

    handle = parameter.register_hook(fails)
    with pytest.raises(OwnError):
        _loss(rank, model).backward()
    handle.remove()


@pytest.mark.parametrize("way", ["attached", "attached later", "taken off"])
@pytest.mark.parametrize("number", [0, 3], ids=["last", "first"])
@on_ranks(2)
def test_all_ranks_fail(rank: int, number: int, way: str) -> None:
    """DDP itself would let the ranks' gradients differ from here on."""
    net = _net()
    model = _static(net)
    handle = None if way == "attached later" else attach(model, hooks.allreduce())
    _fail(rank, model, list(net.parameters())[number])
    handle = attach(model, hooks.allreduce()) if handle is None else handle
    if way == "taken off":
        handle.remove()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=LOST):
            _loss(rank, model)
    if way == "taken off":
        return
    with torch.no_grad():  # which leads to no step
        _loss(rank, model)
    handle.remove()
    anew = _static(net)
    attach(anew, hooks.allreduce())
    for _ in range(3):
        net.zero_grad()
        _loss(rank, anew).backward()
        own = torch.cat([p.grad.flatten() for p in net.parameters()])  # type: ignore[union-attr]
        assert torch.equal(*of_all_ranks(own))


@on_ranks(2)
def test_the_first_backward_is_of_the_input_alone(rank: int) -> None:
    net = _net()
    model = _static(net)
    attach(model, hooks.allreduce())
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    with pytest.raises(RuntimeError, match="or that backward used no parameter"):
        _loss(rank, model)


@on_processes
def test_one_rank_fails(rank: int) -> None:
    """The other does not wait for it until the timeout."""
    group = dist.new_group(timeout=timedelta(hours=1))  # far more than the test has
    net = _net()
    model = _static(net, group)
    attach(model, hooks.allreduce())
    if rank == 1:
        _fail(rank, model, next(net.parameters()))
        with pytest.raises(RuntimeError, match=LOST):
            _loss(rank, model)
    else:
        with pytest.raises(PeerError, match=f"on rank 1: RuntimeError: torch_commhook: {LOST}"):
            _loss(rank, model).backward()
    if rank == 1:  # DDP has begun this on rank 0, and destroying rank 0's group waits for it
        dist.all_reduce(torch.zeros(len(list(net.parameters())), dtype=torch.int32), group=group)
