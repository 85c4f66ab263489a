"""What ``local_sgd`` remembers of sharded models: saved, loaded, and made for other shards."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from rank_pool import RankPool
from sharded_local import (
    INT4,
    MEAN,
    PLACES,
    Reference,
    farthest,
    goes_on,
    one_step,
    same,
    sgd,
    sharded,
    values,
    whole_values,
)
from sharded_models import Mesh, batch, by_layer, layers, loss_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from torch_commhook import attach, hooks, reshard_states
from torch_commhook.hooks import local_sgd, outer_sgd

_HOOKS: dict[str, Callable[[], Any]] = {
    "uncompressed": lambda: local_sgd(3),
    "int4": lambda: local_sgd(3, hook=hooks.error_feedback(INT4())),
    "powersgd": lambda: local_sgd(3, hook=hooks.error_feedback(hooks.powersgd(rank=1))),
    "momentum": lambda: local_sgd(3, hook=hooks.momentum(INT4(), 0.9)),
    "error reset": lambda: local_sgd(
        3, outer=MEAN, hook=hooks.error_feedback(INT4()), error_reset=True
    ),
}


# ---- saved and loaded ----------------------------------------------------------------------------


def _goes_on(rank: int, place: str, name: str, steps: int, folder: str | None) -> list[str]:
    return goes_on(rank, place, _HOOKS[name], steps, 4, folder)


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("name", _HOOKS)
@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on(ranks: RankPool, place: str, name: str, steps: int) -> None:
    assert ranks.run(_goes_on, place, name, steps, None) == [[]] * ranks.world_size


@pytest.mark.parametrize("name", ["int4", "powersgd"])
@pytest.mark.parametrize("place", PLACES)
def test_a_distributed_checkpoint(ranks: RankPool, place: str, name: str, tmp_path: Path) -> None:
    found = ranks.run(_goes_on, place, name, 4, str(tmp_path / "state"))
    assert found == [[]] * ranks.world_size


def _after_removal(rank: int, place: str) -> bool:
    model = sharded(place)
    handle = attach(model, local_sgd(4))
    optimizer = sgd(model.parameters())
    one_step(model, optimizer, rank, 0)
    before = handle.state_dict()
    handle.remove()
    after = handle.state_dict()
    own = f"rank{rank}"
    return before[own].keys() == after[own].keys() and all(
        torch.equal(tensor, after[own][kind][name])
        for kind, tensors in before[own].items()
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("place", PLACES)
def test_a_state_of_a_hook_that_was_removed(ranks: RankPool, place: str) -> None:
    assert ranks.run(_after_removal, place) == [True] * ranks.world_size


def _refused_on_one_rank(rank: int, place: str) -> list[str]:
    """All raise, and go on as before."""
    model, plain = sharded(place), sharded(place)
    handles = [attach(each, local_sgd(2)) for each in (model, plain)]
    optimizers = [sgd(each.parameters()) for each in (model, plain)]
    state = copy.deepcopy(handles[0].state_dict())
    if rank == 1:
        del state[f"rank{rank}"]["local_sgd_parameter"]["0.weight"]
    found = []
    for number in range(4):
        if number == 1:
            try:
                handles[0].load_state_dict(state)
                found.append("nothing raised")
            except (ValueError, RuntimeError) as error:
                if "0.weight" not in str(error):
                    found.append(str(error))
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            one_step(each, optimizer, rank, number)
        if not same(values(model), values(plain)):
            found.append(f"step {number}")
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_state_that_one_rank_refuses(ranks: RankPool, place: str) -> None:
    assert ranks.run(_refused_on_one_rank, place) == [[]] * ranks.world_size


# ---- parameters that are loaded ------------------------------------------------------------------


def _other_values() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    named = layers().named_parameters()
    return {name: torch.randn(p.shape, generator=draw) / 3 for name, p in named}


def _by_load_state_dict(model: nn.Module, folder: str) -> None:
    plain = layers()
    plain.load_state_dict(_other_values())
    own = model.state_dict()
    for name, value in _other_values().items():
        own[name] = torch.distributed.tensor.distribute_tensor(
            value, own[name].device_mesh, own[name].placements
        )
    model.load_state_dict(own)


def _by_assignment(model: nn.Module, folder: str) -> None:
    own = model.state_dict()
    for name, value in _other_values().items():
        own[name] = torch.distributed.tensor.distribute_tensor(
            value, own[name].device_mesh, own[name].placements
        )
    model.load_state_dict(own, assign=True)


def _by_set_model_state_dict(model: nn.Module, folder: str) -> None:
    own = get_model_state_dict(model)
    for name, value in _other_values().items():
        own[name] = torch.distributed.tensor.distribute_tensor(
            value, own[name].device_mesh, own[name].placements
        )
    set_model_state_dict(model, own)


def _in_place(model: nn.Module, folder: str) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = torch.distributed.tensor.distribute_tensor(
                _other_values()[name], parameter.device_mesh, parameter.placements
            )
            parameter.to_local().copy_(whole.to_local())


def _by_a_checkpoint(model: nn.Module, folder: str) -> None:
    """Read into the tensors of ``state_dict()``, which are the parameters' own memory."""
    other = layers()
    by_layer(other, Mesh.of("hsdp-4" if dist.get_world_size() == 4 else "replicate-2"))
    _in_place(other, folder)
    checkpoint.save(other.state_dict(), checkpoint_id=folder)
    checkpoint.load(model.state_dict(), checkpoint_id=folder)


