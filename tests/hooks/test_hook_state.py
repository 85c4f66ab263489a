"""Training goes on from a hook's state, bit for bit."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from state_training import attached, net, train

from torch_commhook import attach, hooks

HOOKS = [
    "error_feedback(blockwise(bits=4))",
    "blockwise(rounding='stochastic', seed=5)",
    "error_feedback(blockwise(bits=4, rounding='stochastic'))",
    "error_feedback(sign())",
    "error_feedback(topk(0.05))",
    "error_feedback(chunk_topk(8, 256))",
    "after(4, error_feedback(blockwise(bits=4)))",
    "policy([('dim <= 1', allreduce()), ('0.*', error_feedback(topk(0.1)))])",
    "clip(0.5, error_feedback(fp8()))",
    # Shards of two kinds, stopped after the change, at it, and before.
    "after(3, error_feedback(blockwise(4, 8)), before=error_feedback(blockwise(8, 64)))",
    "after(5, error_feedback(sign()), before=error_feedback(blockwise(4, 8)))",
    "after(3, error_feedback(topk(0.05)), before=error_feedback(blockwise(8, 64)))",
    "error_feedback(blockwise(bits=4), dtype=torch.bfloat16)",
    "error_feedback(topk(0.05), dtype=torch.bfloat16)",
    "momentum(topk(0.05), beta=0.9)",
    "momentum(topk(0.05), beta=0.9, dtype=torch.bfloat16)",
    "error_feedback(blockwise(bits=4), decay=0.75, dtype=torch.bfloat16)",
    "error_feedback(powersgd(rank=2), decay=0.75, dtype=torch.bfloat16)",
]


def saved_and_read(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _resume(rank: int, hook: str, on_ddp: bool, stop: int) -> bool:
    straight, handle = attached(net(), hook, on_ddp)
    train(straight, rank, range(6))
    handle.remove()
    first, handle = attached(net(), hook, on_ddp)
    train(first, rank, range(stop))
    saved = saved_and_read({"model": first.state_dict(), "hook": handle.state_dict()})
    handle.remove()
    second, handle = attached(net(), hook, on_ddp)
    second.load_state_dict(saved["model"])
    handle.load_state_dict(saved["hook"])
    train(second, rank, range(stop, 6))
    assert handle.state_dict()["steps"] == 6
    handle.remove()
    pairs = zip(straight.parameters(), second.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("on_ddp", [False, True], ids=["module", "ddp"])
def test_training_goes_on_as_if_nothing_had_happened(
    two_ranks: RankPool, hook: str, on_ddp: bool
) -> None:
    stop = 1 + HOOKS.index(hook) % 5
    assert two_ranks.run(_resume, hook, on_ddp, stop) == [True, True]


def _forgotten(rank: int) -> bool:
    """The same without the hook's state, which must show."""
    hook = "error_feedback(blockwise(bits=4))"
    straight, handle = attached(net(), hook, False)
    train(straight, rank, range(4))
    handle.remove()
    first, handle = attached(net(), hook, False)
    train(first, rank, range(2))
    handle.remove()
    handle = attach(first, hooks.error_feedback(hooks.blockwise(bits=4)), bucket_cap_mb=0.02)
    train(first, rank, range(2, 4))
    handle.remove()
    pairs = zip(straight.parameters(), first.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_without_its_state_it_would_show(two_ranks: RankPool) -> None:
    assert two_ranks.run(_forgotten) == [False, False]


def _replaced(rank: int) -> bool:
    """Another hook in its place begins with nothing."""
    model, handle = attached(net(), "error_feedback(blockwise(bits=4))", False)
    train(model, rank, range(2))
    handle.replace(hooks.error_feedback(hooks.sign()))
    assert handle.state_dict()["steps"] == 0
    train(model, rank, range(2, 3))
    assert handle.state_dict()["steps"] == 1
    handle.remove()
    return True


def test_a_hook_in_anothers_place_remembers_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(_replaced) == [True, True]
