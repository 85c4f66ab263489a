"""What ``hooks.local_sgd`` computes: each rank's own steps, and an exchange after every H."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from local_training import (
    MEAN,
    ROADS,
    all_same,
    attached,
    farthest,
    net,
    parameters_of,
    same,
    train,
)
from rank_pool import RankPool
from torch import Tensor, nn

from torch_commhook import attach, hooks
from torch_commhook.hooks import local_sgd, outer_sgd
from torch_commhook.testing import run_ranks

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")


def _trained(rank: int, road: str, hook: Any, steps: int) -> list[Tensor]:
    model, handle = attached(hook, road)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), rank, steps)
    handle.remove()
    return parameters_of(model)


@pytest.mark.parametrize("road", ROADS)
def test_with_h_1_it_is_data_parallel_sgd(two_ranks: RankPool, road: str) -> None:
    got = two_ranks.run(_trained, road, local_sgd(1, outer=MEAN), 5)
    wanted = two_ranks.run(_trained, road, hooks.allreduce(), 5)
    assert all_same(got)
    start = parameters_of(net())
    assert farthest(got[0], wanted[0]) < 2e-7 < 1e-3 < farthest(start, wanted[0])


def _reference(H: int, outer: outer_sgd, steps: int, ranks: int = 2) -> list[Tensor]:  # noqa: N803
    """Plain PyTorch, all ranks in one process."""
    anchor = net()
    outer_optimizer = torch.optim.SGD(
        anchor.parameters(),
        lr=outer.lr,
        momentum=outer.momentum,
        nesterov=outer.nesterov and outer.momentum > 0,
    )
    models = [copy.deepcopy(anchor) for _ in range(ranks)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.5) for m in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train(model, optimizer, rank, range(step, step + 1))
        if (step + 1) % H == 0:
            every = zip(*(model.parameters() for model in models), strict=True)
            for parameter, own in zip(anchor.parameters(), every, strict=True):
                parameter.grad = parameter.detach() - torch.stack(list(own)).mean(0)
            outer_optimizer.step()
            for model in models:
                model.load_state_dict(anchor.state_dict())
    return parameters_of(models[0])


def _with_inner_momentum(rank: int, hook: Any, steps: int, road: str) -> list[Tensor]:
    model, handle = attached(hook, road)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    train(model, optimizer, rank, steps)
    handle.remove()
    return parameters_of(model)


@pytest.mark.parametrize(
    "outer",
    [outer_sgd(), outer_sgd(0.5, 0.8, nesterov=False), outer_sgd(0.9, 0.0)],
    ids=["nesterov", "momentum", "plain"],
)
def test_it_moves_as_plain_pytorch_does(two_ranks: RankPool, outer: outer_sgd) -> None:
    got = two_ranks.run(_with_inner_momentum, local_sgd(3, outer=outer), 9, "module")
    assert all_same(got)
    wanted = _reference(3, outer, 9)
    assert farthest(got[0], wanted) < 1e-6
    assert farthest(wanted, _reference(3, MEAN, 9)) > 1e-4


def _between_exchanges(rank: int, road: str) -> list[Any]:
    model, handle = attached(local_sgd(2), road)
    alone = net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, alone)]
    found = []
    for step in range(3):
        for each, optimizer in zip((model, alone), optimizers, strict=True):
            train(each, optimizer, rank, range(step, step + 1))
        gradients = [[p.grad.clone() for p in m.parameters()] for m in (model, alone)]
        found.append((same(*gradients), same(parameters_of(model), parameters_of(alone))))
    handle.remove()
    return found


@pytest.mark.parametrize("road", ROADS)
def test_gradients_and_steps_in_between_are_the_ranks_own(two_ranks: RankPool, road: str) -> None:
    for found in two_ranks.run(_between_exchanges, road):
        assert found[:2] == [(True, True), (True, False)]
        assert found[2] == (False, False)


def _regression(rank: int, hook: Any) -> list[float]:
    """Losses on all ranks' data, which differ, after so many steps on this rank's own."""
    generator = torch.Generator().manual_seed(1)
    every = torch.randn(4, 64, 20, generator=generator) + torch.arange(4.0).view(4, 1, 1) / 4
    truth = torch.randn(20, generator=generator)
    targets = every @ truth + 0.1 * torch.randn(4, 64, generator=generator)
    model = nn.Linear(20, 1, bias=False)
    nn.init.zeros_(model.weight)
    handle = attach(model, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(64):
        optimizer.zero_grad()
        (model(every[rank])[:, 0] - targets[rank]).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            losses.append((model(every)[..., 0] - targets).square().mean().item())
    handle.remove()
    return losses


def test_it_converges_on_four_ranks() -> None:
    runs = {
        name: run_ranks(_regression, 4, hook)
        for name, hook in {
            "allreduce": hooks.allreduce(),
            "local": local_sgd(8, outer=MEAN),
            "momentum": local_sgd(8, outer=outer_sgd(0.7, 0.5)),
            "int4": local_sgd(
                8, outer=MEAN, hook=hooks.error_feedback(hooks.blockwise(bits=4, block_size=32))
            ),
        }.items()
    }
    first, optimum = runs["allreduce"][0][0], runs["allreduce"][0][-1]
    assert first > 100 * optimum
    for name, losses in runs.items():
        ends = [of_rank[-1] for of_rank in losses]
        assert max(ends) == min(ends), name
        assert ends[0] < 1.5 * optimum, name


def test_an_error_that_is_fed_back_is_that_of_the_distances(two_ranks: RankPool) -> None:
    """Coarse messages lose much of each round, and little of all rounds together."""

    def ends(hook: Any) -> list[Tensor]:
        return two_ranks.run(_trained, "module", local_sgd(2, outer=MEAN, hook=hook), 24)[0]

    exact = ends(hooks.allreduce())
    without = farthest(ends(hooks.blockwise(bits=4, block_size=256)), exact)
    fed_back = farthest(ends(hooks.error_feedback(hooks.blockwise(bits=4, block_size=256))), exact)
    assert 0 < fed_back < 0.7 * without