_LOADS = {
    "load_state_dict": _by_load_state_dict,
    "assign": _by_assignment,
    "set_model_state_dict": _by_set_model_state_dict,
    "in place": _in_place,
    "checkpoint": _by_a_checkpoint,
}


def _loaded(rank: int, place: str, name: str, after_steps: bool, folder: str) -> list[str]:
    """The anchor is where the parameters were put."""
    outer = outer_sgd(0.7, 0.5)  # the mean alone would not depend on the anchor
    expected = Reference(place, sgd, 2, outer)
    model = sharded(place)
    handle = attach(model, local_sgd(2, outer=outer))
    if after_steps:
        for number in range(2):
            one_step(model, sgd(model.parameters()), rank, number)
            expected.step()
    _LOADS[name](model, folder)
    with torch.no_grad():
        for parameters in [expected.anchor, *(list(m.parameters()) for m in expected.replicas)]:
            for parameter, value in zip(parameters, _other_values().values(), strict=True):
                parameter.copy_(value)
    before = values(model)
    handle.synchronize()
    found = [] if same(before, values(model)) else ["synchronize() moves what was loaded"]
    optimizer = sgd(model.parameters())
    for number in range(expected.steps, expected.steps + 3):
        one_step(model, optimizer, rank, number)
        expected.step()
        if not (distance := farthest(whole_values(model), expected.values(rank))) < 1e-5:
            found.append(f"step {number}: {distance} from the reference")
    handle.remove()
    return found


@pytest.mark.parametrize("after_steps", [False, True])
@pytest.mark.parametrize("name", _LOADS)
@pytest.mark.parametrize("place", PLACES)
def test_parameters_that_are_loaded(
    ranks: RankPool, place: str, name: str, after_steps: bool, tmp_path: Path
) -> None:
    folder = str(tmp_path / "model")
    assert ranks.run(_loaded, place, name, after_steps, folder) == [[]] * ranks.world_size


# ---- other ranks and shards ----------------------------------------------------------------------


def _state(rank: int, place: str, name: str) -> tuple[dict[str, Any], list[Tensor], list[Tensor]]:
    """A state within a round, with the whole parameters of the rank's replica, and the anchor."""
    model = sharded(place)
    handle = attach(model, _HOOKS[name]())
    optimizer = sgd(model.parameters())
    for number in range(3):
        one_step(model, optimizer, rank, number)
    anchor = whole_values(model)
    for number in range(3, 5):
        one_step(model, optimizer, rank, number)
    state = copy.deepcopy(handle.state_dict())
    handle.remove()
    return state, whole_values(model), anchor


