"""A step that fails on one rank of a sharded model fails on all, and the next one works."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from sharded_models import (
    TRAPS,
    Failing,
    Mesh,
    by_layer,
    check_outcome,
    new_model,
    on_processes,
    one_step,
    same_bits,
    trap_of,
    with_traps,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_commhook import attach, codecs, hooks

PLACES = ["fsdp-2", "fsdp-3", "hsdp-4", "replicate-2"]


def _in_turn(
    rank: int, place: str, model: Any, set_trap: Callable[[bool], None], **settings: Any
) -> None:
    """Each rank fails in a step of its own, between two that work."""
    expected = [one_step(new_model(place), rank, number) for number in range(2)]
    handle = attach(model, **settings)
    for fails in range(int(place[-1])):
        set_trap(rank == fails)
        check_outcome(model, rank, 5, fails)
        set_trap(False)
        for number in range(2):
            got = one_step(model, rank, number)
            assert same_bits(got, expected[number]), f"after rank {fails} has failed, {number}"
    handle.remove()
    assert same_bits(one_step(model, rank, 0), expected[0]), "removed"


@pytest.mark.parametrize("calls", range(3))
@on_processes(*PLACES)
def test_a_hook_that_fails(rank: int, place: str, calls: int) -> None:
    hook = Failing()
    _in_turn(rank, place, new_model(place), partial(hook.set, calls), hook=hook)


@on_processes("hsdp-4")
def test_a_shard_hook_that_fails(rank: int, place: str) -> None:
    beside = Failing()
    hook = hooks.allreduce()
    _in_turn(rank, place, new_model(place), partial(beside.set, 1), hook=hook, shard_hook=beside)


@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("where", TRAPS)
@on_processes(*PLACES)
def test_an_exception_in_the_model(rank: int, place: str, where: str, what: str) -> None:
    model = new_model(place)
    _in_turn(rank, place, model, partial(trap_of(model, where).set, what), hook=Failing())


@pytest.mark.parametrize(("where", "what"), [("middle", "forward"), ("last", "backward")])
@on_processes("fsdp-2", "hsdp-4")
def test_asynchronous_unshard(rank: int, place: str, where: str, what: str) -> None:
    """As the other ranks wait for the parameters in a Work that FSDP has been given."""
    for settings in ({}, {"weights": codecs.blockwise()} if place.startswith("fsdp") else {}):
        model = new_model(place)
        model._set_unshard_async_op(True)
        handle = attach(model, hooks.allreduce(), **settings)
        for fails in range(int(place[-1])):
            before = one_step(model, rank, 1)
            trap_of(model, where).raises_in = what if rank == fails else ""
            check_outcome(model, rank, 5, fails)
            trap_of(model, where).raises_in = ""
            assert same_bits(one_step(model, rank, 1), before), f"after rank {fails}"
        handle.remove()


@on_processes(*PLACES)
def test_a_hook_removed_after_a_failure(rank: int, place: str) -> None:
    model, hook = new_model(place), Failing()
    handle = attach(model, hook)
    hook.fails_in = 1 if rank == 0 else None
    check_outcome(model, rank, 0, 0)
    handle.remove()
    expected = one_step(new_model(place), rank, 0)
    assert same_bits(one_step(model, rank, 0), expected), "removed"
    handle = attach(model, hooks.allreduce())
    assert same_bits(one_step(model, rank, 0), expected), "attached again"
    handle.remove()


@pytest.mark.parametrize("has_stages", [False, True])
@on_processes(*PLACES)
def test_a_hook_replaced_after_a_failure(rank: int, place: str, has_stages: bool) -> None:
    model, hook = new_model(place), Failing()
    handle = attach(model, hook)
    hook.fails_in = 1 if rank == 0 else None
    check_outcome(model, rank, 0, 0)
    if has_stages:  # for which connections are made, while the others are lost
        handle.replace(hooks.blockwise())
        one_step(model, rank, 0)
    handle.replace(hooks.allreduce())
    assert same_bits(one_step(model, rank, 0), one_step(new_model(place), rank, 0))
    handle.remove()


@pytest.mark.parametrize("in_float32", [False, True])
@on_processes(*PLACES)
def test_gradients_that_had_added_up(rank: int, place: str, in_float32: bool) -> None:
    """What had added up on some rank does not come into the next step."""
    model, plain, hook = with_traps(), with_traps(), Failing()
    dtypes = (torch.bfloat16, torch.float32) if in_float32 else ()
    for each in (model, plain):
        by_layer(each, Mesh.of(place), mp_policy=MixedPrecisionPolicy(*dtypes))
    handle = attach(model, hook)
    with handle.no_sync():
        one_step(model, rank, 3)
    hook.fails_in = 1 if rank == 1 else None
    check_outcome(model, rank, 0, 1)
    hook.fails_in = None
    assert same_bits(one_step(model, rank, 0), one_step(plain, rank, 0))
    handle.remove()
