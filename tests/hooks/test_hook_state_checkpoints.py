"""A hook's state in ``torch.distributed.checkpoint``."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from rank_pool import RankPool
from state_training import attached, net, train


def _checkpoint(rank: int, folder: str) -> bool:
    model, handle = attached(net(), "error_feedback(blockwise(bits=4))", False)
    train(model, rank, range(2))
    state = handle.state_dict()
    checkpoint.save({"hook": state}, checkpoint_id=folder)
    train(model, rank, range(2, 3))
    read = {"hook": handle.state_dict()}
    checkpoint.load(read, checkpoint_id=folder)
    handle.load_state_dict(read["hook"])
    again = handle.state_dict()
    handle.remove()
    own, own_again = state[f"rank{rank}"], again[f"rank{rank}"]
    assert again["steps"] == 2
    return all(
        torch.equal(own[kind][name], own_again[kind][name]) for kind in own for name in own[kind]
    )


def test_distributed_checkpoints(two_ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert two_ranks.run(_checkpoint, folder) == [True, True]


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


def _at_any_time(rank: int, hook: str, on_ddp: bool) -> list[bool]:
    model, handle = attached(net(), hook, on_ddp)
    found = [_keys(handle.state_dict(), rank)]
    for step in range(3):
        train(model, rank, range(step, step + 1))
        found.append(_keys(handle.state_dict(), rank))
    # A state that was loaded is there at once.
    state = handle.state_dict()
    other_model, other = attached(net(), hook, on_ddp)
    other.load_state_dict(state)
    again = other.state_dict()
    found.append(_keys(again, rank))
    kept = all(
        torch.equal(again[f"rank{rank}"][kind][name], tensor)
        for kind, tensors in state[f"rank{rank}"].items()
        for name, tensor in tensors.items()
    )
    for one in (handle, other):
        one.synchronize()
        one.remove()
    del other_model
    return [kept, *(one == found[0] for one in found)]


@pytest.mark.parametrize("on_ddp", [False, True])
@pytest.mark.parametrize("hook", KINDS)
def test_a_state_always_has_the_same(two_ranks: RankPool, hook: str, on_ddp: bool) -> None:
    """Before the first step, and whatever the buckets: ``torch.distributed.checkpoint`` asks."""
    for found in two_ranks.run(_at_any_time, hook, on_ddp):
        assert all(found), found


def _from_a_fresh_template(rank: int, hook: str, on_ddp: bool, folder: str) -> bool:
    model, handle = attached(net(), hook, on_ddp)
    train(model, rank, range(4))
    state = handle.state_dict()
    checkpoint.save({"hook": state}, checkpoint_id=folder)
    dist.barrier()
    _, other = attached(net(), hook, on_ddp)
    template = {"hook": other.state_dict()}
    checkpoint.load(template, checkpoint_id=folder)
    other.load_state_dict(template["hook"])
    again = other.state_dict()
    for one in (handle, other):
        one.synchronize()
        one.remove()
    return all(
        torch.equal(again[of][kind][name], tensor)
        for of in ("shared", f"rank{rank}")
        for kind, tensors in state[of].items()
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("on_ddp", [False, True])
@pytest.mark.parametrize("hook", [KINDS[0], "local_sgd(3)", KINDS[-1]])
def test_a_checkpoint_into_a_fresh_template(two_ranks: RankPool, hook: str, on_ddp: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert two_ranks.run(_from_a_fresh_template, hook, on_ddp, folder) == [True, True]
