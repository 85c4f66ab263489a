"""``hooks.auto`` among ranks that are threads, where a test decides what is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import HookHandle, attach, hooks, parse_hook, reshard_states
from torch_commhook.attachment import choosing
from torch_commhook.hooks.first_steps import STEPS
from torch_commhook.planning import HookError, measure
from torch_commhook.planning.choice import Choice
from torch_commhook.testing import run_ranks, simulate

#: Numbers of the default candidates.
DEFAULT = [
    "allreduce()",
    "cast(bfloat16)",
    "blockwise()",
    "fp8()",
    "blockwise(bits=4)",
    "blockwise(bits=2)",
    "topk()",
    "powersgd(rank=4)",
]
POWERSGD = 7


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has ranks that are threads choose number 2; gives the rank of each call."""
    calls: list[int] = []
    monkeypatch.setattr(choosing, "reason_for_none", lambda world_size: "")

    def choose_hook(candidates: Any, max_error: float, **others: Any) -> Choice:
        assert others["group"].size() == dist.get_world_size()
        calls.append(dist.get_rank())
        return Choice(2, "because")

    monkeypatch.setattr(choosing, "choose_hook", choose_hook)
    return calls


def _choose(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(choosing, "choose_hook", lambda *_, **__: Choice(number, "because"))


def _model(*, on_ddp: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))
    return DDP(model, bucket_cap_mb=1) if on_ddp else model


def _step(rank: int, number: int, model: nn.Module) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * number + rank)
    model.zero_grad()
    model(torch.randn(4, 24, generator=generator)).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= 0.01 * gradient
    return gradients


def test_it_prints_as_it_is_written() -> None:
    for text in (
        "auto(max_error=0.05)",
        "auto(max_error=0.1, hooks=[blockwise(bits=4), error_feedback(topk(density=0.1))])",
    ):
        assert repr(parse_hook(text)) == text
    assert [repr(each) for each in hooks.auto(0.1).candidates] == DEFAULT
    given = hooks.auto(0.1, hooks=[hooks.sign(), hooks.allreduce()]).candidates
    assert [repr(each) for each in given] == ["allreduce()", "sign()"]


@pytest.mark.parametrize("on_ddp", [False, True], ids=["module", "ddp"])
def test_it_is_allreduce_first_and_what_is_chosen_then(found: list[int], on_ddp: bool) -> None:
    def train(rank: int, text: str) -> tuple[list[list[torch.Tensor]], list[str]]:
        model = _model(on_ddp=on_ddp)
        handle = attach(model, text)
        gradients, choices = [], []
        for number in range(STEPS + 3):
            gradients.append(_step(rank, number, model))
            choices.append(handle.stats().choice)
        return gradients, choices

    text = f"after({STEPS + 1}, blockwise())"  # lossy, so that buckets are alike
    ranks = run_ranks(train, 2, "auto(max_error=0.05)")
    assert found in ([0, 1], [1, 0])
    for (gradients, choices), (want, _) in zip(ranks, run_ranks(train, 2, text), strict=True):
        assert choices == ["allreduce()"] * STEPS + ["blockwise()"] * 3
        for got, bits in zip(gradients, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, bits, strict=True))


def test_what_statistics_say(found: list[int]) -> None:
    def train(rank: int) -> list[str]:
        model = _model()
        handle = attach(model, hooks.auto(0.05))
        told = []
        for number in range(STEPS + 2):
            told.append(str(handle.stats()).splitlines()[0])
            _step(rank, number, model)
        return [*told, str(handle.stats()).splitlines()[0]]

    for lines in run_ranks(train, 2):
        before = "auto averages with allreduce(): its first 5 steps are not over yet"
        assert lines == [before] * (STEPS + 1) + ["auto averages with blockwise(): because"] * 2


def test_other_hooks_have_no_choice() -> None:
    def train(rank: int) -> tuple[str, str, str]:
        stats = attach(_model(), hooks.allreduce()).stats()
        return stats.choice, stats.reason, str(stats)

    ((choice, reason, text), _) = run_ranks(train, 2)
    assert (choice, reason) == ("", "")
    assert text.startswith("0 steps on 2 ranks")


@pytest.mark.usefixtures("one_rank")
def test_one_rank_has_nothing_to_choose() -> None:
    model = _model()
    with attach(model, hooks.auto(0.05)) as handle:
        for number in range(STEPS + 2):
            _step(0, number, model)
        stats = handle.stats()
    assert (stats.choice, stats.reason) == ("allreduce()", "there is one rank, which sends nothing")


