"""Nested groups of ranks, how ranks find out which share a host, and the groups of a model."""

from __future__ import annotations

import contextlib
import gc
import random
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import of_all_ranks, on_pool, on_processes
from rank_pool import RankPool
from staged_steps import BLOCKWISE, TOPK, Around, X, backward, known_groups, model

from torch_commhook import ProcessGroup, attach, hooks
from torch_commhook.codecs import Codec
from torch_commhook.collectives import compressed_all_reduce
from torch_commhook.collectives.gloo_groups import state_of
from torch_commhook.collectives.hosts import group_over, label_of_host, nest, numbered_labels
from torch_commhook.testing import run_ranks


@pytest.mark.parametrize(
    ("levels", "sizes"),
    [
        ([[0, 0, 1, 1]], (2, 2)),
        ([[0, 1, 0, 1]], (2, 2)),
        ([[0, 0, 0, 0]], (4, 1)),
        ([[0, 1, 2, 3]], (4,)),
        ([2], (2, 2)),
        ([1], (4,)),
        ([4], (4, 1)),
        ([2, [0, 0, 0, 0]], (2, 2, 1)),
        ([[0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 0, 1, 1, 1, 1]], (2, 2, 2)),
        ([2, 2], (2, 2, 2)),
        # Hosts of two ranks and of four.
        ([[0, 0, 1, 1, 1, 1]], (2, 3)),
        # And of one rank and of three.
        ([[0, 1, 1, 1]], (4,)),
        # Racks of one host and of two.
        ([[0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1]], (2, 3)),
    ],
)
def test_nested_groups(levels: list[Any], sizes: tuple[int, ...]) -> None:
    ranks = next((len(level) for level in levels if isinstance(level, list)), 4)
    ranks = 8 if levels == [2, 2] else ranks
    check(levels, ranks, sizes)


@pytest.mark.parametrize("kind", [dist.ProcessGroup, ProcessGroup])
def test_the_state_of_a_group_ends_with_it(kind: type[dist.ProcessGroup]) -> None:
    group = kind(0, 1)
    state_of(group).is_lost = True
    assert state_of(group).is_lost and not state_of(kind(0, 1)).is_lost
    kept = weakref.ref(state_of(group).proven_codecs)
    del group
    gc.collect()
    assert kept() is None


def check(levels: Sequence[Any], ranks: int, sizes: tuple[int, ...] | None = None) -> None:
    """Each rank is in one group a level, and all of them together reach all ranks once."""
    found = nest(levels, ranks)
    *inner, units = found.sizes
    assert sizes is None or found.sizes == sizes
    reached = [{rank} for rank in range(ranks)]
    for level, size in enumerate(inner):
        # Those that hold a share are the same in all groups of the next level: a place in one.
        for rank in range(ranks):
            group = found.inner[rank][level]
            assert rank in group and len(group) == size and group == sorted(group)
            assert all(found.inner[other][level] == group for other in group)
        reached = [
            set().union(*(reached[other] for other in found.inner[rank][level]))
            for rank in range(ranks)
        ]
        assert all(len(each) == len(reached[0]) for each in reached)
    for rank in range(ranks):
        places = {
            tuple(groups.index(other) for groups in found.inner[other])
            for other in found.outer[rank]
        }
        assert len(places) == 1 and len(found.outer[rank]) == units
        assert set().union(*(reached[other] for other in found.outer[rank])) == set(range(ranks))


@pytest.mark.parametrize("seed", range(20))
def test_any_hosts_and_racks(seed: int) -> None:
    draw = random.Random(seed)
    hosts_of_rack = [draw.randrange(1, 4) for _ in range(draw.randrange(1, 4))]
    pairs, host = [], 0
    for rack, count in enumerate(hosts_of_rack):
        for _ in range(count):
            pairs += [(host, rack)] * draw.choice([2, 4])
            host += 1
    draw.shuffle(pairs)
    check([[host for host, _ in pairs], [rack for _, rack in pairs]], len(pairs))


def test_units_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"levels\[0\] must divide the 4 units .* got 3$"):
        nest([3], 4)
    with pytest.raises(ValueError, match=r"levels\[1\] must have whole units .* ranks 0 and 1 of"):
        nest([[0, 0, 1, 1], [0, 1, 1, 0]], 4)
    assert nest([[0, 0, 1, 1, 1, 1]], 6).uneven == [(0, [2, 4])]
    assert nest([[0, 0, 1, 1]], 4).uneven == []


