"""Models that attach among many ranks, and train."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torch_commhook import attach, hooks
from torch_commhook.hooks.base import Hook
from torch_commhook.testing import run_ranks

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
