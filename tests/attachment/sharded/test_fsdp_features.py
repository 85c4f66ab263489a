"""Everything that ``fully_shard`` does keeps working with a hook attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rank_pool import RankPool
from sharded_models import (
    Mesh,
    batch,
    by_layer,
    differences,
    far,
    layers,
    loss_of,
    reference,
    take_steps,
)
from sharded_scenarios import PLACES, SCENARIOS

from torch_commhook import attach, hooks


def _with_allreduce(rank: int, name: str, place: str) -> list[str]:
    scenario, mesh = SCENARIOS[name], Mesh.of(place)
    got = take_steps(scenario, mesh, rank, hooks.allreduce())
    found = differences(got, take_steps(scenario, mesh, rank, None))
    steps = 3 * scenario.backwards.get(mesh.kind, 1)
    return found if got.stats.steps == steps else [*found, f"{got.stats.steps} steps"]


@pytest.mark.parametrize(
    ("name", "place"), [each for each in PLACES if SCENARIOS[each[0]].plain_works]
)
def test_allreduce_has_the_bits_of_fully_shard(ranks: RankPool, name: str, place: str) -> None:
    assert ranks.run(_with_allreduce, name, place) == [[]] * ranks.world_size


def _encodings(place: str) -> int:
    """A reduce-scatter encodes once, an all-reduce twice."""
    return 1 if place.startswith("fsdp") else 2


def _near(rank: int, name: str, place: str) -> list[str]:
    scenario, mesh = SCENARIOS[name], Mesh.of(place)
    expected, largest = reference(scenario, int(place[-1]))
    found = []
    exact = take_steps(scenario, mesh, rank, hooks.allreduce(), rate=0.0, count=1, gather=True)
    found += far(exact.whole[0], expected, scenario.rounding * largest, "allreduce")
    # Half a step of int8, of the largest value that a block may have.
    bound = (_encodings(place) * scenario.encodings * 0.51 / 127 + scenario.rounding) * largest
    coded = take_steps(scenario, mesh, rank, hooks.blockwise(), rate=0.0, count=1, gather=True)
    found += far(coded.whole[0], expected, bound, "blockwise")
    return found


_MEANS = [each for each in PLACES if SCENARIOS[each[0]].averages]


def _long(is_long: Callable[[str, str], bool], places: list[tuple[str, str]]) -> list[Any]:
    """Some of the cases are left to the long tests, which others resemble."""
    return [
        pytest.param(*each, marks=pytest.mark.long if is_long(*each) else []) for each in places
    ]


@pytest.mark.parametrize(
    ("name", "place"), _long(lambda name, place: place == "replicate-2", _MEANS)
)
def test_hooks_are_near_the_mean(ranks: RankPool, name: str, place: str) -> None:
    assert ranks.run(_near, name, place) == [[]] * ranks.world_size


def _feedback(rank: int, name: str, place: str) -> list[str]:
    """What is lost in a step comes in the next: sums are near, however many steps there are."""
    scenario, mesh = SCENARIOS[name], Mesh.of(place)
    count = 6
    expected, largest = reference(scenario, int(place[-1]))
    hook = hooks.error_feedback(hooks.blockwise(bits=4))
    done = take_steps(
        scenario, mesh, rank, hook, rate=0.0, count=count, gather=True, same_batches=True
    )
    sums = [
        None if any(each is None for each in steps) else sum(steps)
        for steps in zip(*done.whole, strict=True)
    ]
    wanted = [None if each is None else count * each for each in expected]
    # Half a step of int4, of a value with what was lost of the one before.
    bound = _encodings(place) * scenario.encodings * 0.6 / 7 + count * scenario.rounding
    found = far(sums, wanted, bound * largest, "the sum")
    steps = count * scenario.backwards.get(mesh.kind, 1)
    return found if done.state["steps"] == steps else [*found, f"{done.state['steps']} steps"]


#: Whose gradients are the same in each step.
_SAME = [
    (name, place)
    for name, place in _MEANS
    if place != "fsdp-2" and name not in ("unused by turns", "unused by turns in one group")
]


#: Where memory is of other forms, or asked for otherwise, than in most.
_OF_OTHER_FORM = (
    "layers",
    "one group",
    "each layer its own root",
    "f32, reduced in bf16",
    "a model in bf16",
    "gradients add up",
    "gradients add up in shards",
    "two forwards",
    "offloaded",
    "columns",
    "tied",
    "frozen",
    "unused on some ranks",
)


@pytest.mark.parametrize(
    ("name", "place"),
    _long(lambda name, place: name not in _OF_OTHER_FORM or place == "replicate-2", _SAME),
)
def test_error_feedback_remembers_what_it_lost(ranks: RankPool, name: str, place: str) -> None:
    assert ranks.run(_feedback, name, place) == [[]] * ranks.world_size


def _padding(rank: int) -> tuple[float, float]:
    """The largest error that is remembered of the last rank's shard of the first layer.

    Of seven rows that rank has one; two are padding.
    """
    model = layers()
    by_layer(model, Mesh.of("fsdp-3"))
    handle = attach(model, hooks.error_feedback(hooks.sign()))
    for number in range(3):
        loss_of(model(batch(rank, number))).backward()
    error = handle._attached.memory.bucket_memories()[-1].tensors["error"].view(3, -1)[2]
    handle.remove()
    weight, bias = error[:15].view(3, 5).abs(), error[15:].abs()
    own = max(float(weight[0].max()), float(bias[0]))
    return own, max(float(weight[1:].max()), float(bias[1:].max()))


@pytest.mark.parametrize("place", ["fsdp-3"])
def test_nothing_is_remembered_of_padding(ranks: RankPool, place: str) -> None:
    for own, padding in ranks.run(_padding):
        assert own > 0
        assert padding == 0
