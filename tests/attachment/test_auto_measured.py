"""``hooks.auto`` among processes: what ranks measure, and the modes in which they train."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mode_cases import Mode
from mode_cases import batch as mode_batch
from mode_cases import module as mode_module
from on_ranks import of_all_ranks, on_processes
from rank_pool import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach
from torch_commhook.attachment import choosing
from torch_commhook.hooks.auto import STEPS
from torch_commhook.planning.choice import Choice
from torch_commhook.process_group import ThrottledProcessGroup


def _train(
    rank: int, hook: str, bandwidth: float | None, latency: float, pause: float
) -> dict[str, Any]:
    """A few steps, each of which also computes for ``pause`` seconds."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch_commhook.planning.choice")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    group: Any = dist.group.WORLD
    if bandwidth is not None:
        group = ThrottledProcessGroup(group, bandwidth=bandwidth, latency=latency)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 100))
    handle = attach(model, hook, process_group=group, bucket_cap_mb=0.3)
    sent = []
    for number in range(STEPS + 3):
        generator = torch.Generator().manual_seed(10 * number + rank)
        model.zero_grad()
        time.sleep(pause)
        model(torch.randn(8, 400, generator=generator)).square().mean().backward()
        sent.append(handle.stats().bytes_sent_last_step)
    stats = handle.stats()
    gradient = [parameter.grad.clone() for parameter in model.parameters()]
    handle.remove()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return {
        "choice": stats.choice,
        "reason": stats.reason,
        "logged": logged,
        "sent": sent,
        "gradient": gradient,
    }


def _check_alike(ranks: list[dict[str, Any]]) -> tuple[str, str]:
    """The choice and the reason of all ranks, which go on with the same gradients."""
    first, *others = ranks
    for other in others:
        assert (other["choice"], other["reason"]) == (first["choice"], first["reason"])
        assert all(map(torch.equal, first["gradient"], other["gradient"]))
    return first["choice"], first["reason"]


@pytest.mark.parametrize(
    ("world_size", "max_error", "latency", "want"),
    [
        (2, 0.05, 0.0, {"blockwise()", "fp8()"}),
        (2, 0.3, 0.0, {"blockwise(bits=4)"}),
        (2, 0.3, 0.01, {"blockwise(bits=4)"}),
        (2, 0.003, 0.0, {"cast(bfloat16)"}),
        (3, 0.05, 0.0, {"blockwise()", "fp8()"}),
    ],
)
def test_a_slow_link_takes_a_hook_that_compresses(
    pools: dict[int, RankPool], world_size: int, max_error: float, latency: float, want: set[str]
) -> None:
    """Of 200,000 elements, whose 0.8 MB take a third of a second at 20 Mbit/s."""
    hook = f"auto(max_error={max_error})"
    ranks = pools[world_size].run(_train, hook, 20e6, latency, 0.0, timeout=120)
    choice, reason = _check_alike(ranks)
    assert choice in want, reason
    assert "over a link of " in reason and " Mbit/s" in reason
    rate = float(reason.partition("over a link of ")[2].partition(" Mbit/s")[0])
    assert 5 < rate < 40, reason
    for found in ranks:
        sent = found["sent"]
        assert sent[: STEPS + 1] == [sent[0]] * (STEPS + 1)
        assert sent[-1] == sent[-2] < 0.6 * sent[0]


def test_a_fast_link_keeps_allreduce(two_ranks: RankPool) -> None:
    ranks = two_ranks.run(_train, "auto(max_error=0.3)", None, 0.0, 0.05, timeout=120)
    choice, reason = _check_alike(ranks)
    assert choice == "allreduce()", reason
    assert "the fastest other hook" in reason
    assert len({sent for found in ranks for sent in found["sent"]}) == 1
    assert ranks[0]["logged"][-1] == f"auto chose allreduce(): {reason}"
    assert ranks[1]["logged"] == []


def test_no_hook_is_exact_enough(two_ranks: RankPool) -> None:
    ranks = two_ranks.run(_train, "auto(max_error=1e-5)", 20e6, 0.0, 0.0, timeout=120)
    choice, reason = _check_alike(ranks)
    assert choice == "allreduce()"
    assert reason.startswith("no other hook has an error of at most 1e-05; that of cast(")


@on_processes
def test_a_hook_with_groups_is_measured_and_random_numbers_stay(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(400, 400)
    handle = attach(model, "auto(max_error=1e-6, hooks=[hierarchical(blockwise()), cast()])")
    before = torch.get_rng_state()
    for _ in range(STEPS + 1):
        model.zero_grad()
        model(torch.ones(8, 400)).sum().backward()
    stats = handle.stats()
    handle.remove()
    assert torch.equal(torch.get_rng_state(), before)
    first, second = of_all_ranks((stats.choice, stats.reason))
    assert first == second and "a step is predicted to take" in stats.reason


# ---- steps that fail, and ranks without inputs ---------------------------------------------------


class _Found:
    """Has the ranks of a process choose ``blockwise()``, in a ``with`` block; counts the calls.

    Attributes:
        fails: whether choosing raises.
    """

    def __init__(self, number: int = 2) -> None:
        self.calls = 0
        self.fails = False
        self._number = number
        self._before = choosing.choose_hook

    def __call__(self, candidates: Any, max_error: float, **others: Any) -> Choice:
        self.calls += 1
        if self.fails:
            raise ValueError("measured nothing")
        return Choice(self._number, "because")

    def __enter__(self) -> _Found:
        choosing.choose_hook = self
        return self

    def __exit__(self, *raised: object) -> None:
        choosing.choose_hook = self._before


def _small_step(rank: int, number: int, model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(10 * number + rank)
    model.zero_grad()
    model(torch.randn(4, 24, generator=generator)).square().sum().backward()


def _small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))


