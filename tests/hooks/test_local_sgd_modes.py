"""``hooks.local_sgd`` under compilers, of the model and of the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layered_net import batch
from local_training import farthest, parameters_of, same
from modes import Mode
from rank_pool import RankPool
from torch import nn
from torch._dynamo.utils import counters

from torch_commhook import attach
from torch_commhook.hooks import Hook, local_sgd

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")


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
def test_compiled_as_in_eager(two_ranks: RankPool, mode: Mode, hook: Hook) -> None:
    wanted = two_ranks.run(_in_mode, Mode(mode.model, "eager"), hook)
    results = two_ranks.run(_in_mode, mode, hook, timeout=120)
    for result, want in zip(results, wanted, strict=True):
        assert (result["steps"], result["bytes"]) == (want["steps"], want["bytes"])
        assert result["steps"] == 3
        assert same(result["parameters"], want["parameters"])
        compiled_once = 1 if mode.model == "ddp" else 0
        assert result["captures"][compiled_once] == result["captures"][-1], "compiled again"
        if mode.model != "ddp":  # whose forward has some of PyTorch's own
            assert result["breaks"] == 0


def test_updates_by_hand_are_noticed_under_compilers(two_ranks: RankPool) -> None:
    eager, compiled = Mode("module", "eager"), Mode("module", "context", backend="aot_eager")
    wanted = two_ranks.run(_in_mode, eager, PLAIN, "by hand")
    results = two_ranks.run(_in_mode, compiled, PLAIN, "by hand", timeout=120)
    for result, want in zip(results, wanted, strict=True):
        assert result["steps"] == want["steps"] == 3
        assert same(result["parameters"], want["parameters"])


def test_an_optimizer_that_is_compiled(two_ranks: RankPool) -> None:
    mode = Mode("module", "eager")
    wanted = two_ranks.run(_in_mode, mode)
    results = two_ranks.run(_in_mode, mode, PLAIN, "compiled", timeout=120)
    for result, want in zip(results, wanted, strict=True):
        assert result["steps"] == want["steps"] == 3
        assert farthest(result["parameters"], want["parameters"]) < 1e-4
