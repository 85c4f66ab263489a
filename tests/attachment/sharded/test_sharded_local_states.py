"""What ``local_sgd`` remembers of sharded models: saved, loaded, and made for other shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from on_ranks import of_all_ranks
from sharded_local import (
    INT4,
    MEAN,
    PLACES,
    Reference,
    farthest,
    goes_on,
    one_step,
    sgd,
    tensors_by_path,
    values,
    whole_values,
)
from sharded_models import layers, on_processes, on_ranks, same_bits, sharded
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import distribute_tensor

from torch_commhook import attach, hooks, reshard_states
from torch_commhook.hooks import local_sgd, outer_sgd
from torch_commhook.testing import run_ranks

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


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("name", _HOOKS)
@on_ranks(*PLACES)
def test_training_goes_on(rank: int, place: str, name: str, steps: int) -> None:
    goes_on(rank, place, _HOOKS[name], steps, 4)


@pytest.mark.parametrize("name", ["int4", "powersgd"])
@on_processes(*PLACES)
def test_a_distributed_checkpoint(rank: int, place: str, name: str, tmp_path: Path) -> None:
    goes_on(rank, place, _HOOKS[name], 4, 4, tmp_path)


@on_ranks(*PLACES)
def test_a_state_of_a_hook_that_was_removed(rank: int, place: str) -> None:
    model = sharded(place)
    handle = attach(model, local_sgd(4))
    one_step(model, sgd(model.parameters()), rank, 0)
    before = tensors_by_path(handle.state_dict()[f"rank{rank}"])
    handle.remove()
    after = tensors_by_path(handle.state_dict()[f"rank{rank}"])
    assert list(before) == list(after)
    assert same_bits(list(before.values()), list(after.values()))


@on_ranks(*PLACES)
def test_a_state_that_one_rank_refuses(rank: int, place: str) -> None:
    """All raise, and go on as before."""
    model, plain = sharded(place), sharded(place)
    handles = [attach(each, local_sgd(2)) for each in (model, plain)]
    optimizers = [sgd(each.parameters()) for each in (model, plain)]
    state = copy.deepcopy(handles[0].state_dict())
    if rank == 1:
        del state[f"rank{rank}"]["local_sgd_parameter"]["0.weight"]
    for number in range(4):
        if number == 1:
            with pytest.raises((ValueError, RuntimeError), match=r"0\.weight"):
                handles[0].load_state_dict(state)
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            one_step(each, optimizer, rank, number)
        assert same_bits(values(model), values(plain)), number
    for handle in handles:
        handle.remove()


# ---- parameters that are loaded ------------------------------------------------------------------


def _other_values() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    named = layers().named_parameters()
    return {name: torch.randn(p.shape, generator=draw) / 3 for name, p in named}


def _put_into(own: dict[str, Any]) -> dict[str, Any]:
    for name, value in _other_values().items():
        own[name] = distribute_tensor(value, own[name].device_mesh, own[name].placements)
    return own


def _by_load_state_dict(model: nn.Module, folder: Path) -> None:
    model.load_state_dict(_put_into(model.state_dict()))


def _by_assignment(model: nn.Module, folder: Path) -> None:
    model.load_state_dict(_put_into(model.state_dict()), assign=True)


def _by_set_model_state_dict(model: nn.Module, folder: Path) -> None:
    set_model_state_dict(model, _put_into(get_model_state_dict(model)))


def _in_place(model: nn.Module, folder: Path) -> None:
    values = _put_into(dict(model.named_parameters()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(values[name].to_local())


def _by_a_checkpoint(model: nn.Module, folder: Path) -> None:
    """Read into the tensors of ``state_dict()``, which are the parameters' own memory."""
    saved = _put_into(copy.deepcopy(model.state_dict()))
    checkpoint.save(saved, checkpoint_id=folder)
    checkpoint.load(model.state_dict(), checkpoint_id=folder)


_LOADS = {
    "load_state_dict": _by_load_state_dict,
    "assign": _by_assignment,
    "set_model_state_dict": _by_set_model_state_dict,
    "in place": _in_place,
    "checkpoint": _by_a_checkpoint,
}


