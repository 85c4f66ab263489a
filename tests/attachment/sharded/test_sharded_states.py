"""What hooks remember of sharded models: saved, loaded, and made for other ranks and shards."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_models import device_mesh, local, run_on, unlike
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard

from torch_commhook import attach, hooks, reshard_states
from torch_commhook.attachment.handle import HookHandle
from torch_commhook.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*keeps errors of whole gradients:UserWarning")

WAYS = ("fsdp", "replicate", "hsdp")
HOOKS = {
    "sign": lambda: hooks.error_feedback(hooks.sign(32)),
    "int4": lambda: hooks.error_feedback(hooks.blockwise(bits=4, block_size=32)),
    "momentum": lambda: hooks.momentum(hooks.sign(32), 0.9, dtype=torch.bfloat16),
    "powersgd": lambda: hooks.error_feedback(hooks.powersgd(rank=1)),
}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    # Of 5, 7 and 9 rows: none is even.
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 9))


def _sharded(way: str) -> nn.Module:
    ranks = dist.get_world_size()
    if way == "hsdp":
        mesh = device_mesh((ranks, 1), ("replicas", "shards"))
    else:
        mesh = device_mesh((ranks,), ("ranks",))
    model = _net()
    apply = replicate if way == "replicate" else fully_shard
    for module in model:
        if isinstance(module, nn.Linear):
            apply(module, mesh=mesh)
    apply(model, mesh=mesh)
    return model


def _step(model: nn.Module, rank: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rank)
    model.zero_grad()
    model(torch.randn(6, 4, generator=draw)).square().sum().backward()
    return [local(parameter.grad) for parameter in model.parameters()]


def _goes_on(rank: int, place: str, hook: str) -> None:
    """A model that loads a state takes the next steps of the one that saved it."""
    way = place.partition("-")[0]
    model, other = _sharded(way), _sharded(way)
    handle, loaded = (attach(each, HOOKS[hook]()) for each in (model, other))
    for _ in range(3):
        _step(model, rank)
    state = copy.deepcopy(handle.state_dict())
    expected = [_step(model, rank) for _ in range(2)]
    loaded.load_state_dict(state)
    assert unlike([_step(other, rank) for _ in range(2)], expected) == []
    handle.remove()
    loaded.remove()
    assert f"rank{rank}" in state


@pytest.mark.parametrize(
    ("place", "hook"),
    [(f"{way}-3", hook) for way in WAYS for hook in HOOKS if (way, hook) != ("fsdp", "powersgd")]
    + [("gloo-fsdp-3", "sign"), ("gloo-hsdp-3", "powersgd")],
)
def test_training_goes_on(request: pytest.FixtureRequest, place: str, hook: str) -> None:
    run_on(request, place, _goes_on, hook)


def _state(rank: int, way: str) -> dict[str, Any]:
    """The hook's state after three steps. For the way "whole" the model is not sharded."""
    model = _net() if way == "whole" else _sharded(way)
    handle = attach(model, HOOKS["int4"]())
    for _ in range(3):
        _step(model, rank)
    state = copy.deepcopy(handle.state_dict())
    handle.remove()
    return state


@cache
def _stored(way: str) -> list[dict[str, Any]]:
    return run_ranks(_state, 3, way)


def _states(way: str) -> list[dict[str, Any]]:
    return copy.deepcopy(_stored(way))


def _to_send(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The mean over the replicas of what is yet to be sent of each whole parameter."""
    shards = states[0].get("shards", {}).get("number", 1)
    replicas = len(states) // shards
    shapes = {name: parameter.shape for name, parameter in _net().named_parameters()}
    found = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for replica in range(replicas):
        ranks = [replica * shards + shard for shard in range(shards)]
        own = [states[rank][f"rank{rank}"] for rank in ranks]
        for kind, factor in (("error", 1 / replicas), ("shard_error", 1.0)):
            for name, shape in shapes.items():
                pieces = [each[kind][name] for each in own if name in each.get(kind, {})]
                if pieces:
                    # A shard's rows, the last of which are padding.
                    rows = torch.cat([piece.reshape(-1, *shape[1:]) for piece in pieces])
                    found[name] += factor * rows[: shape[0]]
    return found


@pytest.mark.parametrize("way", ["fsdp", "replicate"])
@pytest.mark.parametrize(
    ("ranks", "shards"), [(3, 1), (2, 1), (5, 1), (2, 2), (4, 2), (6, 3), (3, None), (6, None)]
)
def test_what_is_yet_to_be_sent_stays(way: str, ranks: int, shards: int | None) -> None:
    states = _states(way)
    expected = _to_send(states)
    assert max(float(each.abs().max()) for each in expected.values()) > 1e-3
    made = reshard_states(states, ranks, shards=shards)
    assert len(made) == ranks
    got = _to_send(made)
    for name, each in expected.items():
        torch.testing.assert_close(got[name], each, rtol=1e-5, atol=1e-6)
    there_and_back = _to_send(reshard_states(made, 3, shards=1))
    for name, each in expected.items():
        torch.testing.assert_close(there_and_back[name], each, rtol=1e-5, atol=1e-6)


def _load(rank: int, way: str, states: list[dict[str, Any]]) -> dict[str, Any]:
    model = _sharded(way)
    handle: HookHandle = attach(model, HOOKS["int4"]())
    try:
        handle.load_state_dict(states[rank])
        state = copy.deepcopy(handle.state_dict())
        _step(model, rank)
    finally:
        handle.remove()
    return state


@pytest.mark.parametrize("way", WAYS)
def test_a_model_goes_on_sharded(way: str) -> None:
    """A state of a model that is not sharded loads as it is."""
    expected = _to_send(_states("whole"))
    got = _to_send(run_ranks(_load, 3, way, _states("whole")))
    for name, each in expected.items():
        torch.testing.assert_close(got[name], each, rtol=1e-5, atol=1e-6)


def _refused(rank: int, states: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError) as caught:
        _load(rank, "fsdp", states)
    assert str(caught.value) == (
        "load_state_dict: the state must be of parameters in 1 shards, got one of 3; make one "
        "with torch_commhook.reshard_states, and give that shards=1"
    )


def test_a_state_of_other_shards() -> None:
    run_ranks(_refused, 3, reshard_states(_states("fsdp"), 3, shards=3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {"number": 0}, "must have a number of shards"),
        (lambda state: {"number": True}, "must have a number of shards"),
        (lambda state: 2, "must have a number of shards"),
        (lambda state: {"number": 3, "forms": 1}, "must have the parameters' forms"),
        (lambda state: {"number": 3, "forms": {"0.weight": [9, 4]}}, "must be a dimension"),
        (lambda state: {"number": 3, "forms": {}}, "must be in the state, got none"),
    ],
)
def test_shards_of_another_form(change: Any, message: str) -> None:
    states = reshard_states(_states("fsdp"), 3, shards=3)
    for state in states:
        state["shards"] = change(state)
    with pytest.raises(ValueError, match=message):
        reshard_states(states, 3, shards=1)


@pytest.mark.parametrize(
    ("shards", "kind", "message"),
    [
        (0, ValueError, "shards must be"),
        (4, ValueError, "shards must be"),
        (1.0, TypeError, "shards must be"),
        (2, ValueError, "world_size must be a multiple of 2 shards, got 3"),
    ],
)
def test_no_number_of_shards(shards: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"reshard_states: {message}"):
        reshard_states(_states("fsdp"), 3, shards=shards)