# ---- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, POWERSGD], ids=["cast", "blockwise", "powersgd"])
def test_a_run_that_goes_on_takes_the_choice_of_its_state(
    found: list[int], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """With the same bits as a run that was not interrupted, and measures nothing."""
    _choose(monkeypatch, number)

    def train(rank: int) -> tuple[Any, ...]:
        model = _model()
        handle = attach(model, hooks.auto(0.05))
        for step in range(STEPS + 3):
            _step(rank, step, model)
        state, weights = handle.state_dict(), copy.deepcopy(model.state_dict())
        want = [_step(rank, step, model) for step in (100, 101)]
        handle.remove()
        other = _model()
        other.load_state_dict(weights)
        handle = attach(other, hooks.auto(0.05))
        handle.load_state_dict(state)
        monkeypatch.setattr(choosing, "choose_hook", None)  # an error, if it is called
        stats = handle.stats()
        got = [_step(rank, step, other) for step in (100, 101)]
        return stats.choice, stats.reason, got, want

    for choice, reason, got, want in run_ranks(train, 2):
        assert choice == DEFAULT[number]
        assert reason == "the loaded state has this choice"
        for one, other in zip(got, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_state_of_error_feedback_is_loaded_before_the_choice(found: list[int]) -> None:
    hook = "auto(max_error=1, hooks=[cast(), error_feedback(sign())])"

    def train(rank: int) -> tuple[str, float, float]:
        model = _model()
        handle = attach(model, hook)
        for step in range(STEPS + 3):
            _step(rank, step, model)
        state = handle.state_dict()
        lost = state[f"rank{rank}"]["error"]["0.weight"].norm().item()
        handle.remove()
        model = _model()
        other = attach(model, hook)
        other.load_state_dict(state)
        loaded = other.state_dict()[f"rank{rank}"]["error"]["0.weight"].norm().item()
        return other.stats().choice, lost, loaded

    for choice, lost, loaded in run_ranks(train, 2):
        assert choice == "error_feedback(sign())"
        assert lost == loaded > 0


def test_other_candidates_do_not_take_a_choice(found: list[int]) -> None:
    def train(rank: int) -> list[str]:
        model = _model()
        handle = attach(model, hooks.auto(0.05))
        for step in range(STEPS + 1):
            _step(rank, step, model)
        state = handle.state_dict()
        handle.replace("auto(max_error=0.05, hooks=[cast(), sign()])")
        handle.load_state_dict(state)
        choices = [handle.stats().choice]
        for step in range(2):
            _step(rank, step, model)
            choices.append(handle.stats().choice)
        return choices

    for choices in run_ranks(train, 2):
        assert choices == ["allreduce()", "sign()", "sign()"]  # after the first step that it counts
    assert sorted(found) == [0, 0, 1, 1]


def test_a_choice_holds_for_another_number_of_ranks(found: list[int]) -> None:
    def states(rank: int) -> dict[str, Any]:
        model = _model()
        handle = attach(model, hooks.auto(0.05))
        for step in range(STEPS + 1):
            _step(rank, step, model)
        return handle.state_dict()

    resharded = reshard_states(run_ranks(states, 2), 3)

    def go_on(rank: int) -> str:
        model = _model()
        handle = attach(model, hooks.auto(0.05))
        handle.load_state_dict(resharded[rank])
        return handle.stats().choice

    assert run_ranks(go_on, 3) == ["blockwise()"] * 3


def test_ranks_that_load_other_choices_are_refused(found: list[int]) -> None:
    def train(rank: int) -> str:
        model = _model()
        handle = attach(model, hooks.auto(0.05))
        for step in range(STEPS + 1):
            _step(rank, step, model)
        state = handle.state_dict()
        (kind,) = state["choices"]
        if rank:
            state["choices"][kind] = dict.fromkeys(state["choices"][kind], 1)
        with pytest.raises(RuntimeError, match="the state's choices must be the same") as raised:
            handle.load_state_dict(state)
        return handle.stats().choice + type(raised.value).__name__

    assert run_ranks(train, 2) == ["blockwise()RuntimeError"] * 2


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: hooks.auto("0.1"), TypeError, "auto: max_error must be a number, got str"),
        (lambda: hooks.auto(True), TypeError, "auto: max_error must be a number, got bool"),
        (lambda: hooks.auto(0.0), ValueError, "max_error must be above 0 and below 1e+06, got 0.0"),
        (lambda: hooks.auto(float("nan")), ValueError, "must be above 0 and below 1e+06, got nan"),
        (lambda: hooks.auto(10**400), ValueError, "must be above 0 and below 1e+06"),
        (lambda: hooks.auto(0.1, hooks=[]), ValueError, "must have at least one hook"),
        (
            lambda: hooks.auto(0.1, hooks=[hooks.allreduce()]),
            ValueError,
            "hooks must have a hook beside allreduce(), which is always a candidate",
        ),
        (
            lambda: hooks.auto(0.1, "cast()"),
            TypeError,
            "hooks must be a sequence of hooks, got str",
        ),
        (lambda: hooks.auto(0.1, [3]), TypeError, "hooks[0] must be one of torch_commhook.hooks"),
        (
            lambda: hooks.auto(0.1, [hooks.sign(), hooks.sign()]),
            ValueError,
            "hooks must differ from each other, got sign() twice",
        ),
        (
            lambda: hooks.auto(0.1, [hooks.clip(1.0)]),
            ValueError,
            "hooks[0] must average gradients in each step and leave their scale alone, got clip(1)",
        ),
        (lambda: hooks.auto(0.1, [hooks.local_sgd(4)]), ValueError, "got local_sgd(4"),
        (lambda: hooks.auto(0.1, [hooks.auto(0.1)]), ValueError, "auto: hooks[0] must be known"),
        (lambda: hooks.policy([], hooks.auto(0.1)), ValueError, "policy: default must be known"),
        (lambda: hooks.clip(1.0, hooks.auto(0.1)), ValueError, "clip: hook must be known before"),
        (
            lambda: hooks.error_feedback(hooks.auto(0.1)),
            ValueError,
            "error_feedback: hook must be known before the first step, and auto(max_error=0.1) "
            "chooses after some steps; attach auto() by itself, with such hooks among the hooks= "
            "that it chooses from",
        ),
        (lambda: hooks.after(3, hooks.auto(0.1)), ValueError, "after: hook must be known"),
        (
            lambda: hooks.after(3, hooks.sign(), before=hooks.auto(0.1)),
            ValueError,
            "after: before must be known",
        ),
        (lambda: hooks.local_sgd(4, hook=hooks.auto(0.1)), ValueError, "local_sgd: hook must be"),
        (
            lambda: simulate(hooks.auto(0.1), [[torch.ones(4)], [torch.ones(4)]]),
            RuntimeError,
            "auto(max_error=0.1): it chooses a hook in the first steps of a model, and only an "
            "attached hook sees these; use torch_commhook.attach(model, hook)",
        ),
        (
            lambda: measure(["auto(max_error=0.1)"], elements=100, world_size=2),
            HookError,
            "the hook 'auto(max_error=0.1)' can't be planned: it chooses one of several hooks in "
            "the first steps of a training; plan these hooks instead",
        ),
    ],
)
def test_refusals(make: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        make()
    assert said in str(raised.value)


@pytest.mark.parametrize("place", ["hook", "shard_hook", "replace"])
def test_sharded_models_refuse_it(place: str) -> None:
    def refused(rank: int) -> str:
        shape = (1, 2) if place == "hook" else (2, 1)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        model = fully_shard(_model(), mesh=mesh)
        auto = hooks.auto(0.1)
        with pytest.raises(TypeError) as raised:
            if place == "hook":
                attach(model, auto)
            elif place == "shard_hook":
                attach(model, hooks.allreduce(), shard_hook=auto)
            else:
                attach(model, hooks.allreduce()).replace(auto)
        return str(raised.value)

    for said in run_ranks(refused, 2):
        assert "auto(max_error=0.1) chooses a hook on a model whose ranks have all of it" in said


def test_one_object_serves_two_models(found: list[int]) -> None:
    def train(rank: int) -> list[str]:
        auto = hooks.auto(0.05)
        models = [_model(), _model()]
        handles: list[HookHandle] = [attach(model, auto) for model in models]
        for step in range(STEPS + 1):
            _step(rank, step, models[0])
        return [handle.stats().choice for handle in handles]

    assert run_ranks(train, 2) == [["blockwise()", "allreduce()"]] * 2
