"""States where ranks have other parts of a parameter, and remember what others do not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from sharded_models import Mesh, device_mesh, gradients_of_step, on_processes, on_ranks, unlike
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torch_commhook import attach, hooks, reshard_states


class _Halves(nn.Module):
    """The rows of one layer matter in the first shard, those of the other in the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(5, 32, bias=False)
        self.other = nn.Linear(5, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.cat([torch.full((16,), 100.0), torch.ones(16)])
        return torch.cat([self.one(x) * weights, self.other(x) * weights.flip(0)], 1)


def _halves() -> nn.Module:
    model, mesh = _Halves(), Mesh.of("hsdp-4")
    for layer in model.children():
        mesh.apply(layer)
    mesh.apply(model)
    return model


@on_ranks("hsdp-4")
def test_shards_that_have_settled_on_other_bits(rank: int, place: str) -> None:
    """Training goes on from a state with the bits that shards have settled on."""
    model, other = _halves(), _halves()
    handle, other_handle = (attach(each, hooks.adaptive(360, every=2)) for each in (model, other))
    for number in range(4):
        gradients_of_step(model, rank, number)
    state = copy.deepcopy(handle.state_dict())
    expected = [gradients_of_step(model, rank, number) for number in (4, 5)]
    handle.remove()
    other_handle.load_state_dict(state)
    assert unlike([gradients_of_step(other, rank, number) for number in (4, 5)], expected) == []
    other_handle.remove()
    own: list[Any] = [None] * 4
    dist.all_gather_object(own, state[f"choices{rank % 2}"])
    assert own[0] == own[2] != own[1] == own[3]


@on_ranks("hsdp-4")
def test_replicas_of_a_shard_that_load_other_choices(rank: int, place: str) -> None:
    """A replica of the first shard loads another choice than the other has."""
    model = _halves()
    handle = attach(model, hooks.adaptive(360, every=2))
    for number in range(4):
        gradients_of_step(model, rank, number)
    state = copy.deepcopy(handle.state_dict())
    if rank == 2:
        names = state["choices0"]["adaptive_bits"]
        state["choices0"]["adaptive_bits"] = {name: 12 - bits for name, bits in names.items()}
    with pytest.raises(RuntimeError, match=r"HookHandle\.load_state_dict"):
        handle.load_state_dict(state)


# ---- tensor parallelism --------------------------------------------------------------------------


def _columns(axes: tuple[str, ...]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
    sizes = {"dp": (2, 2), "replicas": (2, 1, 2)}[axes[0]]
    mesh = device_mesh(sizes, (*axes, "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh[axes])
    return model


def _steps(model: nn.Module, rank: int, numbers: range) -> list[list[Tensor]]:
    return [gradients_of_step(model, rank // 2, number) for number in numbers]


HOOKS = {
    "int4": lambda: hooks.error_feedback(hooks.blockwise(bits=4)),
    "local_sgd": lambda: hooks.local_sgd(3, hook=hooks.error_feedback(hooks.blockwise(bits=4))),
}
AXES = {"int4": [("dp",), ("replicas", "shards")], "local_sgd": [("replicas", "shards")]}


@pytest.mark.parametrize(
    ("name", "axes"), [(name, axes) for name, every in AXES.items() for axes in every]
)
@on_processes("fsdp-4")
def test_a_checkpoint_of_all_ranks(
    rank: int, place: str, name: str, axes: tuple[str, ...], tmp_path: Path
) -> None:
    """Ranks that have other columns of a parameter have other entries in it."""
    model = _columns(axes)
    handle = attach(model, HOOKS[name]())
    _steps(model, rank, range(3))
    state = handle.state_dict()
    into = copy.deepcopy(state)
    checkpoint.save({"hook": state}, checkpoint_id=tmp_path)
    expected = _steps(model, rank, range(3, 5))
    handle.remove()
    for value in _tensors(into):
        value.zero_()
    loaded = {"hook": into}
    checkpoint.load(loaded, checkpoint_id=tmp_path)
    other = _columns(axes)
    other_handle = attach(other, HOOKS[name]())
    other_handle.load_state_dict(loaded["hook"])
    got = _steps(other, rank, range(3, 5))
    other_handle.remove()
    assert unlike(got, expected) == []
    everybody: list[Any] = [None] * 4
    dist.all_gather_object(everybody, [key for key in state if "rank" in key])
    assert len({key for each in everybody for key in each}) == 4


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else []
    return [tensor for value in values for tensor in _tensors(value)]


@on_ranks("fsdp-4")
def test_a_state_of_another_part(rank: int, place: str) -> None:
    model = _columns(("dp",))
    handle = attach(model, HOOKS["int4"]())
    _steps(model, rank, range(1))
    state = handle.state_dict()
    others: list[Any] = [None] * 4
    dist.all_gather_object(others, state)
    with pytest.raises(ValueError, match=f"must contain part {rank % 2}"):
        handle.load_state_dict(others[rank ^ 1])
    with pytest.raises(ValueError, match="must be of 2 parts"):
        handle.load_state_dict({key: state[key] for key in state if key != "parts"})
    with pytest.raises(ValueError, match="tensor parallelism"):
        reshard_states(others, 2)
    handle.remove()
