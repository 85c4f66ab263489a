"""What a handle tells of what its hook has sent."""

from __future__ import annotations

import pytest
import torch
from rank_pool import RankPool
from torch import nn

from torch_commhook import HookStats, attach, hooks
from torch_commhook.testing import run_ranks


def _stats(rank: int, text: str, steps: int, together: bool = True) -> HookStats:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, text) as handle:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(2, 300)).sum().backward()
            optimizer.step()
        if together:
            handle.synchronize()
        return handle.stats()


def test_a_whole_run(two_ranks: RankPool) -> None:
    for stats in two_ranks.run(_stats, "blockwise(bits=4)", 5):
        assert stats.gradient_bytes == 5 * 91203 * 4 and not stats.local_steps
        # Of two ranks a plain all-reduce sends as many bytes as the gradients have.
        assert stats.total_ratio == stats.gradient_bytes / stats.bytes_sent
        assert 7 < stats.total_ratio < 8


@pytest.mark.parametrize("text", ["local_sgd(4)", "local_sgd(4, fragments=2, delay=1)"])
def test_local_steps_are_counted(text: str) -> None:
    for stats in run_ranks(lambda rank: _stats(rank, text, 12, together=False), 2):
        assert stats.local_steps == 12 and stats.gradient_bytes == 12 * 91203 * 4
        exchanges = 3 if "fragments" not in text else 5  # the sixth is under way
        assert stats.steps == exchanges
        assert stats.total_ratio == pytest.approx(4, rel=1e-3 if exchanges == 3 else 0.3)


def test_a_table() -> None:
    (stats, _) = run_ranks(lambda rank: _stats(rank, "allreduce", 3), 2)
    first, header, row = str(stats).splitlines()
    assert first == (
        "3 steps on 2 ranks: this rank sent 1.09 MB, 1.0 times less than plain all-reduces; in the "
        "last step:"
    )
    assert header.split() == ["bucket", "elements", "dtype", "sent", "received"]
    assert row.split() == ["0", "91,203", "float32", "365", "kB", "365", "kB"]


def test_a_hook_that_sends_more_than_plain_all_reduces() -> None:
    stats = HookStats(steps=2, bytes_sent=1400, gradient_bytes=1000, world_size=2)
    assert str(stats) == (
        "2 steps on 2 ranks: this rank sent 1.4 kB, 1.4 times as many bytes as plain all-reduces"
    )


def test_nothing_is_known_of_a_hook_that_counts_nothing() -> None:
    stats = HookStats(steps=2, bytes_sent=None, world_size=2)
    assert str(stats) == "2 steps on 2 ranks: this rank sent an unknown number of bytes"


@pytest.mark.usefixtures("one_rank")
def test_a_policy_whose_pattern_meets_nothing() -> None:
    rules = [("*.weihgt", hooks.cast(torch.bfloat16)), ("dim <= 1", hooks.allreduce())]
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError) as raised:
        attach(model, hooks.policy(rules, hooks.blockwise()))
    assert str(raised.value) == (
        "policy: no parameter matches '*.weihgt'; the model has 'weight', 'bias'"
    )
    attach(model, hooks.policy()).remove()  # the default rules are for any model
    attach(model, hooks.policy([("weigh*", hooks.allreduce())])).remove()
