"""A step that fails on one rank of a sharded model fails on all, and the next one works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from sharded_failures import (
    TRAPS,
    Failing,
    new_model,
    one_step,
    outcome,
    plain_gradients,
    trap_of,
    unequal,
    with_traps,
)
from sharded_models import Mesh, by_layer
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_commhook import attach, codecs, hooks

PLACES = ["fsdp-2", "fsdp-3", "hsdp-4", "replicate-2"]


def _in_turn(
    rank: int, place: str, set_trap: Callable[[Any, Any, bool], None], **settings: Any
) -> list[str]:
    """Each rank fails in a step of its own, between two that work."""
    model, hook = new_model(place), Failing()
    expected = [plain_gradients(place, rank, number) for number in range(2)]
    handle = attach(model, hook, **settings)
    found = []
    for fails in range(int(place[-1])):
        set_trap(model, hook, rank == fails)
        found += outcome(model, rank, 5, fails)
        set_trap(model, hook, False)
        for number in range(2):
            got = one_step(model, rank, number)
            found += unequal(got, expected[number], f"after rank {fails} has failed, {number}")
    handle.remove()
    found += unequal(one_step(model, rank, 0), expected[0], "removed")
    return found


def _fail_in_hook(rank: int, place: str, calls: int) -> list[str]:
    def set_trap(model: Any, hook: Failing, is_set: bool) -> None:
        hook.fails_in = calls if is_set else None

    return _in_turn(rank, place, set_trap)


@pytest.mark.parametrize("calls", range(3))
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_that_fails(ranks: RankPool, place: str, calls: int) -> None:
    assert ranks.run(_fail_in_hook, place, calls) == [[]] * ranks.world_size


def _fail_in_model(rank: int, place: str, where: str, what: str) -> list[str]:
    def set_trap(model: Any, hook: Failing, is_set: bool) -> None:
        trap_of(model, where).raises_in = what if is_set else ""

    return _in_turn(rank, place, set_trap)


@pytest.mark.parametrize("where", TRAPS)
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_in_backward(ranks: RankPool, place: str, where: str) -> None:
    assert ranks.run(_fail_in_model, place, where, "backward") == [[]] * ranks.world_size


@pytest.mark.parametrize("where", TRAPS)
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_in_forward(ranks: RankPool, place: str, where: str) -> None:
    assert ranks.run(_fail_in_model, place, where, "forward") == [[]] * ranks.world_size


def _fail_in_shard_hook(rank: int) -> list[str]:
    beside = Failing()

    def set_trap(model: Any, hook: Failing, is_set: bool) -> None:
        beside.fails_in = 1 if is_set else None

    return _in_turn(rank, "hsdp-4", set_trap, shard_hook=beside)


@pytest.mark.parametrize("place", ["hsdp-4"])
def test_a_shard_hook_that_fails(ranks: RankPool, place: str) -> None:
    assert ranks.run(_fail_in_shard_hook) == [[]] * ranks.world_size


def _fail_while_unsharding(rank: int, place: str, where: str, what: str) -> list[str]:
    """As the other ranks wait for the parameters in a Work that FSDP has been given."""
    found = []
    for settings in ({}, {"weights": codecs.blockwise()} if place.startswith("fsdp") else {}):
        model = new_model(place)
        model._set_unshard_async_op(True)
        handle = attach(model, hooks.allreduce(), **settings)
        for fails in range(int(place[-1])):
            before = one_step(model, rank, 1)
            trap_of(model, where).raises_in = what if rank == fails else ""
            found += outcome(model, rank, 5, fails)
            trap_of(model, where).raises_in = ""
            found += unequal(one_step(model, rank, 1), before, f"after rank {fails}")
        handle.remove()
    return found


@pytest.mark.parametrize(("where", "what"), [("middle", "forward"), ("last", "backward")])
@pytest.mark.parametrize("place", ["fsdp-2", "hsdp-4"])
def test_asynchronous_unshard(ranks: RankPool, place: str, where: str, what: str) -> None:
    assert ranks.run(_fail_while_unsharding, place, where, what) == [[]] * ranks.world_size


def _remove_after_failure(rank: int, place: str) -> list[str]:
    model, hook = new_model(place), Failing()
    handle = attach(model, hook)
    hook.fails_in = 1 if rank == 0 else None
    found = outcome(model, rank, 0, 0)
    handle.remove()
    found += unequal(one_step(model, rank, 0), plain_gradients(place, rank, 0), "removed")
    handle = attach(model, hooks.allreduce())
    found += unequal(one_step(model, rank, 0), plain_gradients(place, rank, 0), "attached again")
    handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_hook_removed_after_a_failure(ranks: RankPool, place: str) -> None:
    assert ranks.run(_remove_after_failure, place) == [[]] * ranks.world_size


def _replace_after_failure(rank: int, place: str, has_stages: bool) -> list[str]:
    model, hook = new_model(place), Failing()
    handle = attach(model, hook)
    hook.fails_in = 1 if rank == 0 else None
    found = outcome(model, rank, 0, 0)
    if has_stages:  # for which connections are made, while the others are lost
        handle.replace(hooks.blockwise())
        one_step(model, rank, 0)
    handle.replace(hooks.allreduce())
    found += unequal(one_step(model, rank, 0), plain_gradients(place, rank, 0), "replaced")
    handle.remove()
    return found


@pytest.mark.parametrize("has_stages", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_replaced_after_a_failure(ranks: RankPool, place: str, has_stages: bool) -> None:
    assert ranks.run(_replace_after_failure, place, has_stages) == [[]] * ranks.world_size


def _fail_while_adding_up(rank: int, place: str, **policy: torch.dtype) -> list[str]:
    """What had added up on some rank does not come into the next step."""
    model, plain, hook = with_traps(), with_traps(), Failing()
    for each in (model, plain):
        by_layer(each, Mesh.of(place), mp_policy=MixedPrecisionPolicy(**policy))
    handle = attach(model, hook)
    with handle.no_sync():
        one_step(model, rank, 3)
    hook.fails_in = 1 if rank == 1 else None
    found = outcome(model, rank, 0, 1)
    hook.fails_in = None
    found += unequal(one_step(model, rank, 0), one_step(plain, rank, 0), "next")
    handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_gradients_that_had_added_up(ranks: RankPool, place: str) -> None:
    assert ranks.run(_fail_while_adding_up, place) == [[]] * ranks.world_size


def _fail_while_adding_up_in_float32(rank: int) -> list[str]:
    return _fail_while_adding_up(
        rank, "fsdp-2", param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )


def test_gradients_that_had_added_up_in_float32(two_ranks: RankPool) -> None:
    assert two_ranks.run(_fail_while_adding_up_in_float32) == [[], []]
