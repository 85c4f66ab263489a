"""A hook's state in ``torch.distributed.checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from nested_values import different_paths
from on_ranks import on_processes, on_ranks
from state_training import attached, net, train

KINDS = [
    "error_feedback(blockwise(bits=4))",
    "error_feedback(topk(0.1))",
    "powersgd(rank=2)",
    "policy([('dim <= 1', allreduce())], error_feedback(sign()))",
    "adaptive(20000, every=2)",
    "after(2, error_feedback(topk(0.1)), before=error_feedback(blockwise()))",
    "local_sgd(3)",
    "local_sgd(2, hook=error_feedback(blockwise()), error_reset=True)",
    "local_sgd(2, hook=error_feedback(blockwise()), delay=1)",
]


def _keys(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """What a state has, whatever its values."""
    return {
        kind: {name: tensor.shape for name, tensor in tensors.items()}
        for kind, tensors in {**state[f"rank{rank}"], **state["shared"]}.items()
    }


@pytest.mark.parametrize("on_ddp", [False, True])
@pytest.mark.parametrize("hook", KINDS)
@on_ranks(2)
def test_a_state_always_has_the_same(rank: int, hook: str, on_ddp: bool) -> None:
    """Before the first step, and whatever the buckets: ``torch.distributed.checkpoint`` asks."""
    model, handle = attached(net(), hook, on_ddp)
    before = _keys(handle.state_dict(), rank)
    for step in range(3):
        train(model, rank, range(step, step + 1))
        assert _keys(handle.state_dict(), rank) == before
    # A state that was loaded is there at once.
    state = handle.state_dict()
    other_model, other = attached(net(), hook, on_ddp)
    other.load_state_dict(state)
    again = other.state_dict()
    assert _keys(again, rank) == before
    assert different_paths(again[f"rank{rank}"], state[f"rank{rank}"]) == []
    for one in (handle, other):
        one.synchronize()
        one.remove()
    del other_model


@pytest.mark.parametrize("on_ddp", [False, True])
@pytest.mark.parametrize("hook", [KINDS[0], "local_sgd(3)", KINDS[-1]])
@on_processes
def test_a_checkpoint_into_a_fresh_template(
    rank: int, tmp_path: Path, hook: str, on_ddp: bool
) -> None:
    model, handle = attached(net(), hook, on_ddp)
    train(model, rank, range(4))
    state = handle.state_dict()
    checkpoint.save({"hook": state}, checkpoint_id=tmp_path)
    dist.barrier()
    _, other = attached(net(), hook, on_ddp)
    template = {"hook": other.state_dict()}
    checkpoint.load(template, checkpoint_id=tmp_path)
    other.load_state_dict(template["hook"])
    again = other.state_dict()
    for one in (handle, other):
        one.synchronize()
        one.remove()
    for key in ("steps", "shared", f"rank{rank}"):
        assert different_paths(again[key], state[key]) == []
