"""The pool of ranks that tests share: what one function leaves is not there for the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import KEPT_GROUPS, RankPool
from sharded_models import Mesh
from torch.distributed import distributed_c10d

from torch_commhook import attach
from torch_commhook.codecs import CODECS
from torch_commhook.collectives import compressed_all_reduce

_kept: list[Any] = []


def _leave_a_group_of_one(rank: int) -> None:
    dist.new_group([0])  # which rank 1 does not count


def _leave_a_failed_step(rank: int) -> None:
    model = torch.nn.Linear(3, 2)
    _kept.append(attach(model, lambda state, bucket: [][rank]))
    try:
        model(torch.ones(1, 3)).sum().backward()
    except IndexError:
        return
    raise AssertionError("the hook did not raise")


def _sum_in_two_stages(rank: int) -> float:
    x = torch.ones(100)
    return float(compressed_all_reduce(x, CODECS["blockwise"]()).wait().sum())


def _make_a_mesh(rank: int) -> None:
    Mesh.of("fsdp-2")  # whose groups stay


def _groups(rank: int) -> int:
    default = dist.group.WORLD.group_name  # which a mesh may have as its own
    names = distributed_c10d._world.pg_names.values()
    return sum(name == default or name not in KEPT_GROUPS for name in names)


@pytest.mark.parametrize("leave", [_leave_a_group_of_one, _leave_a_failed_step, _make_a_mesh])
def test_groups_end_with_their_function(two_ranks: RankPool, leave: Callable[[int], None]) -> None:
    for _ in range(2):
        assert two_ranks.run(_sum_in_two_stages) == [200.0, 200.0]
        two_ranks.run(leave)
    assert two_ranks.run(_groups) == [1, 1]
