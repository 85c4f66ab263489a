"""Hooks that take part across replicas alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpp_libraries import library
from rank_pool import RankPool
from sharded_models import far, gradients_of_step, layers, on_ranks, same_bits, sharded
from torch import Tensor

from torch_commhook import attach, codecs, hooks, load_cpp_hooks

PLACES = ["hsdp-4", "replicate-2"]
STEPS = 5


def _gradients(place: str, rank: int, hook: Any) -> tuple[list[list[Tensor]], Any]:
    """Of steps that leave the parameters where they are; and the hook's state."""
    model = sharded(place)
    handle = None if hook is None else attach(model, hook)
    found = [gradients_of_step(model, rank, number) for number in range(STEPS)]
    state = None if handle is None else handle.state_dict()
    if handle is not None:
        handle.remove()
    return found, state


def _is_near(got: list[Tensor], expected: list[Tensor], part: float) -> list[str]:
    largest = torch.cat([each.abs().flatten() for each in expected]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)  # a block has what other ranks' shards do not
    return far(got, [each.double() for each in expected], part * float(largest), "gradients")


def _policy(rank: int, place: str) -> list[str]:
    """Rules see the shapes of parameters, and their names."""
    expected, _ = _gradients(place, rank, None)
    rules = [("dim <= 1", hooks.allreduce()), ("2.*", hooks.cast())]
    got, _ = _gradients(place, rank, hooks.policy(rules, hooks.blockwise()))
    found = []
    names = [name for name, _ in layers().named_parameters()]
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        for name, one, other in zip(names, ours, theirs, strict=True):
            where = f"step {number}, {name}"
            if name.endswith("bias"):
                found += [] if one.equal(other) else [f"{where}: other bits"]
            elif name == "2.weight":  # each of two ranks rounds its own, and the sum is rounded
                tolerance = 2.0**-7 * float(other.abs().max() + 1) if other.numel() else 0.0
                found += far([one], [other.double()], tolerance, where)
                if other.numel() and not one.equal(one.bfloat16().float()):
                    found.append(f"{where}: not of 16 bits")
        found += _is_near(ours, theirs, 0.05)
    return found


def _adaptive(rank: int, place: str) -> list[str]:
    """Ranks of a shard settle on the same bits, under the budget."""
    expected, _ = _gradients(place, rank, None)
    budget = 80
    model = sharded(place)
    handle = attach(model, hooks.adaptive(budget, every=2))
    found = []
    total = [torch.zeros_like(each) for each in expected[0]]
    for number in range(STEPS):
        got = gradients_of_step(model, rank, number)
        total = [a + b for a, b in zip(total, got, strict=True)]
    exact = [torch.stack(each).sum(0) for each in zip(*expected, strict=True)]
    # What a step has lost comes with the next one, so that a sum has lost but once.
    found += _is_near(total, exact, 0.25)
    state = handle.state_dict()
    choices = state[f"choices{rank % 2}"] if place.startswith("hsdp") else state["choices"]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, choices)
    shards = 2 if place.startswith("hsdp") else 1
    for shard in range(shards):
        of_shard = everybody[shard::shards]
        if any(each != of_shard[0] for each in of_shard) or not of_shard[0]:
            found.append(f"shard {shard}: {of_shard}")
    handle.remove()
    return found


def _after(rank: int, place: str) -> list[str]:
    expected, _ = _gradients(place, rank, None)
    got, _ = _gradients(place, rank, hooks.after(2, hooks.blockwise()))
    found = [
        f"step {number}"
        for number in range(STEPS)
        if same_bits(got[number], expected[number]) != (number < 2)
        and any(each.numel() > 1 for each in expected[number])
    ]
    for ours, theirs in zip(got, expected, strict=True):
        found += _is_near(ours, theirs, 0.02)
    return found


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    "policy": _policy,
    "adaptive": _adaptive,
    "after": _after,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("check", list(CHECKS))
def test_hooks_of_buckets(ranks: RankPool, place: str, check: str) -> None:
    assert ranks.run(CHECKS[check], place) == [[]] * ranks.world_size


@on_ranks("replicate-4")
def test_hierarchical(rank: int, place: str) -> list[str]:
    """Four replicas on two nodes."""
    nodes = [dist.new_group(list(pair)) for pair in ((0, 1), (2, 3))]
    across = [dist.new_group(list(pair)) for pair in ((0, 2), (1, 3))]
    expected, _ = _gradients(place, rank, None)
    hook = hooks.hierarchical(
        codecs.blockwise(), intra_group=nodes[rank // 2], inter_group=across[rank % 2]
    )
    got, _ = _gradients(place, rank, hook)
    found = [] if not same_bits(got[0], expected[0]) else ["nothing is compressed"]
    for ours, theirs in zip(got, expected, strict=True):
        found += _is_near(ours, theirs, 0.02)
    return found


def _other_ranks(rank: int, place: str) -> str:
    """Groups of all ranks, where replicas of a shard are half of these."""
    alone = [dist.new_group([each]) for each in range(4)][rank]
    hook = hooks.hierarchical(codecs.blockwise(), intra_group=alone, inter_group=dist.group.WORLD)
    model = sharded(place)
    try:
        attach(model, hook)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "attached"


@pytest.mark.parametrize("place", ["hsdp-4"])
def test_hierarchical_over_other_ranks(ranks: RankPool, place: str) -> None:
    for said in ranks.run(_other_ranks, place):
        assert "hierarchical" in said


def _in_cpp(rank: int, place: str, path: str, name: str) -> list[str]:
    load_cpp_hooks(path)
    beside = None if name == "allreduce" else hooks.cast()
    expected, _ = _gradients(place, rank, beside)
    got, _ = _gradients(place, rank, hooks.cpp(name))
    return [f"step {i}" for i in range(STEPS) if not same_bits(got[i], expected[i])]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["allreduce", "cast"])
def test_hooks_in_cpp(ranks: RankPool, place: str, name: str) -> None:
    path = library("comm_hooks")
    assert ranks.run(_in_cpp, place, path, name) == [[]] * ranks.world_size