@pytest.mark.parametrize("on_ddp", [False, True], ids=["module", "ddp"])
@pytest.mark.parametrize("where", ["choosing", "later"])
@on_processes
def test_a_step_that_fails_on_a_rank_chooses_nothing(rank: int, where: str, on_ddp: bool) -> None:
    """On any rank; the next step does."""
    model = _small_model()
    if on_ddp:
        model = DDP(model)
    with _Found() as found, attach(model, "auto(max_error=0.05)") as handle:
        for number in range(STEPS):
            _small_step(rank, number, model)
        if where == "choosing":
            found.fails = rank == 1
        else:
            fails = handle.register_posthook(_fail if rank == 1 else _pass)
        with pytest.raises((RuntimeError, ValueError), match="measured nothing"):
            _small_step(rank, STEPS, model)
        if where == "later":
            fails.remove()
        found.fails = False
        choices = [handle.stats().choice]
        for number in range(2):
            _small_step(rank, STEPS + 1 + number, model)
            choices.append(handle.stats().choice)
        assert choices == ["allreduce()", "blockwise()", "blockwise()"] and found.calls == 2


def _fail(*_: Any) -> None:
    raise ValueError("measured nothing")


def _pass(*_: Any) -> None:
    return None


@pytest.mark.parametrize("on_ddp", [False, True], ids=["module", "ddp"])
@on_processes
def test_ranks_that_have_run_out_of_inputs_choose_too(rank: int, on_ddp: bool) -> None:
    model = _small_model()
    if on_ddp:
        model = DDP(model)
    with _Found() as found, attach(model, "auto(max_error=0.05)") as handle:
        with handle.join():
            for number in range(STEPS + 3 if rank else 2):
                _small_step(rank, number, model)
        assert (handle.stats().choice, found.calls) == ("blockwise()", 1)


# ---- modes ---------------------------------------------------------------------------------------


def _in_mode(rank: int, mode: Mode, hook: str, number: int | None) -> dict[str, Any]:
    """Steps in a mode, in which ``auto`` finds that the hook of a number is the best."""
    torch._dynamo.reset()
    found = _Found(number or 0)
    with found if number is not None else contextlib.nullcontext():
        model = mode.wrap(mode_module())
        handle = attach(model, hook, **mode.attach_options)
        gradients, choices = [], []
        with mode.step_function(model) as step:
            for place in range(STEPS + 2):
                model.zero_grad()
                step(mode_batch(rank, place))
                gradients.append([parameter.grad.clone() for parameter in model.parameters()])
                choices.append(handle.stats().choice)
        stats = handle.stats()
        handle.remove()
    return {
        "gradients": gradients,
        "choices": choices,
        "calls": found.calls,
        "reason": stats.reason,
        "steps": stats.steps,
    }


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        pytest.param(mode, number, id=f"{mode}-{name}", marks=pytest.mark.long if is_long else [])
        for mode, number, name, is_long in [
            (Mode("module", "context", fullgraph=True, backend="aot_eager"), 2, "blockwise", False),
            (Mode("module", "context", fullgraph=True, backend="aot_eager"), 7, "powersgd", True),
            (Mode("ddp", "context", backend="aot_eager"), 2, "blockwise", True),
            (Mode("ddp", "context", backend="aot_eager"), 7, "powersgd", True),
            (Mode("module", "compile", backend="aot_eager"), 2, "blockwise", False),
            (Mode("module", "compile", backend="aot_eager"), 7, "powersgd", False),
        ]
    ],
)
def test_a_compiler_takes_in_the_chosen_hook(two_ranks: RankPool, mode: Mode, number: int) -> None:
    """From its first step on under compiled autograd, with the bits of that hook by itself."""
    hook = {2: "blockwise()", 7: "powersgd(rank=4)"}[number]
    ranks = two_ranks.run(_in_mode, mode, "auto(max_error=0.05)", number, timeout=300)
    if mode.compiles_backward:
        wanted = two_ranks.run(_in_mode, mode, hook, None, timeout=300)
        for found, want in zip(ranks, wanted, strict=True):
            assert found["choices"] == [hook] * len(found["choices"])
            for got, bits in zip(found["gradients"], want["gradients"], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(got, bits, strict=True))
    for found in ranks:
        assert found["calls"] == 1
        assert found["choices"][-1] == hook
        assert found["steps"] == len(found["gradients"])


def test_before_a_capture_the_computing_is_not_known(two_ranks: RankPool) -> None:
    mode = Mode("module", "context", fullgraph=True, backend="aot_eager")
    ranks = two_ranks.run(_in_mode, mode, "auto(max_error=0.3)", None, timeout=300)
    assert ranks[0]["choices"] == ranks[1]["choices"]
    assert ranks[0]["reason"] == ranks[1]["reason"]
    assert "without the model's unknown computing time" in ranks[0]["reason"]
