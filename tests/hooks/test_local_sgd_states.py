"""States of ``hooks.local_sgd``: going on from them, with as many ranks or others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_training import (
    all_same,
    attached,
    farthest,
    load,
    net,
    parameters_of,
    resumable,
    same,
    saved,
    steps_done,
    train,
)
from rank_pool import RankPool
from torch import Tensor

from torch_commhook import hooks, reshard_states
from torch_commhook.hooks import local_sgd
from torch_commhook.testing import run_ranks

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")

_STEPS = 8


def _resumed(rank: int, road: str, dtype: torch.dtype, error_reset: bool) -> list[int]:
    """The steps from which training does not go on as if nothing had been."""

    def hook() -> Any:
        inner = hooks.error_feedback(hooks.blockwise(bits=4))
        return local_sgd(3, hook=inner, error_reset=error_reset)

    model, handle, optimizer = resumable(hook(), road, dtype)
    streams = []
    for step in range(_STEPS):
        train(model, optimizer, rank, range(step, step + 1))
        streams.append(saved(model, optimizer, handle.state_dict()))
    wanted, bytes_sent = parameters_of(model), handle.stats().bytes_sent
    assert bytes_sent
    handle.remove()
    wrong = []
    for step, stream in enumerate(streams):
        model, handle, optimizer = resumable(hook(), road, dtype)
        load(stream, model, handle, optimizer)
        train(model, optimizer, rank, range(step + 1, _STEPS))
        if not same(parameters_of(model), wanted):
            wrong.append(step)
        handle.remove()
    return wrong


@pytest.mark.parametrize("error_reset", [False, True])
@pytest.mark.parametrize(
    ("road", "dtype"),
    [
        ("module", torch.float32),
        ("module", torch.float64),
        ("module", torch.bfloat16),
        ("ddp", torch.float32),
    ],
)
def test_it_goes_on_from_any_step(
    two_ranks: RankPool, road: str, dtype: torch.dtype, error_reset: bool
) -> None:
    assert two_ranks.run(_resumed, road, dtype, error_reset, timeout=120) == [[], []]


def _stopped(rank: int, states: list[Any] | None) -> tuple[dict[str, Any], list[Tensor]]:
    """A state in the middle of a round, and what it comes to."""
    model, handle = attached(local_sgd(4))
    if states is None:
        train(model, torch.optim.SGD(model.parameters(), lr=0.01), rank, 6)
    else:
        handle.load_state_dict(states[rank])
    state = handle.state_dict()
    handle.synchronize()
    handle.remove()
    return state, parameters_of(model)


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_comes_to_the_same(world_size: int) -> None:
    before = run_ranks(_stopped, 2, None)
    states = reshard_states([state for state, _ in before], world_size)
    after = run_ranks(_stopped, world_size, states)
    assert all_same([end for _, end in before]) and all_same([end for _, end in after])
    assert farthest(before[0][1], after[0][1]) < 1e-6
    anchor = list(before[0][0]["shared"]["local_sgd_anchor"].values())
    ends = dict(zip(dict(net().named_parameters()), after[0][1], strict=True))
    assert farthest(anchor, [ends[n] for n in before[0][0]["shared"]["local_sgd_anchor"]]) > 1e-4


@pytest.mark.usefixtures("one_rank")
def test_states_that_do_not_fit() -> None:
    model, handle = attached(local_sgd(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, 0, 1)
    state = handle.state_dict()
    assert state["local_steps"] == {"done": 1, "is_open": False}
    own = state["rank0"]["local_sgd_parameter"]
    names = dict(model.named_parameters())
    assert all(torch.equal(own[name], parameter) for name, parameter in names.items())
    after_one = parameters_of(model)
    train(model, optimizer, 0, 2)
    here = parameters_of(model)
    name = next(iter(own))
    for wrong, message in [
        ({key: value for key, value in state.items() if key != "local_steps"}, "keeps ranks apart"),
        (
            {**state, "rank0": {"local_sgd_parameter": {**own, name: torch.ones(3)}}},
            rf"parameter '{name}' must be of shape .* got \[3\]",
        ),
        (
            {**state, "rank0": {"local_sgd_parameter": {"other": torch.ones(3)}}},
            r"must have parameter '.*' of shape .*, got none",
        ),
        *(
            (
                {**state, "rank0": {"local_sgd_parameter": {**own, name: damaged}}},
                rf"parameter '{name}' must be a dense tensor of floating-point numbers",
            )
            for damaged in (own[name].to("meta"), own[name].to_sparse(), own[name].cfloat())
        ),
        ({**state, "shared": {}}, rf"its 'local_sgd_anchor' lacks .*'{name}'"),
        ({**state, "world_size": 2}, "must be of 1 ranks, got one of 2"),
        ({**state, "local_steps": None}, "local_steps must be a number of steps"),
        ({**state, "local_steps": {"is_open": False}}, "local_steps must be a number of steps"),
        ({**state, "local_steps": {"done": "a", "is_open": False}}, "must be a number of steps"),
        ({**state, "rank0": {}}, "must have the rank's parameters, by name, got none"),
        ({**state, "rank0": {"local_sgd_parameter": [1]}}, "by name, got list"),
        (
            {**state, "shared": {"local_sgd_anchor": {name: torch.ones(3)}}},
            r"'local_sgd_anchor' of parameter '.*' must be of shape",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            handle.load_state_dict(wrong)
        assert same(here, parameters_of(model)) and steps_done(handle) == 0
    handle.load_state_dict(state)
    assert same(after_one, parameters_of(model)) and steps_done(handle) == 1
    handle.synchronize()
    handle.remove()
