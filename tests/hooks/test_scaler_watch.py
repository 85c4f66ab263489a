"""Scalers that a hook was not told of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scaled_training import Steps, attached, batch
from torch import Tensor, nn

from torch_commhook import attach
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.memory import scaler_watch


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


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("road", ["module", "ddp"])
@pytest.mark.parametrize("hook", ["error_feedback(sign())", "clip(0.5)"])
def test_a_scaler_that_nobody_told_of_is_said_once(
    caplog: pytest.LogCaptureFixture, hook: str, road: str
) -> None:
    trained(road, hook, scaled=True, told=False)
    (said,) = warnings(caplog)
    assert f"'{hook}' was not told of the GradScaler" in said


@pytest.mark.usefixtures("one_rank")
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


@pytest.mark.usefixtures("one_rank")
def test_nothing_is_said_of_another_models_scaler(caplog: pytest.LogCaptureFixture) -> None:
    _model, handle = attached("module", parse_hook("error_feedback(sign())"))
    trained("module", "allreduce()", scaled=True, told=False)
    handle.remove()
    assert warnings(caplog) == []


@pytest.mark.usefixtures("one_rank")
def test_nobody_looks_for_scalers_once_hooks_are_gone() -> None:
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


@pytest.mark.usefixtures("one_rank")
def test_who_looks_for_scalers_breaks_no_graph() -> None:
    assert _graphs_of_step("error_feedback(sign())") == _graphs_of_step("sign()") > 0


@pytest.mark.usefixtures("one_rank", "no_hook_on_optimizers_left")
def test_a_model_that_goes_away_leaves_no_hook_on_optimizers() -> None:
    model = nn.Linear(2, 2)
    handle = attach(model, parse_hook("error_feedback(sign())"))
    model(torch.ones(1, 2)).sum().backward()
    del model, handle
