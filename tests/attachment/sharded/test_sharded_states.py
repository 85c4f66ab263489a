"""What hooks remember of sharded models: saved, loaded, and made for other ranks and shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from on_ranks import of_all_ranks
from sharded_local import goes_on
from sharded_models import (
    Mesh,
    by_layer,
    gradients_of_step,
    layers,
    on_ranks,
    run_on,
    sharded,
    unlike,
)
from torch import Tensor, nn

from torch_commhook import attach, hooks, reshard_states
from torch_commhook.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*keeps errors of whole gradients:UserWarning")

HOOKS: dict[str, Callable[[], Any]] = {
    "sign": lambda: hooks.error_feedback(hooks.sign(32)),
    "int4": lambda: hooks.error_feedback(hooks.blockwise(bits=4, block_size=32)),
    "momentum": lambda: hooks.momentum(hooks.sign(32), 0.9, dtype=torch.bfloat16),
    "powersgd": lambda: hooks.error_feedback(hooks.powersgd(rank=1)),
    "topk": lambda: hooks.error_feedback(hooks.topk(0.25)),
    "cast": hooks.cast,
    "local_sgd": lambda: hooks.local_sgd(2, hook=HOOKS["int4"]()),
}


# ---- saved and loaded ----------------------------------------------------------------------------


def _goes_on(rank: int, place: str, hook: str, shard_hook: str | None, gather: bool) -> None:
    def within(place: str) -> dict[str, Any]:
        return {} if shard_hook is None else {"shard_hook": HOOKS[shard_hook]()}

    copies = hook != "local_sgd"
    goes_on(rank, place, HOOKS[hook], 3, 3, within=within, gather=gather, copies=copies)


@pytest.mark.parametrize(
    ("place", "hook", "shard_hook", "gather"),
    [
        *(
            (place, hook, None, False)
            for place in ("fsdp-3", "replicate-3", "hsdp-4")
            for hook in ("sign", "int4", "momentum", "powersgd")
            if (place, hook) != ("fsdp-3", "powersgd")
        ),
        ("hsdp-2", "int4", None, False),
        ("gloo-fsdp-3", "sign", None, False),
        ("gloo-hsdp-4", "powersgd", None, False),
        ("hsdp-4", "powersgd", "int4", False),
        ("hsdp-4", "cast", "int4", False),
        ("gloo-fsdp-3", "int4", None, True),
        ("gloo-hsdp-4", "topk", "sign", True),
        ("gloo-replicate-2", "local_sgd", None, True),
    ],
)
def test_training_goes_on(
    request: pytest.FixtureRequest, place: str, hook: str, shard_hook: str | None, gather: bool
) -> None:
    """The bits are the same. With ``gather`` each rank loads one state of all ranks."""
    run_on(request, place, _goes_on, hook, shard_hook, gather)


@pytest.mark.parametrize("saved", [True, False])
@on_ranks("hsdp-4")
def test_a_state_of_another_shard_hook_is_refused(rank: int, place: str, saved: bool) -> None:
    """The memory of a ``shard_hook`` is saved and not wanted, or wanted and not saved."""
    remembers, forgets = {"shard_hook": HOOKS["int4"]()}, {"shard_hook": hooks.cast()}
    model = sharded(place)
    handle = attach(model, HOOKS["int4"](), **(remembers if saved else forgets))
    gradients_of_step(model, rank)
    state = handle.state_dict()
    handle.remove()
    handle = attach(model, HOOKS["int4"](), **({} if saved else remembers))
    message = f"the memory of a shard_hook if there is one, got {'one' if saved else 'none'}"
    with pytest.raises(ValueError, match=f"load_state_dict: .*{message}"):
        handle.load_state_dict(state)


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


def _settled(rank: int) -> tuple[nn.Module, Any]:
    """A model after steps in which the shards settle on different bits, and the hook's handle."""
    model = _Halves()
    by_layer(model, Mesh.of("hsdp-4"))
    handle = attach(model, hooks.adaptive(360, every=2))
    for number in range(4):
        gradients_of_step(model, rank, number)
    return model, handle


