"""Ranks that run a step in different modes: what one compiles, another runs in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mode_cases import BUCKET_CAP_MB, Mode
from rank_pool import RankPool
from torch import Tensor, nn

from torch_commhook import attach, hooks
from torch_commhook.hooks import Hook

# No hooks whose buckets eager forms anew in the order of arrival: compiled code has another order.
HOOKS: dict[str, Callable[[], Hook]] = {
    "blockwise": lambda: hooks.error_feedback(hooks.blockwise(bits=4)),
    "topk": lambda: hooks.error_feedback(hooks.topk(0.1)),
    "momentum": lambda: hooks.momentum(hooks.topk(0.1), 0.9),
    "randomk": lambda: hooks.randomk(0.1),
    "powersgd": lambda: hooks.error_feedback(hooks.powersgd(2, min_compression_rate=1.0)),
}


def _steps(rank: int, name: str, compiling: int) -> list[list[Tensor]]:
    """The gradients of two steps, which the ranks from ``compiling`` on compile."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    handle = attach(model, HOOKS[name](), bucket_cap_mb=BUCKET_CAP_MB)
    runner = "context" if rank >= compiling else "eager"
    found = []
    with Mode("module", runner, backend="aot_eager").step_function(model) as step:
        for number in range(2):
            model.zero_grad()
            step(torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * number + rank)))
            found.append([parameter.grad.clone() for parameter in model.parameters()])
    handle.remove()
    return found


@pytest.mark.parametrize("name", HOOKS)
def test_the_same_bits_in_all_modes(three_ranks: RankPool, name: str) -> None:
    eager = three_ranks.run(_steps, name, 3)[0]
    for compiling in (0, 1):
        for found in three_ranks.run(_steps, name, compiling, timeout=120):
            for step, want in zip(found, eager, strict=True):
                assert all(map(torch.equal, step, want))