def _packed(states: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()


def _load(rank: int, place: str | None, name: str, packed: bytes) -> dict[str, Any]:
    """What a model has that has loaded a state; one that is not sharded where there is no place."""
    model = layers() if place is None else sharded(place)
    handle = attach(model, _HOOKS[name]())
    handle.load_state_dict(torch.load(io.BytesIO(packed))[rank])
    optimizer = sgd(model.parameters())
    parameters = [p.detach().clone() for p in model.parameters()]
    if place is not None:
        parameters = whole_values(model)
    own = handle.state_dict()
    optimizer.zero_grad()
    loss_of(model(batch(rank, 5))).backward()
    optimizer.step()  # the third of the round
    steps = handle.stats().steps
    anchor = [p.detach().clone() for p in model.parameters()]
    if place is not None:
        anchor = whole_values(model)
    handle.remove()
    return {"parameters": parameters, "state": own, "steps": steps, "anchor": anchor}


def _mean(replicas: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*replicas, strict=True)]


@pytest.mark.parametrize("name", ["uncompressed", "int4", "powersgd"])
def test_replicas_go_on_without_shards(
    four_ranks: RankPool, two_ranks: RankPool, name: str
) -> None:
    """Two replicas of two shards become two whole ones, sharded over none, and back."""
    saved = four_ranks.run(_state, "hsdp-4", name)
    states, parameters = [each[0] for each in saved], [each[1] for each in saved]
    made = reshard_states(states, 2, shards=1)
    for place in ("replicate-2", None):
        loaded = two_ranks.run(_load, place, name, _packed(made))
        for rank, got in enumerate(loaded):
            assert same(got["parameters"], parameters[2 * rank])
            anchors = list(got["state"]["shared"]["local_sgd_anchor"].values())
            by_name = got["state"]["shared"]["local_sgd_anchor"]
            names = [name for name, _ in layers().named_parameters()]
            assert len(anchors) == len(names)
            assert same([by_name[each] for each in names], saved[0][2])
            assert got["steps"] == 1
        assert same(loaded[0]["anchor"], loaded[1]["anchor"])
    back = reshard_states(made, 4, shards=2)
    for rank, got in enumerate(four_ranks.run(_load, "hsdp-4", name, _packed(back))):
        assert same(got["parameters"], parameters[rank])
        for kind in ("local_sgd_anchor", "local_sgd_momentum"):
            key = f"shared{rank % 2}"
            assert got["state"][key].keys() >= {kind}
            for each, tensor in states[rank][key][kind].items():
                assert torch.equal(got["state"][key][kind][each], tensor)


def test_fewer_replicas_go_on_from_their_mean(four_ranks: RankPool, two_ranks: RankPool) -> None:
    saved = four_ranks.run(_state, "hsdp-4", "int4")
    expected = _mean([saved[0][1], saved[2][1]])
    made = reshard_states([each[0] for each in saved], 2, shards=2)
    assert [sorted(key for key in each if key.startswith("shared")) for each in made] == [
        ["shared", "shared0"],
        ["shared", "shared1"],
    ]
    whole = reshard_states(made, 1, shards=1)[0]["rank0"]["local_sgd_parameter"]
    got = [whole[name] for name, _ in layers().named_parameters()]
    assert farthest(got, expected) < 1e-7
    more = reshard_states([each[0] for each in saved], 6, shards=2)
    for rank, state in enumerate(more):
        whole_state = state[f"rank{rank}"]["local_sgd_parameter"]
        for name, tensor in made[rank % 2][f"rank{rank % 2}"]["local_sgd_parameter"].items():
            assert farthest([whole_state[name]], [tensor]) < 1e-7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(shared1=3), "replicas must be a dict, got 3"),
        (lambda state: state.update(shared1={"local_sgd_anchor": 3}), "dict by parameter"),
        (
            lambda state: state["shared1"]["local_sgd_anchor"].update({"0.weight": 3}),
            "must be a tensor, got 3",
        ),
        (
            lambda state: state["shared1"]["local_sgd_anchor"].pop("0.weight"),
            "must be there for all shards",
        ),
        (
            lambda state: state["rank1"]["local_sgd_parameter"].pop("0.weight"),
            "must be there for all shards",
        ),
    ],
)
def test_shards_that_do_not_fit(four_ranks: RankPool, change: Any, message: str) -> None:
    states = [each[0] for each in four_ranks.run(_state, "hsdp-4", "uncompressed")]
    change(states[1])
    with pytest.raises(ValueError, match=message):
        reshard_states(states, 2, shards=1)
