"""A hook's state in buckets of another form than those that it was saved from."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank_pool import RankPool
from state_training import attached, mean_error, net, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks
from torch_commhook.hooks.expressions import parse_hook


def _other_buckets(rank: int, ddp_first: bool) -> float:
    """What is remembered, as the mean over the ranks, in buckets of another form."""
    first, handle = attached(net(), "error_feedback(blockwise(bits=4))", ddp_first)
    train(first, rank, range(3))
    state = handle.state_dict()
    handle.remove()
    second = net()
    second.load_state_dict(first.module.state_dict() if ddp_first else first.state_dict())
    other = DDP(second)
    other_handle = attach(other, hooks.error_feedback(hooks.blockwise(bits=4)))
    other_handle.load_state_dict(state)
    train(other, rank, range(3, 4))
    before, after = mean_error(state, rank), mean_error(other_handle.state_dict(), rank)
    other_handle.remove()
    # A step has changed it, but not by more than that step's own gradients.
    return float((before - after).norm() / after.norm())


def _fold(rank: int) -> bool:
    """Nothing of it is lost when other buckets take it over."""
    model, handle = attached(net(), "error_feedback(blockwise(bits=4))", False)
    train(model, rank, range(3))
    state = handle.state_dict()
    handle.remove()
    other = attach(model, hooks.error_feedback(hooks.blockwise(bits=4)), bucket_cap_mb=1)
    split = dict(state)
    names = [name for bucket in state["buckets"] for name in bucket]
    split["buckets"] = [names]  # one bucket, with other shards
    other.load_state_dict(split)
    moved = other.state_dict()
    other.remove()
    torch.testing.assert_close(mean_error(moved, rank), mean_error(state, rank))
    return moved["buckets"] == split["buckets"]


def test_other_buckets_take_over_what_is_remembered(two_ranks: RankPool) -> None:
    assert two_ranks.run(_fold) == [True, True]


def test_buckets_of_another_form(two_ranks: RankPool) -> None:
    for change in two_ranks.run(_other_buckets, False):
        assert 0 < change < 2


def _of_other_dtypes(rank: int, hook: str) -> float:
    first = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    handle = attach(first, parse_hook(hook))
    first(torch.ones(2, 64)).sum().backward()
    state = handle.state_dict()
    handle.remove()
    other = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).to(torch.bfloat16))
    handle = attach(other, parse_hook(hook))
    handle.load_state_dict(state)
    generator = torch.Generator().manual_seed(rank)
    wanted, losses = [], []
    for parameter in other.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        losses.append((parameter * gradient).sum().float())
        wanted.append(gradient / 2)
        dist.all_reduce(wanted[-1])
    sum(losses).backward()  # type: ignore[union-attr]
    handle.remove()
    return max(
        float((parameter.grad - mean).abs().max())  # type: ignore[operator]
        for parameter, mean in zip(other.parameters(), wanted, strict=True)
        if parameter.dtype == torch.float32
    )


def test_a_state_of_other_dtypes(two_ranks: RankPool) -> None:
    """Its buckets held what may not share one here, and would have been rounded to bfloat16."""
    hook = "after(3, error_feedback(blockwise(bits=4)))"
    for error in two_ranks.run(_of_other_dtypes, hook):
        assert error < 1e-6
