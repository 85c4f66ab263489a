"""Scalers that ``attach`` is given, or that a hook was not told of."""

from __future__ import annotations

import gc
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from on_ranks import on_processes
from scaled_training import Counted, Steps, attached, backward_of, batch, gradients
from torch import Tensor, nn

from torch_commhook import attach, hooks
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.memory import scaler_watch

pytestmark = pytest.mark.usefixtures("one_rank")


def _counted(road: str, scale: float) -> tuple[Counted, nn.Module, Any]:
    torch._dynamo.reset()
    scaler = Counted(scale)
    return scaler, *attached(road, parse_hook("error_feedback(sign())"), scaler=scaler)


@pytest.mark.parametrize("road", ["module", "ddp", "compiled"])
def test_it_is_asked_once_in_each_backward(road: str) -> None:
    scaler, model, handle = _counted(road, 4.0)
    found = []
    for number in range(3):
        scaler.asked = 0
        with backward_of(road):
            model(batch(0, number)).sum().backward()
        found.append(scaler.asked)
    handle.remove()
    assert found == [1, 1, 1]


def test_it_is_not_asked_for_hooks_that_remember_nothing() -> None:
    scaler = Counted(4.0)
    model, handle = attached("module", hooks.cast(), scaler=scaler)
    scaler.asked = 0
    model(batch(0, 0)).sum().backward()
    handle.remove()
    assert scaler.asked == 0


@pytest.mark.parametrize("road", ["module", "ddp", "compiled"])
def test_a_scale_that_is_none_ends_the_backward(road: str) -> None:
    scaler, model, handle = _counted(road, 1.0)
    for scale in (math.nan, 4.0):
        scaler.scale = scale
        refused = pytest.raises(
            ValueError, match=r"hook '.*: scaler must have a positive, .* got nan"
        )
        with refused if scale != scale else nullcontext(), backward_of(road):
            model(batch(0, 0)).sum().backward()
    handle.remove()


@pytest.mark.parametrize(
    ("scaler", "error", "said"),
    [
        (2.0, TypeError, r"scaler must be a torch.amp.GradScaler, .*, got float"),
        (torch.amp.GradScaler, TypeError, r"scaler must be a torch.amp.GradScaler, .*, got type"),
        (Counted("x"), TypeError, r"scaler must give a number as its scale, got str"),
        (Counted(0.0), ValueError, r"scaler must have a positive, finite scale, got 0.0"),
        (Counted(-1.0), ValueError, r"scaler must have a positive, finite scale, got -1.0"),
        (Counted(math.inf), ValueError, r"scaler must have a positive, finite scale, got inf"),
        (Counted(1e300), ValueError, r"scaler must have a positive, finite scale, got 1e\+300"),
    ],
    ids=["number", "class", "text", "zero", "negative", "infinite", "beyond float32"],
)
def test_what_is_no_scaler_is_refused(scaler: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        attached("module", hooks.allreduce(), scaler=scaler)


@pytest.mark.parametrize("scales", [(4.0, 2.0), (4.0, None)], ids=str)
@on_processes
def test_ranks_must_have_one_scale(rank: int, scales: tuple[float, float | None]) -> None:
    scaler = None if scales[rank] is None else Counted(scales[rank])
    said = r"the scaler's scale must be the same on all ranks: rank 0 has 4\.0, rank 1 has"
    with pytest.raises(RuntimeError, match=said):
        attached("module", hooks.allreduce(), scaler=scaler)


@pytest.mark.parametrize("road", ["module", "ddp", "compiled"])
@on_processes
def test_a_scale_that_is_none_on_one_rank_ends_the_step_on_all(rank: int, road: str) -> None:
    scaler, model, handle = _counted(road, 1.0)
    scaler.scale = math.inf if rank == 1 else 1.0
    said = "positive, finite scale, got inf" if rank == 1 else None
    with pytest.raises((RuntimeError, ValueError), match=said), backward_of(road):
        model(batch(rank, 0)).sum().backward()
    scaler.scale = 1.0
    with backward_of(road):
        model(batch(rank, 0)).sum().backward()
    handle.remove()


class Halved(hooks.Hook):
    """One of a user's own, which knows nothing of scalers."""

    scales_steps = True

    def average(self, bucket: Any) -> Any:
        return hooks.allreduce().average(bucket)

    def step_scale(self, results: Any, past: Any) -> Tensor:
        return torch.tensor(0.5)


@pytest.mark.parametrize("inside", [False, True], ids=["itself", "in clip"])
def test_a_hook_of_ones_own_need_not_take_the_scale(inside: bool) -> None:
    hook = hooks.clip(1e9, Halved()) if inside else Halved()
    model, handle = attached("module", hook, scaler=Counted(4.0))
    model(batch(0, 0)).sum().backward()
    halved = gradients(model, 1.0)
    handle.remove()
    model.zero_grad()
    model(batch(0, 0)).sum().backward()
    torch.testing.assert_close(halved, gradients(model, 2.0))


# ---- a scaler that a hook was not told of --------------------------------------------------------


def trained(road: str, hook: str, *, scaled: bool, told: bool, steps: int = 3) -> None:
    """Training, with a schedule, which wraps the optimizer's step."""
    run = Steps(road, parse_hook(hook), 0, scaled=scaled, told=told)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number in range(steps):
        optimizer.zero_grad()
        run.scaler.scale(run.model(batch(0, number)).square().sum()).backward()
        run.scaler.step(optimizer)
        run.scaler.update()
        schedule.step()
    run.handle.remove()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "attach(model, hook, scaler=scaler)" in r.message]


