"""What hooks remember of sharded models: saved, loaded, and made for other ranks and shards."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from sharded_models import device_mesh
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard

from torch_commhook import attach, hooks, reshard_states
from torch_commhook.attachment.handle import HookHandle

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
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def _goes_on(rank: int, way: str, hook: str) -> tuple[bool, list[str]]:
    """Whether a model that loads a state takes the next steps of the one that saved it."""
    model = _sharded(way)
    handle = attach(model, HOOKS[hook]())
    for _ in range(3):
        _step(model, rank)
    state = copy.deepcopy(handle.state_dict())
    expected = [_step(model, rank) for _ in range(2)]
    other = _sharded(way)
    loaded = attach(other, HOOKS[hook]())
    loaded.load_state_dict(state)
    got = [_step(other, rank) for _ in range(2)]
    pairs = [pair for x, y in zip(expected, got, strict=True) for pair in zip(x, y, strict=True)]
    same = all(torch.equal(a, b) for a, b in pairs)
    handle.remove()
    loaded.remove()
    return same, sorted(state)


@pytest.mark.parametrize(
    ("way", "hook"),
    [(way, hook) for way in WAYS for hook in HOOKS if (way, hook) != ("fsdp", "powersgd")],
)
def test_training_goes_on(three_ranks: RankPool, way: str, hook: str) -> None:
    for rank, (same, keys) in enumerate(three_ranks.run(_goes_on, way, hook)):
        assert same
        assert f"rank{rank}" in keys


def _state(rank: int, way: str, steps: int = 3) -> dict[str, Any]:
    model = _sharded(way)
    handle = attach(model, HOOKS["int4"]())
    for _ in range(steps):
        _step(model, rank)
    state = copy.deepcopy(handle.state_dict())
    handle.remove()
    return state


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
def test_what_is_yet_to_be_sent_stays(
    three_ranks: RankPool, way: str, ranks: int, shards: int | None
) -> None:
    states = three_ranks.run(_state, way)
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


def _state_of_whole(rank: int) -> dict[str, Any]:
    model = _net()
    handle = attach(model, HOOKS["int4"]())
    for _ in range(3):
        draw = torch.Generator().manual_seed(rank)
        model.zero_grad()
        model(torch.randn(6, 4, generator=draw)).square().sum().backward()
    state = copy.deepcopy(handle.state_dict())
    handle.remove()
    return state


def _packed(states: list[dict[str, Any]]) -> bytes:
    """States for processes that are not to share this one's memory."""
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()


def _load(rank: int, way: str, packed: bytes) -> dict[str, Any]:
    model = _sharded(way)
    handle: HookHandle = attach(model, HOOKS["int4"]())
    handle.load_state_dict(torch.load(io.BytesIO(packed))[rank])
    state = copy.deepcopy(handle.state_dict())
    _step(model, rank)
    handle.remove()
    return state


@pytest.mark.parametrize("way", WAYS)
def test_a_model_goes_on_sharded(three_ranks: RankPool, way: str) -> None:
    """A state of a model that is not sharded loads as it is."""
    states = three_ranks.run(_state_of_whole)
    loaded = three_ranks.run(_load, way, _packed(states))
    expected, got = _to_send(states), _to_send(loaded)
    for name, each in expected.items():
        torch.testing.assert_close(got[name], each, rtol=1e-5, atol=1e-6)


def _refused(rank: int, way: str, packed: bytes) -> str:
    model = _sharded(way)
    handle = attach(model, HOOKS["int4"]())
    try:
        handle.load_state_dict(torch.load(io.BytesIO(packed))[rank])
    except ValueError as error:
        return str(error)
    finally:
        handle.remove()
    return "nothing"


def test_a_state_of_other_shards(three_ranks: RankPool) -> None:
    states = reshard_states(three_ranks.run(_state, "fsdp"), 3, shards=3)
    for message in three_ranks.run(_refused, "fsdp", _packed(states)):
        assert message == (
            "load_state_dict: the state must be of parameters in 1 shards, got one of 3; make one "
            "with torch_commhook.reshard_states, and give that shards=1"
        )


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
def test_shards_of_another_form(three_ranks: RankPool, change: Any, message: str) -> None:
    states = reshard_states(three_ranks.run(_state, "fsdp"), 3, shards=3)
    for state in states:
        state["shards"] = change(state)
    with pytest.raises(ValueError, match=message):
        reshard_states(states, 3, shards=1)


@pytest.mark.parametrize(("shards", "kind"), [(0, ValueError), (4, ValueError), (1.0, TypeError)])
def test_no_number_of_shards(three_ranks: RankPool, shards: Any, kind: type[Exception]) -> None:
    states = three_ranks.run(_state, "fsdp")
    with pytest.raises(kind, match="reshard_states: shards must be"):
        reshard_states(states, 3, shards=shards)


def test_ranks_that_are_no_multiple_of_shards(three_ranks: RankPool) -> None:
    states = three_ranks.run(_state, "fsdp")
    with pytest.raises(ValueError, match="world_size must be a multiple of 2 shards, got 3"):
        reshard_states(states, 3, shards=2)
