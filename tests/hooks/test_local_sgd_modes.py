"""``hooks.local_sgd`` under compilers, of the model and of the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layered_net import batch
from local_training import farthest, parameters_of, same
from mode_cases import Mode
from on_ranks import on_processes
from torch import nn
from torch._dynamo.utils import counters

from torch_commhook import attach
from torch_commhook.hooks import Hook, local_sgd

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")

EAGER = Mode("module", "eager")
PLAIN, STREAMING = local_sgd(2), local_sgd(4, fragments=2, delay=1, mix=0.5)


def _small_net() -> nn.Module:
    """No biases: their gradients are sums that Inductor adds up in another order than eager."""
    torch.manual_seed(0)
    layers = nn.Linear(24, 150, bias=False), nn.ReLU(), nn.Linear(150, 8, bias=False)
    return nn.Sequential(*layers)


def _in_mode(
    rank: int, mode: Mode, hook: Hook = PLAIN, update: str = "optimizer"
) -> dict[str, Any]:
    """Trains with an optimizer, one whose step is compiled, or updates by hand."""
    torch._dynamo.reset()
    counters.clear()
    model = mode.wrap(_small_net())
    handle = attach(model, hook, **mode.attach_options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def by_hand() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad

    take_step = by_hand if update == "by hand" else optimizer.step
    if update == "compiled":
        take_step = torch.compile(take_step)
    captures = []
    with mode.step_function(model) as step:
        for number in range(5):
            optimizer.zero_grad()
            step(batch(rank, number))
            take_step()
            captures.append(counters["stats"]["unique_graphs"])
    handle.synchronize()
    found = {
        "parameters": parameters_of(model),
        "captures": captures,
        "breaks": sum(counters["graph_break"].values()),
        "steps": handle.stats().steps,
        "bytes": handle.stats().bytes_sent,
    }
    handle.remove()
    return found


COMPILED = [
    Mode("ddp", "context", backend="aot_eager"),
    Mode("python_reducer", "context", backend="aot_eager"),
    Mode("module", "compile", backend="aot_eager"),
    Mode("module", "context", fullgraph=True),
]


@pytest.mark.parametrize(
    ("mode", "hook"),
    [(mode, PLAIN) for mode in COMPILED] + [(COMPILED[n], STREAMING) for n in (0, 2)],
    ids=str,
)
@on_processes
def test_compiled_as_in_eager(rank: int, mode: Mode, hook: Hook) -> None:
    wanted = _in_mode(rank, Mode(mode.model, "eager"), hook)
    found = _in_mode(rank, mode, hook)
    assert found["steps"] == wanted["steps"] == 3
    assert found["bytes"] == wanted["bytes"]
    assert same(found["parameters"], wanted["parameters"])
    compiled_once = 1 if mode.model == "ddp" else 0
    assert found["captures"][compiled_once] == found["captures"][-1], "compiled again"
    if mode.model != "ddp":  # whose forward has some of PyTorch's own
        assert found["breaks"] == 0


@on_processes
def test_updates_by_hand_are_noticed_under_compilers(rank: int) -> None:
    wanted = _in_mode(rank, EAGER, update="by hand")
    found = _in_mode(rank, Mode("module", "context", backend="aot_eager"), update="by hand")
    assert found["steps"] == wanted["steps"] == 3
    assert same(found["parameters"], wanted["parameters"])


@on_processes
def test_an_optimizer_that_is_compiled(rank: int) -> None:
    wanted, found = _in_mode(rank, EAGER), _in_mode(rank, EAGER, update="compiled")
    assert found["steps"] == wanted["steps"] == 3
    assert farthest(found["parameters"], wanted["parameters"]) < 1e-4