@pytest.mark.parametrize("road", ["module", "ddp"])
@pytest.mark.parametrize("hook", ["error_feedback(sign())", "clip(0.5)"])
def test_a_scaler_that_nobody_told_of_is_said_once(
    caplog: pytest.LogCaptureFixture, hook: str, road: str
) -> None:
    trained(road, hook, scaled=True, told=False)
    (said,) = warnings(caplog)
    assert f"'{hook}' was not told of the GradScaler" in said


@pytest.mark.parametrize(
    ("hook", "scaled", "told", "steps"),
    [
        ("error_feedback(sign())", True, True, 3),
        ("error_feedback(sign())", False, False, 100),  # whose sizes vary as they will
        ("blockwise()", True, False, 3),
    ],
    ids=["told", "no scaler", "nothing to follow"],
)
def test_else_nothing_is_said(
    caplog: pytest.LogCaptureFixture, hook: str, scaled: bool, told: bool, steps: int
) -> None:
    trained("module", hook, scaled=scaled, told=told, steps=steps)
    assert warnings(caplog) == []


def test_nothing_is_said_of_another_models_scaler(caplog: pytest.LogCaptureFixture) -> None:
    _model, handle = attached("module", parse_hook("error_feedback(sign())"))
    trained("module", "allreduce()", scaled=True, told=False)
    handle.remove()
    assert warnings(caplog) == []


def test_nobody_looks_for_scalers_once_hooks_are_gone() -> None:
    gc.collect()  # hooks of other tests
    _, handle = attached("module", parse_hook("error_feedback(sign())"))
    assert scaler_watch._handles
    handle.remove()
    assert not scaler_watch._handles


def _graphs_of_step(hook: str) -> int:
    """How many graphs an optimizer's step becomes."""
    torch._dynamo.reset()
    found = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        found.append(graph)
        return graph

    model, handle = attached("module", parse_hook(hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(batch(0, 0)).sum().backward()
    torch.compile(optimizer.step, backend=backend)()
    handle.remove()
    return len(found)


def test_who_looks_for_scalers_breaks_no_graph() -> None:
    assert _graphs_of_step("error_feedback(sign())") == _graphs_of_step("sign()") > 0


@pytest.mark.usefixtures("no_hook_on_optimizers_left")
def test_a_model_that_goes_away_leaves_no_hook_on_optimizers() -> None:
    model = nn.Linear(2, 2)
    handle = attach(model, parse_hook("error_feedback(sign())"))
    model(torch.ones(1, 2)).sum().backward()
    del model, handle
