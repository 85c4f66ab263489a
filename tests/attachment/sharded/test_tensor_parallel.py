"""Hooks on models that are sharded over one axis of a mesh, with tensor parallelism on the other."""

from __future__ import annotations

import pytest
import torch
from rank_pool import RankPool
from sharded_models import Mesh, Scenario, differences, far, reference, take_steps, two_axes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torch_commhook import hooks


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))


def _shard(model: nn.Module, mesh: Mesh) -> None:
    parallelize_module(model, mesh.mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh.mesh["dp"])


SCENARIO = Scenario(net=_net, shard=_shard)


def _bits(rank: int) -> list[str]:
    mesh = Mesh("fsdp", two_axes(("dp", "tp")))
    got = take_steps(SCENARIO, mesh, rank // 2, hooks.allreduce())
    return differences(got, take_steps(SCENARIO, mesh, rank // 2, None))


@pytest.mark.parametrize("place", ["fsdp-4"])
def test_allreduce_has_the_bits_of_fully_shard(ranks: RankPool, place: str) -> None:
    assert ranks.run(_bits) == [[]] * 4


def _near(rank: int, with_feedback: bool) -> list[str]:
    mesh = Mesh("fsdp", two_axes(("dp", "tp")))
    expected, largest = reference(SCENARIO, 2)
    if not with_feedback:
        done = take_steps(
            SCENARIO, mesh, rank // 2, hooks.blockwise(), rate=0, count=1, gather=True
        )
        return far(done.whole[0], expected, 0.51 / 127 * largest, "blockwise")
    hook = hooks.error_feedback(hooks.blockwise(bits=4))
    done = take_steps(
        SCENARIO, mesh, rank // 2, hook, rate=0, count=6, gather=True, same_batches=True
    )
    sums = [sum(steps) for steps in zip(*done.whole, strict=True)]
    return far(sums, [6 * each for each in expected], 0.6 / 7 * largest, "the sum")


@pytest.mark.parametrize("with_feedback", [False, True], ids=["blockwise", "error_feedback"])
@pytest.mark.parametrize("place", ["fsdp-4"])
def test_hooks_are_near_the_mean(ranks: RankPool, place: str, with_feedback: bool) -> None:
    assert ranks.run(_near, with_feedback) == [[]] * 4
