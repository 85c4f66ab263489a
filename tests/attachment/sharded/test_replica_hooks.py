"""Hooks that take part across replicas alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpp_libraries import library
from on_ranks import of_all_ranks
from sharded_models import (
    far,
    gradients_of_step,
    layers,
    on_processes,
    on_ranks,
    same_bits,
    sharded,
)
from torch import Tensor

from torch_commhook import attach, codecs, hooks, load_cpp_hooks

PLACES = ["hsdp-4", "replicate-2"]
STEPS = 5


def _gradients(place: str, rank: int, hook: Any) -> list[list[Tensor]]:
    """Of steps that leave the parameters where they are."""
    model = sharded(place)
    handle = None if hook is None else attach(model, hook)
    found = [gradients_of_step(model, rank, number) for number in range(STEPS)]
    if handle is not None:
        handle.remove()
    return found


def _check_near(got: list[Tensor], expected: list[Tensor], part: float) -> None:
    largest = torch.cat([each.abs().flatten() for each in expected]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)  # a block has what other ranks' shards do not
    bound = part * float(largest)
    assert far(got, [each.double() for each in expected], bound, "gradients") == []


@on_processes(*PLACES)
def test_policy(rank: int, place: str) -> None:
    """Rules see the shapes of parameters, and their names."""
    expected = _gradients(place, rank, None)
    rules = [("dim <= 1", hooks.allreduce()), ("2.*", hooks.cast())]
    got = _gradients(place, rank, hooks.policy(rules, hooks.blockwise()))
    names = [name for name, _ in layers().named_parameters()]
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        for name, one, other in zip(names, ours, theirs, strict=True):
            where = f"step {number}, {name}"
            if name.endswith("bias"):
                assert one.equal(other), where
            elif name == "2.weight":  # each of two ranks rounds its own, and the sum is rounded
                tolerance = 2.0**-7 * float(other.abs().max() + 1) if other.numel() else 0.0
                assert far([one], [other.double()], tolerance, where) == []
                assert one.equal(one.bfloat16().float()), where
        _check_near(ours, theirs, 0.05)


@on_processes(*PLACES)
def test_adaptive(rank: int, place: str) -> None:
    """Ranks of a shard settle on the same bits, under the budget."""
    expected = _gradients(place, rank, None)
    model = sharded(place)
    handle = attach(model, hooks.adaptive(80, every=2))
    got = [gradients_of_step(model, rank, number) for number in range(STEPS)]
    total, exact = (
        [torch.stack(each).sum(0) for each in zip(*steps, strict=True)] for steps in (got, expected)
    )
    # What a step has lost comes with the next one, so that a sum has lost but once.
    _check_near(total, exact, 0.25)
    state = handle.state_dict()
    handle.remove()
    shards = 2 if place == "hsdp-4" else 1
    own = state[f"choices{rank % 2}" if shards == 2 else "choices"]
    assert own and all(each == own for each in of_all_ranks(own)[rank % shards :: shards])


@on_processes(*PLACES)
def test_after(rank: int, place: str) -> None:
    expected = _gradients(place, rank, None)
    got = _gradients(place, rank, hooks.after(2, hooks.blockwise()))
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if any(each.numel() > 1 for each in theirs):
            assert same_bits(ours, theirs) == (number < 2), number
        _check_near(ours, theirs, 0.02)


@on_ranks("replicate-4")
def test_hierarchical(rank: int, place: str) -> None:
    """Four replicas on two nodes."""
    nodes = [dist.new_group(list(pair)) for pair in ((0, 1), (2, 3))]
    across = [dist.new_group(list(pair)) for pair in ((0, 2), (1, 3))]
    expected = _gradients(place, rank, None)
    hook = hooks.hierarchical(
        codecs.blockwise(), intra_group=nodes[rank // 2], inter_group=across[rank % 2]
    )
    got = _gradients(place, rank, hook)
    assert not same_bits(got[0], expected[0]), "nothing is compressed"
    for ours, theirs in zip(got, expected, strict=True):
        _check_near(ours, theirs, 0.02)


@on_processes("hsdp-4")
def test_hierarchical_over_other_ranks(rank: int, place: str) -> None:
    """Groups of all ranks, where replicas of a shard are half of these."""
    alone = [dist.new_group([each]) for each in range(4)][rank]
    hook = hooks.hierarchical(codecs.blockwise(), intra_group=alone, inter_group=dist.group.WORLD)
    model = sharded(place)
    with pytest.raises((RuntimeError, ValueError), match="hierarchical"):
        attach(model, hook)


@pytest.fixture
def comm_hooks() -> str:
    return library("comm_hooks")


@pytest.mark.parametrize("name", ["allreduce", "cast"])
@on_processes(*PLACES)
def test_hooks_in_cpp(rank: int, place: str, comm_hooks: str, name: str) -> None:
    load_cpp_hooks(comm_hooks)
    beside = None if name == "allreduce" else hooks.cast()
    expected = _gradients(place, rank, beside)
    got = _gradients(place, rank, hooks.cpp(name))
    for number in range(STEPS):
        assert same_bits(got[number], expected[number]), number
