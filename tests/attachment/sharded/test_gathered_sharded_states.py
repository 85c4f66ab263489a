"""One state of all ranks of a mesh, which each of them loads."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from remembering_hooks import check_same
from sharded_models import Mesh, batch
from torch import Tensor, nn

from torch_commhook import HookHandle, attach, hooks

SHARDED = {
    "fsdp-3": (hooks.error_feedback(hooks.blockwise(bits=4)), {}),
    "hsdp-4": (
        hooks.error_feedback(hooks.topk(0.25)),
        {"shard_hook": hooks.error_feedback(hooks.sign())},
    ),
    "replicate-2": (hooks.local_sgd(2, hook=hooks.error_feedback(hooks.blockwise(bits=4))), {}),
}


def _sharded(rank: int, place: str) -> bool:
    hook, options = SHARDED[place]

    def made() -> tuple[nn.Module, HookHandle, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 5))
        mesh = Mesh.of(place)
        for layer in (model[0], model[2], model):
            mesh.apply(layer)
        handle = attach(model, hook, **options)
        return model, handle, torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[Tensor]:
        for number in numbers:
            optimizer.zero_grad()
            model(batch(rank, number)).square().sum().backward()
            optimizer.step()
        return [parameter.to_local().clone() for parameter in model.parameters()]

    model, handle, optimizer = made()
    steps(model, optimizer, range(3))
    weights = copy.deepcopy(model.state_dict())
    state = handle.state_dict(gather=True)
    expected = steps(model, optimizer, range(3, 6))
    handle.remove()
    model, handle, optimizer = made()
    model.load_state_dict(weights)
    handle.load_state_dict(state)
    found = steps(model, optimizer, range(3, 6))
    handle.remove()
    check_same([found], [expected])
    return f"rank{dist.get_world_size() - 1}" in state


@pytest.mark.parametrize("place", SHARDED)
def test_each_rank_goes_on_from_one_state(ranks: RankPool, place: str) -> None:
    assert ranks.run(_sharded, place) == [True] * ranks.world_size
