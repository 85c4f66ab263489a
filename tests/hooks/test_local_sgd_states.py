"""States of ``hooks.local_sgd``: going on from them, with as many ranks or others."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from layered_net import BUCKET_CAP_MB
from local_training import (
    Training,
    all_same,
    attached,
    backward,
    farthest,
    net,
    parameters_of,
    same,
    steps_done,
    train,
)
from on_ranks import of_all_ranks, on_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import HookHandle, attach, reshard_states
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.testing import run_ranks

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")

# ---- as many ranks -------------------------------------------------------------------------------


class _Resumable:
    """A training with AdamW, whose state another one with the same arguments can load."""

    def __init__(self, rank: int, road: str, hook: str, dtype: torch.dtype) -> None:
        self.rank = rank
        self.model: nn.Module = net(dtype)
        options = {"bucket_cap_mb": BUCKET_CAP_MB}
        if road == "ddp":
            self.model, options = DDP(self.model, **options), {}
            for _ in range(2):  # so that DDP orders its buckets
                backward(self.model, 0, 0)
        self.handle: HookHandle = attach(self.model, parse_hook(hook), **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, *steps: int) -> None:
        train(self.model, self.optimizer, self.rank, range(*steps))

    def saved(self) -> io.BytesIO:
        """A checkpoint for this rank, with rank 0's model."""
        model = of_all_ranks(self.model.state_dict())[0]
        stream = io.BytesIO()
        torch.save((model, self.optimizer.state_dict(), self.handle.state_dict()), stream)
        return stream

    def load(self, stream: io.BytesIO) -> None:
        stream.seek(0)
        states = torch.load(stream, weights_only=True)
        for each, state in zip((self.model, self.optimizer, self.handle), states, strict=True):
            each.load_state_dict(state)

    def ends(self) -> list[Tensor]:
        """The parameters now, and after the ranks have come together."""
        now = parameters_of(self.model)
        self.handle.synchronize()
        self.handle.remove()
        return now + parameters_of(self.model)


_STEPS = 10
INT4 = "error_feedback(blockwise(bits=4))"
PLAIN = f"local_sgd(3, hook={INT4})"
RESET = f"local_sgd(3, hook={INT4}, error_reset=True)"


def _streaming(delay: int, inside: str = INT4) -> str:
    return f"local_sgd(6, hook={inside}, fragments=2, delay={delay}, mix=0.5)"


#: The steps since an exchange in flight began, by its delay; -1 where there is none.
FLIGHTS = {
    0: [-1] * 10,
    1: [-1, -1, 0, -1, -1, 0, -1, -1, 0, -1],
    2: [-1, -1, 0, 1, -1, 0, 1, -1, 0, 1],
}


