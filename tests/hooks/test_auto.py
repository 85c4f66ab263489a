"""``hooks.auto`` among ranks that are threads, where a test decides what is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nested_values import different_paths
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import HookHandle, attach, hooks, reshard_states
from torch_commhook.attachment import choosing
from torch_commhook.hooks.auto import STEPS
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


def _chosen(
    rank: int, hook: Any = "auto(max_error=0.05)", steps: int = STEPS + 1
) -> tuple[nn.Module, HookHandle]:
    """A model after the choice, and the handle of its hook."""
    model = _model()
    handle = attach(model, hook)
    for step in range(steps):
        _step(rank, step, model)
    return model, handle


def test_candidates() -> None:
    assert [repr(each) for each in hooks.auto(0.1).candidates] == DEFAULT
    given = hooks.auto(0.1, hooks=[hooks.sign(), hooks.allreduce()]).candidates
    assert [repr(each) for each in given] == ["allreduce()", "sign()"]


@pytest.mark.parametrize("on_ddp", [False, True], ids=["module", "ddp"])
@on_ranks(2)
def test_it_is_allreduce_first_and_what_is_chosen_then(
    rank: int, found: list[int], on_ddp: bool
) -> None:
    runs = []
    # The second is lossy, so that buckets are alike.
    for text in ("auto(max_error=0.05)", f"after({STEPS + 1}, blockwise())"):
        model = _model(on_ddp=on_ddp)
        handle = attach(model, text)
        gradients, choices = [], []
        for number in range(STEPS + 3):
            gradients.append(_step(rank, number, model))
            choices.append(handle.stats().choice)
        runs.append((gradients, choices))
    (got, choices), (want, _) = runs
    assert choices == ["allreduce()"] * STEPS + ["blockwise()"] * 3
    assert different_paths(got, want) == []
    assert sorted(found) == [0, 1]


@on_ranks(2)
def test_what_statistics_say(rank: int, found: list[int]) -> None:
    model, handle = _chosen(rank, steps=0)
    lines = []
    for number in range(STEPS + 3):
        lines.append(str(handle.stats()).splitlines()[0])
        _step(rank, number, model)
    before = "auto averages with allreduce(): its first 5 steps are not over yet"
    assert lines == [before] * (STEPS + 1) + ["auto averages with blockwise(): because"] * 2


@on_ranks(2)
def test_other_hooks_have_no_choice(rank: int) -> None:
    stats = attach(_model(), hooks.allreduce()).stats()
    assert (stats.choice, stats.reason) == ("", "")
    assert str(stats).startswith("0 steps on 2 ranks")


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
@on_ranks(2)
def test_a_run_that_goes_on_takes_the_choice_of_its_state(
    rank: int, found: list[int], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """With the same bits as a run that was not interrupted, and measures nothing."""
    monkeypatch.setattr(choosing, "choose_hook", lambda *_, **__: Choice(number, "because"))
    model, handle = _chosen(rank, steps=STEPS + 3)
    state, weights = handle.state_dict(), copy.deepcopy(model.state_dict())
    want = [_step(rank, step, model) for step in (100, 101)]
    handle.remove()
    other, handle = _chosen(rank, steps=0)
    other.load_state_dict(weights)
    handle.load_state_dict(state)
    monkeypatch.setattr(choosing, "choose_hook", None)  # an error, if it is called
    stats = handle.stats()
    got = [_step(rank, step, other) for step in (100, 101)]
    assert (stats.choice, stats.reason) == (DEFAULT[number], "the loaded state has this choice")
    assert different_paths(got, want) == []


@on_ranks(2)
def test_a_state_of_error_feedback_is_loaded_before_the_choice(rank: int, found: list[int]) -> None:
    hook = "auto(max_error=1, hooks=[cast(), error_feedback(sign())])"
    _, handle = _chosen(rank, hook, STEPS + 3)
    state = handle.state_dict()
    handle.remove()
    _kept, other = _chosen(rank, hook, 0)
    other.load_state_dict(state)
    lost, loaded = (
        each[f"rank{rank}"]["error"]["0.weight"].norm() for each in (state, other.state_dict())
    )
    assert other.stats().choice == "error_feedback(sign())"
    assert lost == loaded > 0


@on_ranks(2)
def test_other_candidates_do_not_take_a_choice(rank: int, found: list[int]) -> None:
    model, handle = _chosen(rank)
    state = handle.state_dict()
    handle.replace("auto(max_error=0.05, hooks=[cast(), sign()])")
    handle.load_state_dict(state)
    choices = [handle.stats().choice]
    for step in range(2):
        _step(rank, step, model)
        choices.append(handle.stats().choice)
    assert choices == ["allreduce()", "sign()", "sign()"]  # after the first step that it counts
    assert sorted(found) == [0, 0, 1, 1]


def test_a_choice_holds_for_another_number_of_ranks(found: list[int]) -> None:
    def states(rank: int) -> dict[str, Any]:
        _kept, handle = _chosen(rank)
        return handle.state_dict()

    resharded = reshard_states(run_ranks(states, 2), 3)

    def go_on(rank: int) -> str:
        _kept, handle = _chosen(rank, steps=0)
        handle.load_state_dict(resharded[rank])
        return handle.stats().choice

    assert run_ranks(go_on, 3) == ["blockwise()"] * 3


@on_ranks(2)
def test_ranks_that_load_other_choices_are_refused(rank: int, found: list[int]) -> None:
    _kept, handle = _chosen(rank)
    state = handle.state_dict()
    (kind,) = state["choices"]
    if rank:
        state["choices"][kind] = dict.fromkeys(state["choices"][kind], 1)
    with pytest.raises(RuntimeError, match="the state's choices must be the same") as raised:
        handle.load_state_dict(state)
    assert raised.type is RuntimeError
    assert handle.stats().choice == "blockwise()"


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
@on_ranks(2)
def test_sharded_models_refuse_it(rank: int, place: str) -> None:
    shape = (1, 2) if place == "hook" else (2, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    model = fully_shard(_model(), mesh=mesh)
    auto = hooks.auto(0.1)
    said = r"auto\(max_error=0.1\) chooses a hook on a model whose ranks have all of it"
    with pytest.raises(TypeError, match=said):
        if place == "hook":
            attach(model, auto)
        elif place == "shard_hook":
            attach(model, hooks.allreduce(), shard_hook=auto)
        else:
            attach(model, hooks.allreduce()).replace(auto)


@on_ranks(2)
def test_one_object_serves_two_models(rank: int, found: list[int]) -> None:
    auto = hooks.auto(0.05)
    first, chosen = _chosen(rank, auto, 0)
    _second, other = _chosen(rank, auto, 0)
    for step in range(STEPS + 1):
        _step(rank, step, first)
    assert [each.stats().choice for each in (chosen, other)] == ["blockwise()", "allreduce()"]
