"""Hooks on models that are sharded over one axis of a mesh, and tensor parallel on the other."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from mode_cases import OwnError
from sharded_models import (
    Failing,
    Mesh,
    Scenario,
    batch,
    device_mesh,
    differences,
    far,
    local,
    loss_of,
    on_processes,
    on_ranks,
    reference,
    reshard,
    sgd_at,
    take_steps,
    two_axes,
    whole,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torch_commhook import PeerError, attach, hooks


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))


def _shard_over(model: nn.Module, mesh: DeviceMesh, *axes: str) -> None:
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh[axes])


def _shard(model: nn.Module, mesh: Mesh) -> None:
    _shard_over(model, mesh.mesh, "dp")


def _in_replicas() -> nn.Module:
    model = _net()
    mesh = device_mesh((2, 1, 2), ("replicas", "shards", "tp"))
    _shard_over(model, mesh, "replicas", "shards")
    return model


SCENARIO = Scenario(net=_net, shard=_shard)


def _mesh() -> Mesh:
    return Mesh("fsdp", two_axes(("dp", "tp")))


@on_ranks("fsdp-4")
def test_allreduce_has_the_bits_of_fully_shard(rank: int, place: str) -> list[str]:
    got = take_steps(SCENARIO, _mesh(), rank // 2, hooks.allreduce())
    return differences(got, take_steps(SCENARIO, _mesh(), rank // 2, None))


@pytest.mark.parametrize("with_feedback", [False, True], ids=["blockwise", "error_feedback"])
@on_ranks("fsdp-4")
def test_hooks_are_near_the_mean(rank: int, place: str, with_feedback: bool) -> list[str]:
    expected, largest = reference(SCENARIO, 2)
    steps = partial(take_steps, SCENARIO, _mesh(), rank // 2, optimizer=sgd_at(0.0), gather=True)
    if not with_feedback:
        done = steps(hooks.blockwise(), count=1)
        return far(done.whole[0], expected, 0.51 / 127 * largest, "blockwise")
    done = steps(hooks.error_feedback(hooks.blockwise(bits=4)), count=6, same_batches=True)
    sums = [sum(gradients) for gradients in zip(*done.whole, strict=True)]
    return far(sums, [6 * each for each in expected], 0.6 / 7 * largest, "the sum")


@on_processes("fsdp-4")
def test_a_hook_that_fails(rank: int, place: str) -> list[str]:
    """The last reduction of one rank fails; ranks with other columns have no part in it."""
    mesh = _mesh()
    plain, model = SCENARIO.net(), SCENARIO.net()
    for each in (plain, model):
        SCENARIO.shard(each, mesh)
    expected = _gradients(plain, rank)
    hook = Failing()
    handle = attach(model, hook)
    found = []
    for fails in range(4):
        hook.fails_in = 2 if rank == fails else None
        try:
            _gradients(model, rank)
            found.append("no error")
        except (OwnError, PeerError) as error:
            if isinstance(error, OwnError) != (rank == fails):
                found.append(f"{error}")
        hook.fails_in = None
        got = _gradients(model, rank)
        if not all(a.equal(b) for a, b in zip(got, expected, strict=True)):
            found.append(f"other bits after rank {fails} has failed")
    handle.remove()
    return found


def _gradients(model: nn.Module, rank: int) -> list[Tensor]:
    model.zero_grad()
    loss_of(model(batch(rank // 2, 0))).backward()
    reshard(model)
    return [local(parameter.grad) for parameter in model.parameters()]


@on_ranks("fsdp-4")
def test_ranks_that_differ(rank: int, place: str) -> None:
    """From the rank that has other columns of the same rows."""
    model = SCENARIO.net()
    SCENARIO.shard(model, _mesh())
    with pytest.raises(RuntimeError, match="the hook must be the same on all ranks"):
        attach(model, hooks.blockwise(bits=4 if rank % 2 else 8))


# ---- replicas that are apart ---------------------------------------------------------------------


@pytest.mark.parametrize("fails_in", [None, 0, 3])
@on_processes("fsdp-4")
def test_replicas_that_are_apart(rank: int, place: str, fails_in: int | None) -> list[str]:
    """Two replicas, each of which two ranks have columns of; one rank fails at an exchange."""
    model, plain = _in_replicas(), _net().double()
    hook = Failing()
    handle = attach(model, hooks.local_sgd(2, outer=hooks.outer_sgd(1.0, 0.0), hook=hook))
    models = [plain, _net().double()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (model, *models)]
    found = []
    for number in range(4):
        hook.fails_in = 1 if number == 1 and rank == fails_in else None
        for each in optimizers:
            each.zero_grad()
        loss_of(model(batch(rank // 2, number))).backward()
        for data_rank, each in enumerate(models):
            each(batch(data_rank, number).double()).square().sum().backward()
        for each in optimizers[1:]:
            each.step()
        try:
            optimizers[0].step()
            said = "nothing"
        except (OwnError, PeerError) as error:
            said = type(error).__name__
        wanted = "nothing"
        if number == 1 and fails_in is not None:
            wanted = "OwnError" if rank == fails_in else "PeerError"
            hook.fails_in = None
            handle.synchronize()
        found += [] if said == wanted else [f"step {number}: {said}, not {wanted}"]
        if number % 2:
            with torch.no_grad():
                for one, other in zip(*(m.parameters() for m in models), strict=True):
                    mean = (one + other) / 2
                    one.copy_(mean)
                    other.copy_(mean)
        reshard(model)
        got = [whole(parameter) for parameter in model.parameters()]
        expected = [parameter.detach() for parameter in models[rank // 2].parameters()]
        found += far(got, expected, 1e-5, f"step {number}")
    handle.remove()
    return found


@pytest.mark.parametrize("fails_in", [None, 0, 3])
@on_processes("fsdp-4")
def test_a_fragment_in_the_background(rank: int, place: str, fails_in: int | None) -> None:
    """One rank fails where the exchange of a fragment begins.

    Fragments end after steps 3 and 5, or after 5 and 6 where the first fails.
    """
    model = _in_replicas()
    hook = Failing()
    handle = attach(model, hooks.local_sgd(4, hook=hook, fragments=2, delay=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    said = []
    for number in range(6):
        hook.fails_in = 0 if number == 1 and rank == fails_in else None
        optimizer.zero_grad()
        loss_of(model(batch(rank // 2, number))).backward()
        try:
            optimizer.step()
            said.append("")
        except (OwnError, PeerError) as error:
            said.append(type(error).__name__)
    steps = handle.stats().steps
    handle.synchronize()
    reshard(model)
    handle.remove()
    every: list[object] = [None] * 4
    torch.distributed.all_gather_object(every, [whole(p).tolist() for p in model.parameters()])
    kind = "OwnError" if rank == fails_in else "PeerError"
    assert said == ["", "", "" if fails_in is None else kind, "", "", ""]
    assert steps == 2
    assert every[0] == every[rank]