@pytest.mark.parametrize(
    ("road", "hook", "delay", "dtype"),
    [
        *(
            (road, hook, 0, dtype)
            for hook in (PLAIN, RESET)
            for road, dtype in (
                ("module", torch.float32),
                ("module", torch.float64),
                ("module", torch.bfloat16),
                ("ddp", torch.float32),
            )
        ),
        ("module", _streaming(2), 2, torch.float32),
        (
            "module",
            _streaming(1, "error_feedback(topk(0.1), dtype=torch.bfloat16)"),
            1,
            torch.float32,
        ),
        ("module", _streaming(2, "error_feedback(chunk_topk(8, 256))"), 2, torch.float32),
        ("module", _streaming(2, "error_feedback(powersgd(rank=2))"), 2, torch.float64),
        ("module", _streaming(2, "momentum(topk(0.1), 0.9)"), 2, torch.float32),
        ("module", _streaming(0), 0, torch.bfloat16),
        ("ddp", _streaming(2), 2, torch.float32),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
@on_processes
def test_it_goes_on_from_any_step(
    rank: int, road: str, hook: str, delay: int, dtype: torch.dtype
) -> None:
    """With the bits of a training that nobody saves."""

    def begun() -> _Resumable:
        return _Resumable(rank, road, hook, dtype)

    run = begun()
    run.train(_STEPS)
    assert run.handle.stats().bytes_sent
    wanted = run.ends()
    run = begun()
    streams, in_flight = [], []
    for step in range(_STEPS):
        run.train(step, step + 1)
        streams.append(run.saved())
        in_flight.append(run.handle.state_dict()["local_steps"].get("steps_in_flight", -1))
    assert same(run.ends(), wanted)
    assert in_flight == FLIGHTS[delay]
    for step, stream in enumerate(streams):
        run = begun()
        run.load(stream)
        run.train(step + 1, _STEPS)
        assert same(run.ends(), wanted), step


# ---- another number of ranks ---------------------------------------------------------------------


def _stopped(
    rank: int, hook: str, states: list[Any] | None = None
) -> tuple[dict[str, Any], list[Tensor]]:
    """A state in the middle of a round, and what it comes to."""
    run = Training(rank, parse_hook(hook))
    if states is None:
        run.train(6)
    else:
        run.handle.load_state_dict(states[rank])
    state = run.handle.state_dict()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.0)
    run.train()  # ends an exchange that is under way
    run.end()
    return state, run.parameters


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("hook", ["local_sgd(4)", "local_sgd(4, fragments=2, delay=1, mix=0.5)"])
def test_another_number_of_ranks_comes_to_the_same(hook: str, world_size: int) -> None:
    before = run_ranks(_stopped, 2, hook)
    states = reshard_states([state for state, _ in before], world_size)
    after = run_ranks(_stopped, world_size, hook, states)
    assert all_same([end for _, end in before]) and all_same([end for _, end in after])
    assert farthest(before[0][1], after[0][1]) < 1e-6
    first = before[0][0]
    if "fragments" in hook:
        assert states[0]["local_steps"]["steps_in_flight"] == 0
        means = first["rank0"]["local_sgd_mean"]
        assert {bool(mean.any()) for mean in means.values()} == {False, True}  # of one fragment
    else:
        anchors = first["shared"]["local_sgd_anchor"]
        ends = dict(zip(dict(net().named_parameters()), after[0][1], strict=True))
        assert farthest(list(anchors.values()), [ends[name] for name in anchors]) > 1e-4


# ---- states that do not fit ----------------------------------------------------------------------


def _refused(run: Training, cases: list[tuple[dict[str, Any], str]]) -> None:
    """Check that a hook refuses states, and that these change nothing."""
    here, done = run.parameters, steps_done(run.handle)
    for wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            run.handle.load_state_dict(wrong)
        assert same(here, run.parameters) and steps_done(run.handle) == done


@pytest.mark.usefixtures("one_rank")
def test_states_that_do_not_fit() -> None:
    run = Training(0, parse_hook("local_sgd(3)"))
    run.train()
    state = run.handle.state_dict()
    assert state["local_steps"] == {"done": 1, "is_open": False}
    assert list(state["rank0"]) == ["local_sgd_parameter"]
    own = state["rank0"]["local_sgd_parameter"]
    names = dict(run.model.named_parameters())
    assert all(torch.equal(own[name], parameter) for name, parameter in names.items())
    after_one = run.parameters
    run.train(2)
    assert steps_done(run.handle) == 0
    name = next(iter(own))

    def kept(parameters: Any) -> dict[str, Any]:
        return {**state, "rank0": {"local_sgd_parameter": parameters}}

    cases = [
        ({key: value for key, value in state.items() if key != "local_steps"}, "keeps ranks apart"),
        (kept({**own, name: torch.ones(3)}), rf"parameter '{name}' must be of shape .* got \[3\]"),
        (kept({"other": torch.ones(3)}), r"must have parameter '.*' of shape .*, got none"),
        *(
            (
                kept({**own, name: damaged}),
                rf"parameter '{name}' must be a dense tensor of floating-point numbers",
            )
            for damaged in (own[name].to("meta"), own[name].to_sparse(), own[name].cfloat())
        ),
        (kept([1]), "by name, got list"),
        ({**state, "rank0": {}}, "must have the rank's parameters, by name, got none"),
        (
            {**state, "shared": {"local_sgd_anchor": {name: torch.ones(3)}}},
            r"'local_sgd_anchor' of parameter '.*' must be of shape",
        ),
    ]
    _refused(run, cases)
    run.handle.load_state_dict(state)
    assert same(after_one, run.parameters) and steps_done(run.handle) == 1
    run.end()


def _in_flight() -> Training:
    """A training while an exchange is under way."""
    run = Training(0, parse_hook("local_sgd(6, fragments=2, delay=1)"))
    run.train(3)
    return run


@pytest.mark.usefixtures("one_rank")
def test_states_with_fragments_that_do_not_fit() -> None:
    run = _in_flight()
    state = run.handle.state_dict()
    position, own = state["local_steps"], state["rank0"]
    assert position == {
        "done": 3,
        "is_open": False,
        "steps_of_round": 3,
        "fragments": 2,
        "fragment": 1,
        "steps_in_flight": 0,
    }
    means, name = own["local_sgd_mean"], "layers.0.weight"  # of the fragment under way
    of_positions: list[tuple[dict[str, Any], str]] = [
        ({"fragment": 2}, "fragment 2 of 2 is next"),
        (
            {"fragments": 3},
            "one of 3 fragments was running, and the hook with fragments=2 cannot continue it",
        ),
        ({"fragments": 0}, "an int from 1 to .*, fragments, got 0"),
        ({"fragment": -1}, "an int from 0 to .*, fragment, got -1"),
        ({"steps_in_flight": -2}, "an int from -1 to .*, steps_in_flight, got -2"),
        ({"steps_of_round": 1 << 60}, "an int from 0 to .*, steps_of_round, got 115"),
    ]
    without = {key: value for key, value in position.items() if key != "fragment"}
    of_means: list[tuple[Any, str]] = [
        ([1], "was running, got list"),
        (
            {**means, name: torch.ones(3)},
            rf"'local_sgd_mean' of parameter '{name}' must be of shape .* got \[3\]",
        ),
        ({}, "must have parameter 'layers.*' of shape .*, got none"),
    ]
    cases = [({"local_steps": {**position, **wrong}}, said) for wrong, said in of_positions]
    cases += [({"rank0": {**own, "local_sgd_mean": wrong}}, said) for wrong, said in of_means]
    cases += [
        ({"local_steps": without}, "an int from 0 to .*, fragment, got None"),
        ({"rank0": {k: v for k, v in own.items() if k != "local_sgd_mean"}}, "got None"),
    ]
    _refused(run, [({**state, **wrong}, said) for wrong, said in cases])
    run.handle.load_state_dict(state)
    run.end()


@pytest.mark.usefixtures("one_rank")
def test_states_of_other_fragments() -> None:
    """Other fragments while one is under way are refused, and fewer than the next one's number.

    What fits goes on.
    """
    run, other = _in_flight(), Training(0, parse_hook("local_sgd(6)"))
    state = run.handle.state_dict()
    third, finer = attached(parse_hook("local_sgd(6, fragments=3, delay=1)"))
    with pytest.raises(ValueError, match="the hook with fragments=3 cannot continue it"):
        finer.load_state_dict(state)
    finer.remove()
    del third
    settled = {**state, "local_steps": {**state["local_steps"], "steps_in_flight": -1}}
    cases = [
        (state, "one of 2 fragments was running"),
        (settled, r"fragment 1 of 2 is next .* fragments=1"),
    ]
    _refused(other, cases)
    run.handle.synchronize()
    other.handle.load_state_dict(run.handle.state_dict())
    other.train(6)
    assert other.exchanges == 1
    run.handle.load_state_dict(other.handle.state_dict())
    for each in (run, other):
        each.end()