@pytest.mark.parametrize("after_steps", [False, True])
@pytest.mark.parametrize("name", _LOADS)
@on_ranks(*PLACES)
def test_parameters_that_are_loaded(
    rank: int, place: str, name: str, after_steps: bool, tmp_path: Path
) -> None:
    """The anchor is where the parameters were put."""
    outer = outer_sgd(0.7, 0.5)  # the mean alone would not depend on the anchor
    expected = Reference(place, sgd, 2, outer)
    model = sharded(place)
    handle = attach(model, local_sgd(2, outer=outer))
    if after_steps:
        for number in range(2):
            one_step(model, sgd(model.parameters()), rank, number)
            expected.step()
    _LOADS[name](model, tmp_path)
    with torch.no_grad():
        for parameters in [expected.anchor, *(list(m.parameters()) for m in expected.replicas)]:
            for parameter, value in zip(parameters, _other_values().values(), strict=True):
                parameter.copy_(value)
    before = values(model)
    handle.synchronize()
    assert same_bits(before, values(model))  # synchronize() keeps the loaded values
    optimizer = sgd(model.parameters())
    for number in range(expected.steps, expected.steps + 3):
        one_step(model, optimizer, rank, number)
        expected.step()
        assert farthest(whole_values(model), expected.values(rank)) < 1e-5, number
    handle.remove()


@pytest.mark.parametrize("name", ["uncompressed", "error reset"])
@on_ranks(*PLACES)
def test_replicas_that_write_different_values(rank: int, place: str, name: str) -> None:
    """Their anchors stay alike, and synchronize() makes them equal."""
    model = sharded(place)
    handle = attach(model, _HOOKS[name]())
    optimizer = sgd(model.parameters())
    for number in range(7):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().add_(0.01 * (rank + 1))
        one_step(model, optimizer, rank, number)
    handle.synchronize()
    first, *others = of_all_ranks(whole_values(model))
    assert all(same_bits(first, other) for other in others)
    handle.remove()


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


@cache
def _stored(name: str) -> list[tuple[dict[str, Any], list[Tensor], list[Tensor]]]:
    return run_ranks(_state, 4, "hsdp-4", name)


def _saved(name: str) -> list[tuple[dict[str, Any], list[Tensor], list[Tensor]]]:
    """The results of ``_state`` on four ranks."""
    return copy.deepcopy(_stored(name))


def _load(rank: int, place: str | None, name: str, states: list[dict[str, Any]]) -> dict[str, Any]:
    """What a model has that has loaded a state; one that is not sharded where there is no place."""
    model = layers() if place is None else sharded(place)
    handle = attach(model, _HOOKS[name]())
    handle.load_state_dict(copy.deepcopy(states[rank]))
    parameters, own = whole_values(model), copy.deepcopy(handle.state_dict())
    one_step(model, sgd(model.parameters()), rank, 5)  # the third of the round
    steps, anchor = handle.stats().steps, whole_values(model)
    handle.remove()
    return {"parameters": parameters, "state": own, "steps": steps, "anchor": anchor}


def _mean(replicas: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*replicas, strict=True)]


@pytest.mark.parametrize("name", ["uncompressed", "int4", "powersgd"])
def test_replicas_go_on_without_shards(name: str) -> None:
    """Two replicas of two shards become two whole ones, sharded over none, and back."""
    saved = _saved(name)
    states, parameters = [each[0] for each in saved], [each[1] for each in saved]
    made = reshard_states(states, 2, shards=1)
    for place in ("replicate-2", None):
        loaded = run_ranks(_load, 2, place, name, made)
        for rank, got in enumerate(loaded):
            assert same_bits(got["parameters"], parameters[2 * rank])
            by_name = got["state"]["shared"]["local_sgd_anchor"]
            names = [name for name, _ in layers().named_parameters()]
            assert len(by_name) == len(names)
            assert same_bits([by_name[each] for each in names], saved[0][2])
            assert got["steps"] == 1
        assert same_bits(loaded[0]["anchor"], loaded[1]["anchor"])
    back = reshard_states(made, 4, shards=2)
    for rank, got in enumerate(run_ranks(_load, 4, "hsdp-4", name, back)):
        assert same_bits(got["parameters"], parameters[rank])
        for kind in ("local_sgd_anchor", "local_sgd_momentum"):
            key = f"shared{rank % 2}"
            assert got["state"][key].keys() >= {kind}
            for each, tensor in states[rank][key][kind].items():
                assert torch.equal(got["state"][key][kind][each], tensor)


def test_fewer_replicas_go_on_from_their_mean() -> None:
    saved = _saved("int4")
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
        (lambda state: state.update(shared1=3), "must be tensors by kind and parameter, got 3$"),
        (
            lambda state: state.update(shared1={"local_sgd_anchor": 3}),
            "must be tensors by kind and parameter, got 3 for 'local_sgd_anchor'$",
        ),
        (
            lambda state: state["shared1"]["local_sgd_anchor"].update({"0.weight": 3}),
            "got 3 for 'local_sgd_anchor' of parameter '0.weight'",
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
def test_shards_that_do_not_fit(change: Any, message: str) -> None:
    states = [each[0] for each in _saved("uncompressed")]
    change(states[1])
    with pytest.raises(ValueError, match=message):
        reshard_states(states, 2, shards=1)
