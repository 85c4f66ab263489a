"""States of ``local_sgd`` with fragments, while an exchange is under way or none is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_training import (
    all_same,
    attached,
    farthest,
    load,
    parameters_of,
    resumable,
    same,
    saved,
    train,
)
from rank_pool import RankPool
from torch import Tensor

from torch_commhook import hooks, reshard_states
from torch_commhook.hooks import local_sgd
from torch_commhook.testing import run_ranks

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")

_STEPS = 10
_HOOKS = {
    "int4": lambda: hooks.error_feedback(hooks.blockwise(bits=4)),
    "topk": lambda: hooks.error_feedback(hooks.topk(0.1), dtype=torch.bfloat16),
    "chunk_topk": lambda: hooks.error_feedback(hooks.chunk_topk(8, 256)),
    "powersgd": lambda: hooks.error_feedback(hooks.powersgd(rank=2)),
    "momentum": lambda: hooks.momentum(hooks.topk(0.1), 0.9),
}


def _begin(road: str, name: str, delay: int, dtype: torch.dtype) -> Any:
    hook = local_sgd(6, hook=_HOOKS[name](), fragments=2, delay=delay, mix=0.5)
    return resumable(hook, road, dtype)


def _resumed(rank: int, road: str, *how: Any) -> tuple[list[int], list[int]]:
    """The steps from which training does not go on with the same bits, and the exchanges' steps.

    A training that nobody saves is what each must come to.
    """
    model, handle, optimizer = _begin(road, *how)
    train(model, optimizer, rank, _STEPS)
    wanted = parameters_of(model)
    handle.synchronize()
    together = parameters_of(model)
    handle.remove()
    model, handle, optimizer = _begin(road, *how)
    streams, in_flight = [], []
    for step in range(_STEPS):
        train(model, optimizer, rank, range(step, step + 1))
        state = handle.state_dict()
        streams.append(saved(model, optimizer, state))
        in_flight.append(state["local_steps"]["steps_in_flight"])
    wrong = [] if same(parameters_of(model), wanted) else [-1]
    handle.synchronize()
    handle.remove()
    for step, stream in enumerate(streams):
        model, handle, optimizer = _begin(road, *how)
        load(stream, model, handle, optimizer)
        train(model, optimizer, rank, range(step + 1, _STEPS))
        is_same = same(parameters_of(model), wanted)
        handle.synchronize()
        if not is_same or not same(parameters_of(model), together):
            wrong.append(step)
        handle.remove()
    return wrong, in_flight


@pytest.mark.parametrize(
    ("road", "name", "delay", "dtype"),
    [
        ("module", "int4", 2, torch.float32),
        ("module", "topk", 1, torch.float32),
        ("module", "chunk_topk", 2, torch.float32),
        ("module", "powersgd", 2, torch.float64),
        ("module", "momentum", 2, torch.float32),
        ("module", "int4", 0, torch.bfloat16),
        ("ddp", "int4", 2, torch.float32),
    ],
)
def test_it_goes_on_from_any_step(
    two_ranks: RankPool, road: str, name: str, delay: int, dtype: torch.dtype
) -> None:
    flights = {
        0: [-1] * 10,
        1: [-1, -1, 0, -1, -1, 0, -1, -1, 0, -1],
        2: [-1, -1, 0, 1, -1, 0, 1, -1, 0, 1],
    }
    found = two_ranks.run(_resumed, road, name, delay, dtype, timeout=120)
    assert found == [([], flights[delay])] * 2


def _stopped(rank: int, states: list[Any] | None) -> tuple[dict[str, Any], list[Tensor]]:
    """A state while an exchange is under way, and what it comes to."""
    model, handle = attached(local_sgd(4, fragments=2, delay=1, mix=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if states is None:
        train(model, torch.optim.SGD(model.parameters(), lr=0.01), rank, 6)
    else:
        handle.load_state_dict(states[rank])
    state = handle.state_dict()
    train(model, optimizer, rank, 1)  # ends it
    handle.synchronize()
    handle.remove()
    return state, parameters_of(model)


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_comes_to_the_same(world_size: int) -> None:
    before = run_ranks(_stopped, 2, None)
    states = reshard_states([state for state, _ in before], world_size)
    assert states[0]["local_steps"]["steps_in_flight"] == 0
    after = run_ranks(_stopped, world_size, states)
    assert all_same([end for _, end in before]) and all_same([end for _, end in after])
    assert farthest(before[0][1], after[0][1]) < 1e-6
    means = before[0][0]["rank0"]["local_sgd_mean"]
    assert {bool(mean.any()) for mean in means.values()} == {False, True}  # of one fragment


@pytest.mark.usefixtures("one_rank")
class TestStatesThatDoNotFit:
    def _state(self, **settings: Any) -> tuple[Any, Any, dict[str, Any]]:
        model, handle = attached(local_sgd(6, **settings))
        train(model, torch.optim.SGD(model.parameters(), lr=0.01), 0, 3)
        return model, handle, handle.state_dict()

    def test_refused(self) -> None:
        model, handle, state = self._state(fragments=2, delay=1)
        position, own = state["local_steps"], state["rank0"]
        assert position == {
            "done": 3,
            "is_open": False,
            "steps_of_round": 3,
            "fragments": 2,
            "fragment": 1,
            "steps_in_flight": 0,
        }
        means = own["local_sgd_mean"]
        here, name = parameters_of(model), "layers.0.weight"  # of the fragment under way
        for wrong, message in [
            ({"local_steps": {**position, "fragment": 2}}, "fragment 2 of 2 is next"),
            (
                {"local_steps": {**position, "fragments": 3}},
                "one of 3 fragments was running, and the hook with fragments=2 cannot continue it",
            ),
            (
                {"local_steps": {**position, "fragments": 0}},
                "an int from 1 to .*, fragments, got 0",
            ),
            (
                {"local_steps": {**position, "fragment": -1}},
                "an int from 0 to .*, fragment, got -1",
            ),
            (
                {"local_steps": {**position, "steps_in_flight": -2}},
                "an int from -1 to .*, steps_in_flight, got -2",
            ),
            (
                {"local_steps": {**position, "steps_of_round": 1 << 60}},
                "an int from 0 to .*, steps_of_round, got 115",
            ),
            (
                {"local_steps": {k: v for k, v in position.items() if k != "fragment"}},
                "an int from 0 to .*, fragment, got None",
            ),
            ({"rank0": {k: v for k, v in own.items() if k != "local_sgd_mean"}}, "got None"),
            ({"rank0": {**own, "local_sgd_mean": [1]}}, "was running, got list"),
            (
                {"rank0": {**own, "local_sgd_mean": {**means, name: torch.ones(3)}}},
                rf"'local_sgd_mean' of parameter '{name}' must be of shape .* got \[3\]",
            ),
            (
                {"rank0": {**own, "local_sgd_mean": {}}},
                "must have parameter 'layers.*' of shape .*, got none",
            ),
        ]:
            with pytest.raises(ValueError, match=message):
                handle.load_state_dict({**state, **wrong})
            assert same(here, parameters_of(model))
        handle.load_state_dict(state)
        handle.synchronize()
        handle.remove()

    def test_of_other_settings(self) -> None:
        """Other fragments while one is under way are refused, and fewer than the next one's number.

        What fits goes on.
        """
        _, handle, state = self._state(fragments=2, delay=1)
        model, other = attached(local_sgd(6))
        with pytest.raises(ValueError, match="one of 2 fragments was running"):
            other.load_state_dict(state)
        third, finer = attached(local_sgd(6, fragments=3, delay=1))
        with pytest.raises(ValueError, match="the hook with fragments=3 cannot continue it"):
            finer.load_state_dict(state)
        finer.remove()
        del third
        settled = {**state, "local_steps": {**state["local_steps"], "steps_in_flight": -1}}
        with pytest.raises(ValueError, match=r"fragment 1 of 2 is next .* fragments=1"):
            other.load_state_dict(settled)
        handle.synchronize()
        other.load_state_dict(handle.state_dict())
        train(model, torch.optim.SGD(model.parameters(), lr=0.01), 0, 6)
        assert other.stats().steps == 1
        plain = other.state_dict()
        handle.load_state_dict(plain)
        for each in (handle, other):
            each.synchronize()
            each.remove()
