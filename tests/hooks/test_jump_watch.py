"""A scale of the loss that a hook was not told of: a warning once, and few false ones."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.memory.jump_watch import JumpWatch

pytestmark = pytest.mark.usefixtures("one_rank")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())


def batch(number: int) -> Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(number))


class Unused(nn.Linear):
    """A part of a model that no loss depends on."""

    def __init__(self) -> None:
        super().__init__(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x


def scaled_by_hand(
    road: str,
    hook: str,
    scales: list[float],
    *,
    unused: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Train, with each step's loss multiplied by its scale."""
    model = net().to(dtype)
    if unused:
        model.insert(2, Unused())
    if road in ("ddp", "registered"):
        model = DDP(model, bucket_cap_mb=0.01, find_unused_parameters=unused)
    with ExitStack() as stack:
        if road == "registered":
            model.register_comm_hook(None, parse_hook(hook))
        else:
            options = {} if road == "ddp" else {"gradient_as_bucket_view": road == "views"}
            stack.callback(attach(model, parse_hook(hook), **options).remove)
        for number, scale in enumerate(scales):
            model.zero_grad()
            (scale * model(batch(number).to(dtype)).square().sum()).backward()


def jumps(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "from one step to the next" in r.message]


@pytest.mark.parametrize("jump", [-4, 1], ids=lambda jump: f"2**{jump}")
@pytest.mark.parametrize(
    ("road", "hook"),
    [
        *((road, "error_feedback(sign())") for road in ("module", "views", "ddp", "registered")),
        ("module", "error_feedback(topk(density=0.05))"),
        ("module", "clip(0.5)"),
        ("ddp", "clip(0.5)"),
    ],
)
def test_gradients_that_jump_are_said_once(
    caplog: pytest.LogCaptureFixture, road: str, hook: str, jump: int
) -> None:
    scaled_by_hand(road, hook, [1.0] * 10 + [2.0**jump] * 12 + [2.0 ** (2 * jump)] * 12)
    (said,) = jumps(caplog)
    assert f"'{hook}': gradients have become 2**{jump} times" in said


@pytest.mark.parametrize(
    ("road", "scales", "options"),
    [
        *(
            (road, [1.0] * 10 + [0.25] * 9, {"dtype": dtype})
            for road in ("module", "ddp", "registered")
            for dtype in (torch.float64, torch.bfloat16)
        ),
        *((road, [1.0] * 8 + [0.25] * 9, {"unused": True}) for road in ("module", "views", "ddp")),
        ("registered", [1.0] * 9 + [math.nan, 0.0, math.inf] + [0.25] * 8, {}),
    ],
)
def test_also_in_other_dtypes_beside_unused_parameters_and_after_steps_without_gradients(
    caplog: pytest.LogCaptureFixture, road: str, scales: list[float], options: dict[str, Any]
) -> None:
    scaled_by_hand(road, "error_feedback(sign())", scales, **options)
    assert len(jumps(caplog)) == 1


@pytest.mark.parametrize(
    ("hook", "scales"),
    [
        ("error_feedback(sign())", [1.0] * 30),
        ("error_feedback(sign())", [1.0] * 8 + [3.0] * 12),
        ("error_feedback(sign())", [1.0] * 8 + [4.0, 4.0, 4.0] + [1.0] * 12),
        ("error_feedback(sign())", [1.05**step for step in range(60)]),
        ("error_feedback(sign())", [1.0, 4.0] * 20),
        ("blockwise()", [1.0] * 8 + [4.0] * 12),
        ("local_sgd(2)", [1.0] * 8 + [4.0] * 12),
    ],
    ids=["no", "by no power", "for three steps", "slow", "in turns", "no matter", "local"],
)
def test_other_jumps_are_not(
    caplog: pytest.LogCaptureFixture, hook: str, scales: list[float]
) -> None:
    scaled_by_hand("module", hook, scales)
    assert jumps(caplog) == []


class Event:
    """An event of a device, which is done when two more have been recorded."""

    now = 0

    def __init__(self) -> None:
        Event.now += 1
        self.recorded = Event.now

    def query(self) -> bool:
        return Event.now >= self.recorded + 2


def test_a_norm_is_read_when_it_has_come() -> None:
    watch = JumpWatch("hook", keeps_error=True)
    found = [watch.read_when_come(torch.tensor(float(step + 1)), Event()) for step in range(6)]
    assert found == [[], [], [1.0], [2.0], [3.0], [4.0]]  # each two steps late