def _labels(rank: int) -> list[list[list[int]]]:
    own = [f"h{rank // 2}", "a", str(rank)]
    return [numbered_labels(dist.group.WORLD, own) for _ in range(2)]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_labels_of_simulated_ranks(world_size: int) -> None:
    wanted = [[r // 2 for r in range(world_size)], [0] * world_size, list(range(world_size))]
    assert run_ranks(_labels, world_size) == [[wanted, wanted]] * world_size


def test_labels_of_processes(four_ranks: RankPool) -> None:
    wanted = [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 3]]
    assert four_ranks.run(_labels) == [[wanted, wanted]] * 4


def test_different_numbers_of_labels() -> None:
    def on_rank(rank: int) -> str:
        with pytest.raises(ValueError) as raised:
            numbered_labels(dist.group.WORLD, ["a"] * (rank + 1))
        return str(raised.value)

    assert set(run_ranks(on_rank, 2)) == {"hierarchical: levels must be as many on all ranks"}


@on_processes
def test_processes_of_one_machine_have_one_label(rank: int) -> None:
    first, second = of_all_ranks(label_of_host())
    assert first == second and len(first) == 16


def _pairs(rank: int) -> list[Any]:
    world = dist.group.WORLD
    pair = group_over(world, [rank // 2 * 2, rank // 2 * 2 + 1])
    total = torch.ones(3) * rank
    dist.all_reduce(total, group=pair)
    again = group_over(world, [rank // 2 * 2, rank // 2 * 2 + 1])
    return [total.tolist(), again is pair, pair.rank(), dist.get_process_group_ranks(pair)]


def test_groups_over_some_ranks(four_ranks: RankPool) -> None:
    for found in (four_ranks.run(_pairs), run_ranks(_pairs, 4)):
        assert found == [
            [[1.0 + rank // 2 * 4] * 3, True, rank % 2, [rank // 2 * 2, rank // 2 * 2 + 1]]
            for rank in range(4)
        ]


# ---- the library's own groups --------------------------------------------------------------------


@on_processes
def test_second_stages_need_no_group(rank: int) -> None:
    before = known_groups()
    group = dist.new_group([0, 1])
    for codec in (TOPK, BLOCKWISE, BLOCKWISE):
        found = compressed_all_reduce(X, codec, group=group).wait()
    assert found.sum().item() == 1200.0
    assert known_groups() == before + 1
    dist.destroy_process_group(group)
    del group
    assert known_groups() == before
    # And again, for another group over the same ranks.
    group = dist.new_group([0, 1])
    assert compressed_all_reduce(X, BLOCKWISE, group=group).wait().sum().item() == 1200.0
    dist.destroy_process_group(group)


@on_pool("three_ranks")
def test_groups_of_some_ranks(rank: int) -> None:
    """Ranks 0 and 2 have a group; rank 1 knows of none."""
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1,))}
    ranks = (1,) if rank == 1 else (0, 2)
    sums = [
        compressed_all_reduce(X * (rank + 1), BLOCKWISE, group=groups[ranks]).wait().mean().item()
        for _ in range(3)
    ]
    dist.destroy_process_group(groups[ranks])
    assert sums == [2.0 if rank == 1 else 4.0] * 3


@on_processes
def test_groups_of_a_model(rank: int) -> None:
    """One is made when a hook is attached, and goes with it."""
    counts = [known_groups()]
    for codec in (TOPK, BLOCKWISE, BLOCKWISE):
        net = model()
        handle = attach(net, hooks.compressed(codec))
        counts.append(known_groups() - counts[0])
        for _ in range(3):
            backward(net, rank)
        counts.append(known_groups() - counts[0])
        handle.remove()
        del net, handle
        counts.append(known_groups() - counts[0])
    assert counts[1:] == [1, 1, 0] * 3


@on_processes
def test_the_future_tells_of_a_closed_connection(rank: int) -> None:
    """The second of two calls, before which rank 0 has closed its connections."""
    group = dist.new_group([0, 1])
    compressed_all_reduce(X, BLOCKWISE, group=group).wait()
    if rank == 0:
        dist.destroy_process_group(group)
        del group  # which closes them
        dist.barrier()
        return
    dist.barrier()
    future = compressed_all_reduce(X, BLOCKWISE, group=group)
    with pytest.raises(RuntimeError, match="rank 0 has left"):
        future.wait()
    dist.destroy_process_group(group)


@on_processes
@pytest.mark.parametrize("inner", [BLOCKWISE, TOPK], ids=repr)
def test_a_group_that_goes_first(rank: int, inner: Codec) -> None:
    """A thread of Gloo's that ends its own group ends the process.

    Callbacks, on threads of the group's own, are the last who could keep it.
    """
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
