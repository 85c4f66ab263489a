"""``HookHandle.synchronize`` brings the ranks of ``hooks.local_sgd`` together."""

from __future__ import annotations

import pytest
import torch
from local_training import (
    attached,
    parameters_of,
    same,
    train,
)
from rank_pool import RankPool
from torch import Tensor

from torch_commhook import hooks
from torch_commhook.hooks import local_sgd

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")


def _synchronized(rank: int, road: str, uneven: bool) -> list[list[Tensor]]:
    model, handle = attached(local_sgd(4), road)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle.register_prehook(lambda gradients: None)  # so that each backward has its stages
    train(model, optimizer, rank, 4 + (rank if uneven else 2))
    apart = parameters_of(model)
    handle.synchronize()
    together = parameters_of(model)
    handle.synchronize()
    again = parameters_of(model)
    assert handle.stats().steps == 2
    handle.remove()
    with pytest.raises(RuntimeError, match="no longer attached"):
        handle.synchronize()
    return [apart, together, again]


@pytest.mark.parametrize(("road", "uneven"), [("module", False), ("module", True), ("ddp", False)])
def test_synchronize(two_ranks: RankPool, road: str, uneven: bool) -> None:
    first, second = two_ranks.run(_synchronized, road, uneven)
    assert not same(first[0], second[0])
    assert same(first[1], second[1])
    assert same(first[1], first[2]) and same(first[1], second[2])


@pytest.mark.usefixtures("one_rank")
def test_synchronize_is_nothing_to_other_hooks() -> None:
    model, handle = attached(hooks.allreduce())
    before = parameters_of(model)
    handle.synchronize()
    assert same(before, parameters_of(model))
    handle.remove()
