"""Everything that ``fully_shard`` does keeps working with a hook attached.

Each feature is tested for three properties. With ``allreduce()`` all bits are those of
``fully_shard``. Hooks that compress are near the mean of the gradients. With error feedback, the
sum of several steps is as near as one step: each step sends the error of the step before.

PyTorch's own tests of ``fully_shard`` are tested for the first property. Left out: what needs a GPU
(streams, memory, overlap), what does not train (names of classes, logging, errors of
``fully_shard`` itself), and meshes that differ between parameters, which ``attach`` refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_scenarios
import sharded_scenarios
import torch
from sharded_models import (
    Mesh,
    Scenario,
    Training,
    batch,
    by_layer,
    far,
    layers,
    local,
    loss_of,
    on_processes,
    on_ranks,
    reference,
    reshard,
    run_on,
    sgd_at,
    take_steps,
    unlike,
)
from sharded_scenarios import places_of, unlike_plain
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import share_comm_ctx
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_fsdp import MLPStack

from torch_commhook import attach, hooks
from torch_commhook.collectives import issuing
from torch_commhook.testing import run_ranks

SCENARIOS = {**sharded_scenarios.SCENARIOS, **pytorch_scenarios.SCENARIOS}

#: Scenarios with gradients that are not the same in each step.
_CHANGING = ("unused by turns", "unused by turns in one group")

#: Scenarios with memory of another form, or with other calls of the hook, than most. Others of them
#: are long on some meshes.
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
    "training: a transformer",
    "training: losses in chunks add up",
    "autograd: one output of two",
    "autograd: optimizers in hooks",
    "scaler",
    "extensions",
    "frozen: biases alone, recomputed",
)


def _far_from_the_mean(scenario: Scenario, place: str, rank: int) -> list[str]:
    expected, largest = reference(scenario, int(place[-1]))
    # A reduce-scatter encodes once, an all-reduce twice; half a step of int8 is lost each time, of
    # the largest value that a block may have.
    encodings = scenario.encodings * (1 if place.startswith("fsdp") else 2)
    found = []
    # If allreduce() has the bits of fully_shard, it is as near.
    exact = [] if scenario.plain_works else [(hooks.allreduce(), 0.0)]
    for hook, lost in (*exact, (hooks.blockwise(), 0.51 / 127)):
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


def _is_long(name: str, place: str) -> bool:
    own = place == "replicate-2" or (place == "hsdp-4" and name in pytorch_scenarios.SCENARIOS)
    return own and name not in _OF_OTHER_FORM


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(*each, marks=pytest.mark.long if _is_long(*each) else [])
        for each in places_of(SCENARIOS)
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


# ---- features of another form --------------------------------------------------------------------


def _train_parallel(rank: int, recompute: bool, hook: Any) -> list[Any]:
    """A stack of MLPs, sharded over replicas, shards and columns of tensor parallelism."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicas", "shards", "columns"))
    model = MLPStack(8)
    model.parallelize(mesh["columns"], mesh["replicas", "shards"], recompute)
    if hook is not None:
        attach(model, hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for number in range(3):
        generator = torch.Generator().manual_seed(10 * number + rank // 2)
        loss = model(torch.randn(4, 8, generator=generator)).sum()
        loss.backward()
        found += [loss, *(local(each.grad) for each in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found + [local(each) for each in model.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
def test_three_dimensions(recompute: bool) -> None:
    """``training``: replicas, shards and tensor parallelism, on eight ranks in threads."""
    expected = run_ranks(_train_parallel, 8, recompute, None)
    assert unlike(run_ranks(_train_parallel, 8, recompute, hooks.allreduce()), expected) == []


def _stack(place: str) -> Any:
    torch.manual_seed(0)
    model = MLPStack(5)
    by_layer(model, Mesh.of(place))
    return model


def _chained(rank: int, place: str, hooked: bool) -> list[Any]:
    """Two roots in one step, as two stages of a pipeline are."""
    stages = [_stack(place), _stack(place)]
    share_comm_ctx(stages)
    handles = [attach(stage, hooks.allreduce()) for stage in stages] if hooked else []
    optimizer = torch.optim.Adam([p for stage in stages for p in stage.parameters()], lr=1e-2)
    found: list[Any] = []
    for number in range(3):
        hidden = Training(stages[0], rank, number).batch(0, 4)
        for stage in stages:
            hidden = stage(hidden)
        hidden.sum().backward()
        for stage in stages:
            reshard(stage)
            found += [local(each.grad) for each in stage.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    if any(handle.stats().steps != 3 for handle in handles):
        found.append("the hook took no part")
    for handle in handles:
        handle.remove()
    return found


@on_ranks("fsdp-3", "gloo-fsdp-3")
def test_models_that_share_their_communication(rank: int, place: str) -> list[str]:
    """``training``: ``share_comm_ctx``, with a hook on each of the models."""
    return unlike(_chained(rank, place, True), _chained(rank, place, False))


# ---- how many collectives there are --------------------------------------------------------------


#: Three modules are gathered in forward and in backward, and reduced once.
PLAIN: dict[str, dict[str, int]] = {
    "fsdp-3": {"allgather": 6, "reducescatter": 3},
    "hsdp-4": {"allgather": 6, "reducescatter": 3, "allreduce": 3},
}
COUNTED: dict[str, Any] = {"none": None, "allreduce": hooks.allreduce, "int8": hooks.blockwise}


def _kind(operator: object) -> str:
    """Of a collective, whose operators have other names in other versions."""
    name = str(operator).replace("_", "")
    kinds = ("reducescatter", "allreduce", "alltoall", "allgather")
    return next(kind for kind in kinds if kind in name)


@pytest.mark.parametrize("name", COUNTED)
@on_processes(*PLAIN)
def test_numbers_of_collectives(rank: int, place: str, name: str) -> None:
    """``comm``: a hook takes the place of reductions, and adds the end of the step.

    Over Gloo few ranks exchange messages in place of all-gathers, which PyTorch's mode does not
    see. ``allreduce()`` has the other collectives of ``fully_shard``. With a codec a reduction is
    an exchange; across replicas another one follows. At a step's end messages tell that it went
    well on all ranks.
    """
    model, make = _stack(place), COUNTED[name]
    handle = None if make is None else attach(model, make())
    model(torch.randn(4, 5)).sum().backward()
    counts: Counter[str] = Counter()

    def counted(issue: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            counts["exchange"] += 1
            return issue(*arguments, **options)

        return counting

    with CommDebugMode() as mode, pytest.MonkeyPatch.context() as patch:
        for method in ("exchange", "reduce"):
            patch.setattr(issuing.Place, method, counted(getattr(issuing.Place, method)))
        model(torch.randn(4, 5)).sum().backward()
    for operator, count in mode.get_comm_counts().items():
        counts[_kind(operator)] += count
    if handle is not None:
        handle.remove()
    expected = dict(PLAIN[place])
    if name != "none":
        # Also one in each group at the step's end.
        expected["exchange"] = expected.pop("allgather") + {"fsdp-3": 1, "hsdp-4": 2}[place]
    if name == "int8":
        del expected["reducescatter" if place == "fsdp-3" else "allreduce"]
        expected["exchange"] += {"fsdp-3": 3, "hsdp-4": 6}[place]
    assert +counts == expected, counts
