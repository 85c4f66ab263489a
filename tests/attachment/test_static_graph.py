"""The first backward of a DDP with a static graph, when it is left by an exception."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import PeerError, attach, hooks
from torch_commhook.testing import run_ranks

LOST = (
    "an exception ended the first backward.. of this DistributedDataParallel with static_graph=True"
)


class OwnError(Exception):
    """Raised by a hook of autograd."""


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


def _all_same(values: torch.Tensor) -> bool:
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    return all(torch.equal(values, other) for other in every)


def _fails_everywhere(rank: int, number: int, way: str) -> None:
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
        assert _all_same(torch.cat([p.grad.flatten() for p in net.parameters()]))  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["attached", "attached later", "taken off"])
@pytest.mark.parametrize("number", [0, 3], ids=["last", "first"])
def test_all_ranks_fail(number: int, way: str) -> None:
    """DDP itself would let the ranks' gradients differ from here on."""
    run_ranks(_fails_everywhere, 2, number, way)


def _uses_no_parameter(rank: int) -> None:
    net = _net()
    model = _static(net)
    attach(model, hooks.allreduce())
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    with pytest.raises(RuntimeError, match="or that backward used no parameter"):
        _loss(rank, model)


def test_the_first_backward_is_of_the_input_alone() -> None:
    run_ranks(_uses_no_parameter, 2)


def _fails_on_one(rank: int) -> None:
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


def test_one_rank_fails(two_ranks: RankPool) -> None:
    """The other does not wait for it until the timeout."""
    two_ranks.run(_fails_on_one)
