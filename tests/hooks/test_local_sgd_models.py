"""Several models with ``hooks.local_sgd``, and models that go away."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from local_training import (
    MEAN,
    ROADS,
    attached,
    backward,
    net,
    parameters_of,
    same,
    train,
)
from rank_pool import RankPool
from torch.optim import optimizer as torch_optimizer

from torch_commhook import attach
from torch_commhook.hooks import local_sgd

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")


def _two_models(rank: int) -> Any:
    models = [net(), net()]
    handles = [
        attach(model, local_sgd(H, outer=MEAN)) for model, H in zip(models, (2, 3), strict=True)
    ]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        for model in models:
            backward(model, rank, step)
        optimizer.step()
    counts = [handle.stats().steps for handle in handles]
    handles[0].remove()
    own = parameters_of(models[0])
    for step in range(3):
        optimizer.zero_grad()
        for model in models:
            backward(model, rank, step)
        optimizer.step()
    found = counts, own, parameters_of(models[0]), parameters_of(models[1])
    handles[1].remove()
    return found


def test_two_models_and_one_optimizer(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_two_models)
    assert first[0] == second[0] == [3, 2]
    assert same(first[1], second[1])
    assert not same(first[2], second[2])  # on their own from there on
    assert same(first[3], second[3])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("road", "removed"),
    # A DDP gets back PyTorch's Python reducer, whose hooks keep it.
    [(road, removed) for road in ROADS for removed in (False, True) if road != ROADS[2]]
    + [(ROADS[2], False)],
)
def test_nothing_keeps_a_model(road: str, removed: bool) -> None:
    model, handle = attached(local_sgd(2), road)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, 0, 2)
    copied = copy.deepcopy(model) if road == "module" else None
    assert torch_optimizer._global_optimizer_post_hooks
    if removed:
        handle.remove()
        assert not torch_optimizer._global_optimizer_post_hooks
    inner = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert inner() is None
    assert not torch_optimizer._global_optimizer_post_hooks
    if copied is not None:
        train(copied, torch.optim.SGD(copied.parameters(), lr=0.01), 0, 1)
