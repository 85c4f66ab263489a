"""States where ranks have other parts of a parameter, and remember what others do not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from rank_pool import RankPool
from sharded_models import Mesh, batch, device_mesh, gradients_of_step, loss_of, reshard, same_bits
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


def _settled(rank: int) -> tuple[Any, list[str]]:
    """What shards have settled on, and whether training goes on from it."""
    model = _halves()
    handle = attach(model, hooks.adaptive(180, every=2))
    for number in range(4):
        gradients_of_step(model, rank, number)
    state = copy.deepcopy(handle.state_dict())
    choices = {key: value for key, value in state.items() if key.startswith("choices")}
    expected = [gradients_of_step(model, rank, number) for number in (4, 5)]
    handle.remove()
    other = _halves()
    other_handle = attach(other, hooks.adaptive(180, every=2))
    other_handle.load_state_dict(state)
    got = [gradients_of_step(other, rank, number) for number in (4, 5)]
    other_handle.remove()
    return choices, [f"step {i}" for i in range(2) if not same_bits(got[i], expected[i])]


@pytest.mark.parametrize("place", ["hsdp-4"])
def test_shards_that_have_settled_on_other_bits(ranks: RankPool, place: str) -> None:
    found = ranks.run(_settled)
    assert [different for _, different in found] == [[]] * 4
    own = [choices[f"choices{rank % 2}"] for rank, (choices, _) in enumerate(found)]
    assert own[0] == own[2] != own[1] == own[3]


def _differing(rank: int) -> str:
    """A replica of the first shard loads another choice than the other has."""
    model = _halves()
    handle = attach(model, hooks.adaptive(180, every=2))
    for number in range(4):
        gradients_of_step(model, rank, number)
    state = copy.deepcopy(handle.state_dict())
    if rank == 2:
        names = state["choices0"]["adaptive_bits"]
        state["choices0"]["adaptive_bits"] = {name: 12 - bits for name, bits in names.items()}
    try:
        handle.load_state_dict(state)
    except RuntimeError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("place", ["hsdp-4"])
def test_replicas_of_a_shard_that_load_other_choices(ranks: RankPool, place: str) -> None:
    for said in ranks.run(_differing):
        assert "HookHandle.load_state_dict" in said


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
    found = []
    for number in numbers:
        model.zero_grad()
        loss_of(model(batch(rank // 2, number))).backward()
        reshard(model)
        found.append([parameter.grad.to_local().clone() for parameter in model.parameters()])
    return found


HOOKS = {
    "int4": lambda: hooks.error_feedback(hooks.blockwise(bits=4)),
    "local_sgd": lambda: hooks.local_sgd(3, hook=hooks.error_feedback(hooks.blockwise(bits=4))),
}
AXES = {"int4": [("dp",), ("replicas", "shards")], "local_sgd": [("replicas", "shards")]}


def _through_a_checkpoint(rank: int, axes: tuple[str, ...], name: str, folder: str) -> list[str]:
    model = _columns(axes)
    handle = attach(model, HOOKS[name]())
    _steps(model, rank, range(3))
    state = handle.state_dict()
    into = copy.deepcopy(state)
    checkpoint.save({"hook": state}, checkpoint_id=folder)
    expected = _steps(model, rank, range(3, 5))
    handle.remove()
    for value in _tensors(into):
        value.zero_()
    loaded = {"hook": into}
    checkpoint.load(loaded, checkpoint_id=folder)
    other = _columns(axes)
    other_handle = attach(other, HOOKS[name]())
    other_handle.load_state_dict(loaded["hook"])
    got = _steps(other, rank, range(3, 5))
    other_handle.remove()
    found = [f"step {i}" for i in range(2) if not same_bits(got[i], expected[i])]
    everybody: list[Any] = [None] * 4
    dist.all_gather_object(everybody, [key for key in state if "rank" in key])
    keys = [key for each in everybody for key in each]
    return found if len(set(keys)) == 4 else [*found, f"keys {keys}"]


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else []
    return [tensor for value in values for tensor in _tensors(value)]


@pytest.mark.parametrize(
    ("name", "axes"), [(name, axes) for name, every in AXES.items() for axes in every]
)
@pytest.mark.parametrize("place", ["fsdp-4"])
def test_a_checkpoint_of_all_ranks(
    ranks: RankPool, place: str, name: str, axes: tuple[str, ...], tmp_path: Path
) -> None:
    """Ranks that have other columns of a parameter have other entries in it."""
    assert ranks.run(_through_a_checkpoint, axes, name, str(tmp_path)) == [[]] * 4


def _state_of_another_part(rank: int) -> list[str]:
    model = _columns(("dp",))
    handle = attach(model, HOOKS["int4"]())
    _steps(model, rank, range(1))
    state = handle.state_dict()
    others: list[Any] = [None] * 4
    dist.all_gather_object(others, state)
    said = []
    for wrong in (others[rank ^ 1], {key: state[key] for key in state if key != "parts"}):
        try:
            handle.load_state_dict(wrong)
        except ValueError as error:
            said.append(str(error))
    try:
        reshard_states(others, 2)
    except ValueError as error:
        said.append(str(error))
    handle.remove()
    return said


@pytest.mark.parametrize("place", ["fsdp-4"])
def test_a_state_of_another_part(ranks: RankPool, place: str) -> None:
    for rank, said in enumerate(ranks.run(_state_of_another_part)):
        assert len(said) == 3
        assert f"must contain part {rank % 2}" in said[0]
        assert "must be of 2 parts" in said[1]
        assert "tensor parallelism" in said[2]
