"""The pool of ranks that tests share: what one function leaves is not there for the next."""

from __future__ import annotations

import torch.distributed as dist
from rank_pool import RankPool
from torch.distributed import distributed_c10d


def _leave_a_group_of_one(rank: int) -> None:
    dist.new_group([0])  # which rank 1 does not count


def _groups(rank: int) -> int:
    return len(distributed_c10d._world.pg_names)


def test_groups_end_with_their_function(two_ranks: RankPool) -> None:
    two_ranks.run(_leave_a_group_of_one)
    assert two_ranks.run(_groups) == [1, 1]
