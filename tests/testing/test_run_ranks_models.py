"""Models that train inside of run_ranks, with the bits of Gloo, and among many ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layered_net import BUCKET_CAP_MB, Net, batch, gradients_of, train
from on_ranks import on_ranks
from rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from trained_models import KINDS, trained

from torch_commhook import attach, hooks
from torch_commhook.hooks.base import Hook
from torch_commhook.testing import DeadlockError, run_ranks, scheduler


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _lists(rank: int, kind: str) -> list[Any]:
    return [tensor.tolist() for tensor in trained(rank, kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_as_on_gloo(two_ranks: RankPool, kind: str) -> None:
    expected = two_ranks.run(_lists, kind)
    for seed in range(3):
        assert run_ranks(_lists, 2, kind, seed=seed) == expected


@on_ranks(3)
def test_on_three_ranks(rank: int) -> None:
    local, model = _net(), DDP(_net())
    model(batch(rank, 0)).square().sum().backward()
    for each in range(3):  # what all ranks do, here
        (local(batch(each, 0)).square().sum() / 3).backward()
    for got, expected in zip(gradients_of(model), gradients_of(local), strict=True):
        torch.testing.assert_close(got, expected)


def _ddp(rank: int, backend: str | None) -> list[Any]:
    model: nn.Module = DDP(_net())
    return train(model if backend is None else torch.compile(model, backend=backend), rank)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_ddp(backend: str) -> None:
    eager, compiled = run_ranks(_ddp, 2, None), run_ranks(_ddp, 2, backend)
    for one, other in zip(eager[0], compiled[1], strict=True):
        torch.testing.assert_close(one, other)


def test_a_rank_that_runs_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP waits for its Futures in C++."""
    monkeypatch.setattr(scheduler, "_LOST_LOOKS", 10)

    def run(rank: int) -> None:
        model = DDP(_net(), bucket_cap_mb=BUCKET_CAP_MB)
        loss = model(batch(rank, 0)).square().sum()
        if rank == 0:
            loss.backward()
        else:
            dist.recv(torch.ones(1), 0)

    with pytest.raises(DeadlockError, match="rank 1 waits for recv on group '0'"):
        run_ranks(run, 2)


def test_a_hook_that_fails_on_one_rank() -> None:
    def fail(state: object, bucket: Any) -> Tensor:
        if dist.get_rank() == 1:
            raise KeyError("in the hook")
        dist.all_reduce(bucket.buffer(), group=bucket.process_group())
        return bucket.buffer()

    def run(rank: int) -> None:
        model = _net()
        attach(model, fail, bucket_cap_mb=BUCKET_CAP_MB)
        model(batch(rank, 0)).square().sum().backward()

    with pytest.raises(KeyError, match="in the hook"):
        run_ranks(run, 3)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["DDP", "module", "DDP's own"])
def test_hooks_in_cpp(rank: int, kind: str) -> None:
    """They take tensors from Futures, and not the Python objects that a group puts there."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    if kind == "DDP's own":
        net: Any = DDP(model)
        fp16 = dist.BuiltinCommHookType.FP16_COMPRESS
        dist._register_builtin_comm_hook(net.reducer, fp16)
    else:
        net = DDP(model) if kind == "DDP" else model
        attach(net, hooks.cpp("allreduce"))
    net(torch.full((3,), 1.0 + rank)).sum().backward()
    assert model.weight.grad.flatten().tolist() == [1.5] * 6


# ---- many ranks ----------------------------------------------------------------------------------


LEARNING_RATE = 0.125
STEPS = 2

#: Makers of hooks, with the largest error of an element of the parameters after both steps.
HOOKS: dict[str, tuple[Callable[[], Hook], float]] = {
    "allreduce": (hooks.allreduce, 1e-6),
    "4 bits": (lambda: hooks.blockwise(bits=4), 0.04),
}


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def _batch(rank: int) -> Tensor:
    return torch.linspace(-1, 1, 16).view(2, 8) * (rank % 7)


def _parameters(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _train(rank: int, make: Callable[[], Hook]) -> Tensor:
    model = _model()
    handle = attach(model, make())
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(_batch(rank)).square().mean().backward()
        optimizer.step()
    handle.remove()
    return _parameters(model)


def _train_alone(ranks: int) -> Tensor:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = [model(_batch(rank)).square().mean() for rank in range(ranks)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return _parameters(model)


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("ranks", [128, pytest.param(1024, marks=pytest.mark.long)])
def test_attach_and_train(ranks: int, name: str) -> None:
    make, tolerance = HOOKS[name]
    first, *others = run_ranks(_train, ranks, make, timeout=600)
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, _train_alone(ranks), rtol=0, atol=tolerance)
    assert not torch.allclose(first, _parameters(_model()), rtol=0, atol=2 * tolerance)
