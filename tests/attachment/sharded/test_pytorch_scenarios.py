"""What PyTorch's own tests of ``fully_shard`` check, with ``allreduce()`` attached.

The installed wheel has the models of these tests and not the tests. Each scenario is trained twice,
with the hook and without: losses, gradients and parameters have the same bits. PyTorch's tests
compare with a model that is not sharded, to within roundings.

Left out: what needs a GPU (streams, memory, overlap), what does not train (names of classes,
logging, errors of ``fully_shard`` itself), and meshes that differ between parameters, which
``attach`` refuses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytorch_scenarios import PLACES, SCENARIOS
from rank_pool import RankPool
from sharded_models import (
    Mesh,
    Training,
    by_layer,
    local,
    local_part,
    on_ranks,
    reshard,
    run_on,
    unlike,
)
from sharded_scenarios import unlike_plain
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import share_comm_ctx
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_fsdp import MLPStack

from torch_commhook import attach, hooks
from torch_commhook.collectives import exchange
from torch_commhook.testing import run_ranks


def _scenario(rank: int, place: str, name: str) -> list[str]:
    return unlike_plain(SCENARIOS[name], place, rank)


#: Which of the scenarios are run on a mesh of two dimensions, too, in the tests that are not long.
_ON_TWO_AXES = (
    "training: a transformer",
    "training: losses in chunks add up",
    "autograd: one output of two",
    "autograd: optimizers in hooks",
    "scaler",
    "clip: 2.0",
    "extensions",
    "frozen: biases alone",
)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(
            *each,
            marks=pytest.mark.long if each[1] == "hsdp-4" and each[0] not in _ON_TWO_AXES else [],
        )
        for each in PLACES
    ],
)
def test_bits_of_fully_shard(request: pytest.FixtureRequest, name: str, place: str) -> None:
    run_on(request, place, _scenario, name)


# ---- scenarios of another form -------------------------------------------------------------------


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


def _stack(place: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = MLPStack(5)
    by_layer(model, Mesh.of(place), **settings)
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


def _unfrozen(rank: int, place: str, hooked: bool) -> list[Any]:
    model = _stack(place)
    model[1].requires_grad_(False)
    handle = attach(model, hooks.allreduce()) if hooked else None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for number in range(3):
        if number == 2:
            model[1].requires_grad_(True)
            if handle is not None:
                handle.remove()
                handle = attach(model, hooks.allreduce())
        model(Training(model, rank, number).batch(0, 4)).sum().backward()
        reshard(model)
        found += [local_part(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return found


@on_ranks("fsdp-1", "fsdp-3")
def test_parameters_that_are_unfrozen(rank: int, place: str) -> list[str]:
    """``frozen``: with a hook, it is attached again before the last step; also on one rank."""
    return unlike(_unfrozen(rank, place, True), _unfrozen(rank, place, False))


def _unsharded_by_hand(rank: int, place: str, hooked: bool) -> list[Any]:
    model = _stack(place, reshard_after_forward=False)
    handle = attach(model, hooks.allreduce()) if hooked else None
    found: list[Any] = []
    for number in range(3):
        handles = [part.unshard(async_op=True) for part in model]  # before the first forward, too
        found += [[tuple(p.shape) for p in part.parameters()] for part in model]
        for waits in handles[:2]:
            waits.wait()
        loss = model(Training(model, rank, number).batch(0, 4)).sum()
        for part in model:
            part.reshard()  # their backwards gather them again
        loss.backward()
        reshard(model)
        found += [loss, *(local(p.grad) for p in model.parameters())]
        model.zero_grad()
    if handle is not None:
        handle.remove()
    return found


@on_ranks("fsdp-3")
def test_unsharding_and_resharding_by_hand(rank: int, place: str) -> list[str]:
    """``comm``: ``unshard``, waited for or not, and ``reshard`` before backward."""
    return unlike(_unsharded_by_hand(rank, place, True), _unsharded_by_hand(rank, place, False))


# ---- how many collectives there are --------------------------------------------------------------


def _kind(operator: object) -> str:
    """Of a collective, whose operators have other names in other versions."""
    name = str(operator).replace("_", "")
    kinds = ("reducescatter", "allreduce", "alltoall", "allgather")
    return next(kind for kind in kinds if kind in name)


class _Exchanges(list[str]):
    """Notes the exchanges of messages, which PyTorch's mode does not see."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        issued = exchange.Place.exchange
        patch.setattr(
            exchange.Place,
            "exchange",
            lambda *arguments: self.append("exchange") or issued(*arguments),
        )


def _counts(rank: int, place: str, name: str) -> dict[str, int]:
    """Collectives of the second step, as PyTorch's own mode counts them, and exchanges."""
    model = _stack(place)
    make = COUNTED[name]
    handle = None if make is None else attach(model, make())
    for _ in range(2):
        with CommDebugMode() as mode, pytest.MonkeyPatch.context() as patch:
            exchanged = _Exchanges(patch)
            model(torch.randn(4, 5)).sum().backward()
    counts = {"exchange": len(exchanged)}
    for operator, count in mode.get_comm_counts().items():
        kind = _kind(operator)
        counts[kind] = counts.get(kind, 0) + count
    if handle is not None:
        handle.remove()
    return {kind: count for kind, count in counts.items() if count}


COUNTED: dict[str, Any] = {"none": None, "allreduce": hooks.allreduce, "int8": hooks.blockwise}

#: Three modules are gathered in forward and in backward, and reduced once.
PLAIN: dict[str, dict[str, int]] = {
    "fsdp-3": {"allgather": 6, "reducescatter": 3},
    "hsdp-4": {"allgather": 6, "reducescatter": 3, "allreduce": 3},
}


@pytest.mark.parametrize("place", PLAIN)
@pytest.mark.parametrize("name", COUNTED)
def test_numbers_of_collectives(ranks: RankPool, name: str, place: str) -> None:
    """``comm``: a hook takes the place of reductions, and adds the end of the step.

    Over Gloo few ranks exchange messages in place of all-gathers. ``allreduce()`` has the other
    collectives of ``fully_shard``. With a codec a reduction is an exchange; across replicas another
    one follows. At a step's end messages tell that it went well on all ranks.
    """
    expected = dict(PLAIN[place])
    if name != "none":
        expected["exchange"] = expected.pop("allgather")
    if name == "int8":
        del expected["reducescatter" if place == "fsdp-3" else "allreduce"]
        expected["exchange"] += {"fsdp-3": 3, "hsdp-4": 6}[place]
    assert ranks.run(_counts, place, name) == [expected] * ranks.world_size
