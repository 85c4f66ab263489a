"""Bytes on the wire of every hook on sharded models, for 2 to 8 ranks, as the groups count them.

The ranks are threads of one process, whose simulated groups count what each rank sends. They run
``fully_shard`` itself. The expected bytes are written out here: nothing asks a codec or a hook.

Shards of the even model end where blocks end, so that the messages have exactly the bytes that
``docs/sharded.md`` gives for an element. Shards of the uneven one end inside of blocks, and the
last ranks have none of the last layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_bytes import (
    ACROSS,
    CASES,
    CASES_ACROSS,
    INT4,
    INT8,
    SIGN_BLOCK,
    UNEVEN,
    Attachment,
    Place,
    bytes_over,
    chunks,
    eighth,
    exchanged,
    in_blocks,
    low_rank,
    named,
    numels,
    of_cases,
    of_chunks,
    plain,
    quiet,
    recorded_groups,
    ring,
    second_step,
    second_steps,
    some_long,
)
from sharded_models import Layers, Mesh, by_layer, loss_of, on_processes

from torch_commhook import attach, codecs, hooks
from torch_commhook.collectives import compressed_all_gather, compressed_reduce_scatter
from torch_commhook.metrics import HookStats
from torch_commhook.process_group.simulated.link import Links
from torch_commhook.testing.ranks import run_with_links

both_models = pytest.mark.parametrize("is_even", [True, False], ids=["even", "uneven"])


@both_models
@pytest.mark.parametrize("ranks", some_long(range(2, 9), [3, 8]))
def test_reduce_scatters(ranks: int, is_even: bool) -> None:
    place = Place(1, ranks)
    shards = numels(place, is_even)
    for name, of_ranks in second_steps(place, is_even, of_cases(CASES)).items():
        scattered = (ranks - 1) * sum(map(CASES[name].message, shards))
        whole = (ranks - 1) * CASES[name].gathered * sum(shards)
        for sent in of_ranks:
            assert (name, sent.stats.bytes_sent_last_step) == (name, scattered)
            # Parameters are gathered in forward and in backward.
            assert (name, sent.shards) == (name, scattered + 2 * whole)
            assert (name, sent.stats.bytes_gathered) == (name, 2 * 2 * whole)  # two steps
            assert sent.replicas == sent.others == sent.stats.bytes_scattered == 0
            if name != "int8 after a step":
                assert (name, sent.stats.bytes_sent) == (name, 2 * scattered)
                assert sent.stats.compression_ratio == pytest.approx(whole / scattered), name


# ---- all-gathers of parameters -------------------------------------------------------------------

WEIGHTS: dict[str, tuple[Callable[[], Any], Callable[[int], int]]] = {
    "int8": (codecs.blockwise, INT8),
    "int4": (lambda: codecs.blockwise(bits=4), INT4),
    "fp8": (codecs.fp8, INT8),
    "fp8 in blocks of 64": (lambda: codecs.fp8("e5m2", 64), in_blocks(8, 64)),
    "sign": (codecs.sign, in_blocks(1, SIGN_BLOCK)),
}


@both_models
@pytest.mark.parametrize("ranks", some_long(range(2, 9), [2, 7]))
def test_gathers_of_weights(ranks: int, is_even: bool) -> None:
    """Of a step with int8 on both, ``3 (1 + 4 / B) (W - 1) / W`` bytes for an element."""
    place = Place(1, ranks)
    shards = numels(place, is_even)
    attachments: dict[str, Attachment] = {
        name: (hooks.blockwise, None, {"weights": make()}) for name, (make, _) in WEIGHTS.items()
    }
    scattered = (ranks - 1) * sum(map(INT8, shards))
    for name, of_ranks in second_steps(place, is_even, attachments).items():
        gathered = 2 * (ranks - 1) * sum(map(WEIGHTS[name][1], shards))
        for sent in of_ranks:
            assert (name, sent.stats.bytes_gathered) == (name, 2 * gathered)  # two steps
            assert (name, sent.shards) == (name, gathered + scattered)


@pytest.mark.parametrize("name", [None, "int8"])
def test_gathers_of_weights_that_stay_whole(name: str | None) -> None:
    """They are gathered once in a step."""
    place = Place(1, 3)
    make, message = (lambda: None, plain(4)) if name is None else WEIGHTS[name]
    gathered = 2 * sum(map(message, numels(place, True)))
    for sent in second_step(
        place, True, hooks.blockwise, reshard_after_forward=False, weights=make()
    ):
        assert sent.stats.bytes_gathered == 2 * gathered  # two steps


@pytest.mark.parametrize("among", [2, 4])
def test_gathers_in_backward_among_fewer_ranks(among: int) -> None:
    """They are as they are; the forward's are in int8."""
    place = Place(1, 8)
    shards = numels(place, True)
    for sent in second_step(
        place, True, hooks.blockwise, reshard_after_forward=among, weights=codecs.blockwise()
    ):
        assert sent.shards == 2 * 7 * sum(map(INT8, shards))  # the reduce-scatter is in int8, too
        assert sent.others == 4 * (among - 1) * (8 // among) * sum(shards)


# ---- across replicas -----------------------------------------------------------------------------


@quiet
@both_models
@pytest.mark.parametrize("place", some_long(ACROSS, [Place(3, 1), Place(2, 2)]), ids=named)
def test_across_replicas(place: Place, is_even: bool) -> None:
    shards = numels(place, is_even)
    for name, of_ranks in second_steps(place, is_even, of_cases(CASES_ACROSS)).items():
        case = CASES_ACROSS[name]
        within = (place.shards - 1) * case.gathered * sum(shards)
        for rank, sent in enumerate(of_ranks):
            averaged = sum(exchanged(case, numel, place, rank) for numel in shards)
            assert (name, sent.replicas) == (name, averaged)
            # Two all-gathers and a reduce-scatter.
            assert (name, sent.shards) == (name, 3 * within)
            assert (name, sent.stats.bytes_scattered) == (name, 2 * within)  # two steps
            assert sent.others == 0
            # In C++ half a byte of a layer is rounded up, and in Python to an even number.
            rounding = len(shards) if "C++" in name and not is_even else 0
            assert abs(sent.stats.bytes_sent_last_step - averaged) <= rounding, name


def low_rank_hook(rank: int) -> Callable[[], Any]:
    return lambda: hooks.error_feedback(hooks.powersgd(rank=rank))


@both_models
@pytest.mark.parametrize("place", some_long(ACROSS, [Place(8, 1), Place(4, 2)]), ids=named)
def test_powersgd(place: Place, is_even: bool) -> None:
    """A matrix of n rows of a shard and m columns costs ``r (n + m)`` numbers."""
    attachments: dict[str, Attachment] = {
        str(rank): (low_rank_hook(rank), None, {}) for rank in (1, 3)
    }
    for name, of_ranks in second_steps(place, is_even, attachments).items():
        expected = low_rank(int(name), place, is_even)
        for sent in of_ranks:
            assert sent.replicas == sent.stats.bytes_sent_last_step == expected


@pytest.mark.parametrize("place", some_long(ACROSS, [Place(2, 3), Place(6, 1)]), ids=named)
def test_policy(place: Place) -> None:
    """Biases as they are, and weights in int4."""

    def make() -> hooks.policy:
        return hooks.policy([("dim <= 1", hooks.allreduce())], hooks.blockwise(bits=4))

    case = CASES["int4"]
    for rank, sent in enumerate(second_step(place, False, make)):
        assert sent.replicas == sum(
            ring(4 * rows, place.replicas) + exchanged(case, rows * columns, place, rank)
            for rows, columns, _ in chunks(place, False)
        )


WITHIN = ("cast", "int8", "fp8", "sign", "randomk", "int4 with feedback")


@both_models
@pytest.mark.parametrize(
    "place",
    some_long([place for place in ACROSS if place.shards > 1], [Place(2, 2)]),
    ids=named,
)
def test_a_hook_within_replicas(place: Place, is_even: bool) -> None:
    """``shard_hook`` in the reduce-scatters, and int8 across replicas and in all-gathers."""
    shards, peers = numels(place, is_even), place.shards - 1
    attachments: dict[str, Attachment] = {
        name: (
            hooks.blockwise,
            None,
            {"shard_hook": CASES[name].hook(), "weights": codecs.blockwise()},
        )
        for name in WITHIN
    }
    for name, of_ranks in second_steps(place, is_even, attachments).items():
        scattered = peers * sum(map(CASES[name].message, shards))
        for rank, sent in enumerate(of_ranks):
            across = sum(exchanged(CASES["int8"], numel, place, rank) for numel in shards)
            assert (name, sent.shards) == (name, scattered + 2 * peers * sum(map(INT8, shards)))
            assert (name, sent.replicas) == (name, across)
            assert sent.stats.bytes_sent_last_step == across
            assert sent.stats.bytes_scattered == 2 * scattered  # of two steps


def test_hierarchical_across_replicas() -> None:
    """Four replicas, two to a node: inside a node as they are, between nodes in int8."""
    place = Place(4, 2)

    def make() -> hooks.hierarchical:
        rank = dist.get_rank()
        # Ranks count along the shards first, then along the replicas.
        nodes = [[0, 2], [1, 3], [4, 6], [5, 7]]
        places = [[0, 4], [2, 6], [1, 5], [3, 7]]
        own: list[Any] = []
        for kind in (nodes, places):
            made = [(ranks, dist.new_group(ranks)) for ranks in kind]
            own.append(next(group for ranks, group in made if rank in ranks))
        return hooks.hierarchical(codecs.blockwise(), intra_group=own[0], inter_group=own[1])

    shards = numels(place, True)
    inside = sum(ring(4 * numel, 2) for numel in shards)
    between = sum(2 * INT8(numel // 4) for numel in shards)  # half of what a rank has of its node
    for sent in second_step(place, True, make):
        assert sent.others == sent.stats.bytes_sent_last_step == inside + between
        assert sent.replicas == 0
        assert sent.shards == 3 * 4 * sum(shards)


# ---- collectives with chunks of any length -------------------------------------------------------


def chunk_lengths(ranks: int) -> list[int]:
    """Inside of blocks, at a block's end, a single element, and none."""
    return [1000, 0, 512, 1, 257, 4096, 31, 300][:ranks]


CHUNK_CODECS: dict[str, tuple[Callable[[], Any], Callable[[int], int]]] = {
    "int8": (codecs.blockwise, INT8),
    "int4": (lambda: codecs.blockwise(bits=4), INT4),
    "fp8": (codecs.fp8, INT8),
    "sign": (codecs.sign, in_blocks(1, SIGN_BLOCK)),
    "randomk": (lambda: codecs.randomk(0.125), eighth(4)),
    "topk": (lambda: codecs.topk(0.125), eighth(8)),
    "chunk_topk": (codecs.chunk_topk, of_chunks),
}


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("name", CHUNK_CODECS)
def test_collectives_of_chunks(name: str, ranks: int) -> None:
    """A message for each other rank's chunk; of gathered ones, as many as the longest has."""
    make, message = CHUNK_CODECS[name]
    sizes = chunk_lengths(ranks)

    def run(rank: int, links: Links) -> tuple[int, int]:
        rounding = torch.tensor([1, 2])
        values = torch.ones(sum(sizes))
        compressed_reduce_scatter(values, make(), sizes=sizes, rounding=rounding).wait()
        scattered = bytes_over(links)
        own = torch.ones(sizes[rank])
        compressed_all_gather(own, make(), sizes=sizes, rounding=rounding).wait()
        return scattered, bytes_over(links) - scattered

    for rank, (scattered, gathered) in enumerate(run_with_links(run, ranks, 0)[0]):
        assert scattered == sum(map(message, sizes)) - message(sizes[rank])
        assert gathered == (ranks - 1) * max(map(message, sizes))


# ---- over Gloo -----------------------------------------------------------------------------------


def _second_step_over_gloo(place: str, name: str, weights: Any = None) -> tuple[int, HookStats]:
    """The bytes that this rank sends, without the flag of success, and the hook's statistics."""
    with recorded_groups() as recorded:
        model = Layers(*UNEVEN)
        by_layer(model, Mesh.of(place))
        handle = attach(model, CASES[name].hook(), weights=weights)
        for _ in range(2):
            for group in recorded.values():
                group.clear()
            loss_of(model(torch.randn(4, UNEVEN[0]))).backward()
        sent = sum(
            counters.bytes_sent
            for group in recorded.values()
            for operation, counters in group.counters.items()
            if operation != "allreduce"
        )
        stats = handle.stats()
        handle.remove()
    return sent, stats


@pytest.mark.parametrize(
    ("name", "in_int4"), [("allreduce", False), ("int8", False), ("int8", True)]
)
@on_processes("fsdp-3")
def test_reduce_scatters_over_gloo(rank: int, place: str, name: str, in_int4: bool) -> None:
    """Parameters are gathered in int4, or as they are."""
    of_weights = INT4 if in_int4 else plain(4)
    sent, stats = _second_step_over_gloo(place, name, codecs.blockwise(bits=4) if in_int4 else None)
    shards = numels(Place(1, 3), False)
    scattered = 2 * sum(map(CASES[name].message, shards))
    assert stats.bytes_sent_last_step == scattered
    # Each layer's parameters are gathered in forward and in backward.
    assert sent == scattered + 2 * 2 * sum(map(of_weights, shards))


@pytest.mark.parametrize("name", ["allreduce", "int8"])
@on_processes("hsdp-4")
def test_all_reduces_over_gloo(rank: int, place: str, name: str) -> None:
    of_mesh = Place(2, 2)
    _, stats = _second_step_over_gloo(place, name)
    whole, averaged = (
        sum(exchanged(CASES[each], numel, of_mesh, rank) for numel in numels(of_mesh, False))
        for each in ("allreduce", name)
    )
    assert (stats.bytes_sent_last_step, stats.bytes_sent) == (averaged, 2 * averaged)
    assert stats.compression_ratio == pytest.approx(whole / averaged)
