"""The process groups on which second stages travel."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from staged_steps import BLOCKWISE, TOPK, Around, X, backward, gloo_groups, model
from torch.distributed import distributed_c10d

from torch_commhook import attach, hooks
from torch_commhook.codecs import Codec
from torch_commhook.collectives import compressed_all_reduce
from torch_commhook.collectives.gloo_groups import second_group
from torch_commhook.collectives.turns import turns_of
from torch_commhook.testing import run_ranks


def _second_groups(rank: int) -> dict[str, Any]:
    before = gloo_groups()
    group = dist.new_group([0, 1])
    found: dict[str, Any] = {"own": gloo_groups() - before}
    compressed_all_reduce(X, TOPK, group=group).wait()
    found["of one stage"] = gloo_groups() - before
    for _ in range(5):
        compressed_all_reduce(X, BLOCKWISE, group=group).wait()
    found["of two stages"] = gloo_groups() - before
    second = second_group(group)
    found["same"] = second is second_group(group)
    found["ranks"] = dist.get_process_group_ranks(second)
    found["timeout"] = second._get_backend(torch.device("cpu")).options._timeout
    turns = turns_of(second)
    found["turns"] = len(turns._waiting)
    dist.destroy_process_group(group)
    del group, second, turns
    found["left"] = gloo_groups() - before
    # And again, for another group over the same ranks.
    group = dist.new_group([0, 1])
    found["again"] = compressed_all_reduce(X, BLOCKWISE, group=group).wait().sum().item()
    dist.destroy_process_group(group)
    return found


def test_second_groups(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_second_groups):
        timeout = found.pop("timeout")
        assert timeout == distributed_c10d.default_pg_timeout
        assert found == {
            "own": 1,
            "of one stage": 1,
            "of two stages": 2,
            "same": True,
            "ranks": [0, 1],
            "turns": 0,
            "left": 0,
            "again": 1200.0,
        }


def _groups_of_some(rank: int) -> list[float]:
    """Ranks 0 and 2 have a group; rank 1 knows of none."""
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1,))}
    ranks = (1,) if rank == 1 else (0, 2)
    sums = [
        compressed_all_reduce(X * (rank + 1), BLOCKWISE, group=groups[ranks]).wait().mean().item()
        for _ in range(3)
    ]
    dist.destroy_process_group(groups[ranks])
    return sums


def test_groups_of_some_ranks(pools: dict[int, RankPool]) -> None:
    assert pools[3].run(_groups_of_some) == [[4.0] * 3, [2.0] * 3, [4.0] * 3]


def _groups_of_a_model(rank: int, codecs: list[Codec]) -> list[int]:
    """After each of attaching, training and removing."""
    counts = [gloo_groups()]
    for codec in codecs:
        net = model()
        handle = attach(net, hooks.compressed(codec))
        counts.append(gloo_groups() - counts[0])
        for _ in range(3):
            backward(net, rank)
        counts.append(gloo_groups() - counts[0])
        handle.remove()
        del net, handle
        counts.append(gloo_groups() - counts[0])
    return counts[1:]


def test_groups_of_a_model(two_ranks: RankPool) -> None:
    """Both are made when a hook is attached, and go with it."""
    for counts in two_ranks.run(_groups_of_a_model, [TOPK, BLOCKWISE, BLOCKWISE]):
        assert counts == [1, 1, 0, 2, 2, 0, 2, 2, 0]


def test_other_groups_have_no_second() -> None:
    def run(rank: int) -> bool:
        return second_group(dist.group.WORLD) is None

    assert run_ranks(run, 2) == [True, True]


def _comes_late(rank: int) -> str:
    """The second of two calls, before which rank 0 has closed its connections."""
    group = dist.new_group([0, 1])
    compressed_all_reduce(X, BLOCKWISE, group=group).wait()
    if rank == 0:
        dist.destroy_process_group(group)
        del group  # which closes them
        dist.barrier()
        return "gloo"
    dist.barrier()
    future = compressed_all_reduce(X, BLOCKWISE, group=group)
    with pytest.raises(RuntimeError) as raised:
        future.wait()
    dist.destroy_process_group(group)
    return str(raised.value)


def test_the_future_tells_of_a_closed_connection(two_ranks: RankPool) -> None:
    assert all("gloo" in said for said in two_ranks.run(_comes_late))


def _group_goes_first(rank: int, inner: Codec) -> int:
    """Callbacks, on threads of the group's own, are the last who could keep it."""
    done = 0
    for _ in range(10):
        group = dist.new_group([0, 1])
        codec = Around(inner, lambda method: time.sleep(0.005))
        future = compressed_all_reduce(X, codec, group=group)
        future.wait()
        slow = compressed_all_reduce(X, codec, group=group)
        dist.destroy_process_group(group)
        del group
        with contextlib.suppress(RuntimeError):  # it may have been left in its middle
            slow.wait()
        done += 1
    return done


@pytest.mark.parametrize("codec", [BLOCKWISE, TOPK], ids=repr)
def test_a_group_that_goes_first(two_ranks: RankPool, codec: Codec) -> None:
    """A thread of Gloo's that ends its own group ends the process."""
    assert two_ranks.run(_group_goes_first, codec) == [10, 10]