@on_ranks("hsdp-4")
def test_shards_that_have_settled_on_other_bits(rank: int, place: str) -> None:
    """Training goes on from a state with the bits that shards have settled on."""
    model, handle = _settled(rank)
    state = copy.deepcopy(handle.state_dict())
    expected = [gradients_of_step(model, rank, number) for number in (4, 5)]
    handle.remove()
    other = _Halves()
    by_layer(other, Mesh.of(place))
    handle = attach(other, hooks.adaptive(360, every=2))
    handle.load_state_dict(state)
    assert unlike([gradients_of_step(other, rank, number) for number in (4, 5)], expected) == []
    handle.remove()
    own = of_all_ranks(state[f"choices{rank % 2}"])
    assert own[0] == own[2] != own[1] == own[3]


@on_ranks("hsdp-4")
def test_replicas_of_a_shard_that_load_other_choices(rank: int, place: str) -> None:
    """A replica of the first shard loads another choice than the other has."""
    _, handle = _settled(rank)
    state = copy.deepcopy(handle.state_dict())
    if rank == 2:
        names = state["choices0"]["adaptive_bits"]
        state["choices0"]["adaptive_bits"] = {name: 12 - bits for name, bits in names.items()}
    with pytest.raises(RuntimeError, match=r"HookHandle\.load_state_dict"):
        handle.load_state_dict(state)


# ---- other ranks and shards ----------------------------------------------------------------------


def _state(rank: int, place: str) -> dict[str, Any]:
    """The hook's state after three steps. For the place "whole-3" the model is not sharded."""
    model = layers() if place.startswith("whole") else sharded(place)
    handle = attach(model, HOOKS["int4"]())
    for _ in range(3):
        gradients_of_step(model, rank)
    state = copy.deepcopy(handle.state_dict())
    handle.remove()
    return state


@cache
def _stored(place: str) -> list[dict[str, Any]]:
    return run_ranks(_state, int(place[-1]), place)


def _states(place: str) -> list[dict[str, Any]]:
    return copy.deepcopy(_stored(place))


def _to_send(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The mean over the replicas of what is yet to be sent of each whole parameter."""
    shards = states[0].get("shards", {}).get("number", 1)
    replicas = len(states) // shards
    shapes = {name: parameter.shape for name, parameter in layers().named_parameters()}
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


def _check_close(got: list[dict[str, Any]], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(_to_send(got), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", ["fsdp-3", "replicate-3"])
@pytest.mark.parametrize(
    ("ranks", "shards"), [(3, 1), (2, 1), (5, 1), (2, 2), (4, 2), (6, 3), (3, None), (6, None)]
)
def test_what_is_yet_to_be_sent_stays(place: str, ranks: int, shards: int | None) -> None:
    states = _states(place)
    expected = _to_send(states)
    assert max(float(each.abs().max()) for each in expected.values()) > 1e-3
    made = reshard_states(states, ranks, shards=shards)
    assert len(made) == ranks
    _check_close(made, expected)
    _check_close(reshard_states(made, 3, shards=1), expected)


def _load(rank: int, place: str, states: list[dict[str, Any]]) -> dict[str, Any]:
    model = sharded(place)
    handle = attach(model, HOOKS["int4"]())
    try:
        handle.load_state_dict(states[rank])
        state = copy.deepcopy(handle.state_dict())
        gradients_of_step(model, rank)
    finally:
        handle.remove()
    return state


@pytest.mark.parametrize("place", ["fsdp-3", "replicate-3", "hsdp-2"])
def test_a_model_goes_on_sharded(place: str) -> None:
    """A state of a model that is not sharded loads as it is."""
    whole = _states(f"whole-{place[-1]}")
    _check_close(run_ranks(_load, len(whole), place, whole), _to_send(whole))


def _refused(rank: int, states: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError) as caught:
        _load(rank, "fsdp-3", states)
    assert str(caught.value) == (
        "load_state_dict: the state must be of parameters in 1 shards, got one of 3; make one "
        "with torch_commhook.reshard_states, and give that shards=1"
    )


def test_a_state_of_other_shards() -> None:
    run_ranks(_refused, 3, reshard_states(_states("fsdp-3"), 3, shards=3))


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
    states = reshard_states(_states("fsdp-3"), 3, shards=3)
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
        reshard_states(_states("fsdp-3"), 3, shards=shards)
