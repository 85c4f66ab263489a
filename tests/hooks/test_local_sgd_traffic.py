"""What ``hooks.local_sgd`` sends, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_training import (
    attached,
    net,
    train,
)
from rank_pool import RankPool

from torch_commhook import attach, hooks
from torch_commhook.hooks import Hook, local_sgd
from torch_commhook.process_group import RecordingProcessGroup
from torch_commhook.testing import simulate

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")

_INT4 = "int4 with error feedback"


def _inner(name: str) -> Hook:
    if name == _INT4:
        return hooks.error_feedback(hooks.blockwise(bits=4))
    return hooks.cast(torch.bfloat16) if name == "cast" else hooks.allreduce()


def _traffic(rank: int, name: str, H: int, road: str) -> Any:  # noqa: N803
    model, handle = attached(local_sgd(H, hook=_inner(name)), road)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), rank, 16)
    stats = handle.stats()
    handle.remove()
    return stats.steps, stats.bytes_sent, stats.bytes_sent_last_step, len(stats.buckets)


@pytest.mark.parametrize("road", ["module", "ddp"])
@pytest.mark.parametrize("name", ["allreduce", "cast", _INT4])
def test_traffic_falls_by_h(two_ranks: RankPool, name: str, road: str) -> None:
    numel = sum(parameter.numel() for parameter in net().parameters())
    each = two_ranks.run(_traffic, name, 1, road)[0]
    steps, sent, last, buckets = two_ranks.run(_traffic, name, 8, road)[0]
    assert (each[0], steps) == (16, 2)
    assert buckets > 1
    assert last == each[2]
    assert sent == 2 * last
    if name != _INT4:
        assert last == (4 if name == "allreduce" else 2) * numel  # 2 (W - 1) / W = 1 for 2 ranks
    else:
        assert last < 4 * numel / 6


def _recorded(rank: int, name: str, staged: bool) -> tuple[list[int], int | None, int]:
    recording = RecordingProcessGroup(dist.group.WORLD)
    model = net()
    handle = attach(model, local_sgd(4, hook=_inner(name)), process_group=recording)
    if staged:
        handle.register_prehook(lambda gradients: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recording.clear()  # of what attach() sends
    counts = []
    for step in range(8):
        train(model, optimizer, rank, range(step, step + 1))
        counts.append(len(recording.records))
    sent, total = handle.stats().bytes_sent, recording.total.bytes_sent
    handle.remove()
    return counts, sent, total


@pytest.mark.parametrize(
    ("name", "staged"), [("allreduce", False), ("allreduce", True), (_INT4, False)]
)
def test_nothing_travels_but_what_is_counted(two_ranks: RankPool, name: str, staged: bool) -> None:
    numel = sum(parameter.numel() for parameter in net().parameters())
    inner = _inner(name)
    wire_bytes = simulate(inner, [[torch.zeros(numel)]] * 2).bytes_sent
    results = two_ranks.run(_recorded, name, staged)
    for (counts, sent, total), of_rank in zip(results, wire_bytes, strict=True):
        assert counts[:3] == [0, 0, 0] and counts[3] == counts[6] > 0
        assert sent == total == 2 * of_rank
