"""Everything that ``fully_shard`` does keeps working with a hook attached.

Each feature is tested for three properties. With ``allreduce()`` all bits are those of
``fully_shard``. Hooks that compress are near the mean of the gradients. With error feedback, the
sum of several steps is as near as one step: each step sends the error of the step before.
"""

from __future__ import annotations

import pytest
from sharded_models import (
    Mesh,
    Scenario,
    batch,
    by_layer,
    far,
    layers,
    loss_of,
    on_ranks,
    reference,
    run_on,
    sgd_at,
    take_steps,
)
from sharded_scenarios import PLACES, SCENARIOS, unlike_plain

from torch_commhook import attach, hooks

#: Scenarios with gradients that are not the same in each step.
_CHANGING = ("unused by turns", "unused by turns in one group")

#: Scenarios with memory of another form, or with other calls of the hook, than most.
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


def _far_from_the_mean(scenario: Scenario, place: str, rank: int) -> list[str]:
    expected, largest = reference(scenario, int(place[-1]))
    # A reduce-scatter encodes once, an all-reduce twice; half a step of int8 is lost each time, of
    # the largest value that a block may have.
    encodings = scenario.encodings * (1 if place.startswith("fsdp") else 2)
    found = []
    for hook, lost in ((hooks.allreduce(), 0.0), (hooks.blockwise(), 0.51 / 127)):
        mesh = Mesh.of(place)
        done = take_steps(scenario, mesh, rank, hook, optimizer=sgd_at(0.0), count=1, gather=True)
        bound = (encodings * lost + scenario.rounding) * largest
        found += far(done.whole[0], expected, bound, repr(hook))
    return found


def _not_fed_back(scenario: Scenario, place: str, rank: int) -> list[str]:
    expected, largest = reference(scenario, int(place[-1]))
    encodings = scenario.encodings * (1 if place.startswith("fsdp") else 2)
    mesh, count = Mesh.of(place), 6
    hook = hooks.error_feedback(hooks.blockwise(bits=4))
    done = take_steps(
        scenario,
        mesh,
        rank,
        hook,
        optimizer=sgd_at(0.0),
        count=count,
        gather=True,
        same_batches=True,
    )
    sums = [
        None if any(each is None for each in steps) else sum(steps)
        for steps in zip(*done.whole, strict=True)
    ]
    wanted = [None if each is None else count * each for each in expected]
    # Half a step of int4, of a value with the error of the one before.
    bound = (encodings * 0.6 / 7 + count * scenario.rounding) * largest
    found = far(sums, wanted, bound, "the sum")
    assert scenario.backwards is not None
    steps = count * scenario.backwards.get(mesh.kind, 1)
    return found if done.state["steps"] == steps else [*found, f"{done.state['steps']} steps"]


def _feature(rank: int, place: str, name: str) -> list[str]:
    scenario = SCENARIOS[name]
    found = unlike_plain(scenario, place, rank) if scenario.plain_works else []
    if scenario.averages:
        found += _far_from_the_mean(scenario, place, rank)
        if place != "fsdp-2" and name not in _CHANGING:
            found += _not_fed_back(scenario, place, rank)
    return found


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(
            name,
            place,
            marks=pytest.mark.long if place == "replicate-2" and name not in _OF_OTHER_FORM else [],
        )
        for name, place in PLACES
    ],
)
def test_a_feature(request: pytest.FixtureRequest, name: str, place: str) -> None:
    run_on(request, place, _feature, name)


@on_ranks("fsdp-3")
def test_nothing_is_remembered_of_padding(rank: int, place: str) -> None:
    """The last rank's shard of the first layer has one of seven rows; two rows are padding."""
    model = layers()
    by_layer(model, Mesh.of(place))
    handle = attach(model, hooks.error_feedback(hooks.sign()))
    for number in range(3):
        loss_of(model(batch(rank, number))).backward()
    error = handle._attached.memory.bucket_memories()[-1].tensors["error"].view(3, -1)[2]
    handle.remove()
    weight, bias = error[:15].view(3, 5).abs(), error[15:].abs()
    assert max(float(weight[0].max()), float(bias[0])) > 0
    assert not weight[1:].any() and not bias[1:].any()
