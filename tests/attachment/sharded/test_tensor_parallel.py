"""Hooks on models that are sharded over one axis of a mesh, and tensor parallel on the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from mode_cases import OwnError
from on_ranks import of_all_ranks
from sharded_local import tensors_by_path
from sharded_models import (
    Failing,
    Mesh,
    Scenario,
    batch,
    device_mesh,
    differences,
    far,
    gradients_of_step,
    loss_of,
    on_processes,
    on_ranks,
    reference,
    reshard,
    same_bits,
    sgd_at,
    take_steps,
    unlike,
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

from torch_commhook import PeerError, attach, hooks, reshard_states


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))


def _shard_over(model: nn.Module, mesh: DeviceMesh, axes: tuple[str, ...] = ("dp",)) -> None:
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh[axes])


def _mesh() -> Mesh:
    return Mesh("fsdp", device_mesh((2, 2), ("dp", "tp")))


SCENARIO = Scenario(net=_net, shard=lambda model, mesh: _shard_over(model, mesh.mesh))
SHARDS, REPLICAS = ("dp",), ("replicas", "shards")


def _sharded(axes: tuple[str, ...] = SHARDS) -> nn.Module:
    """Over two shards, or over two replicas of one shard; two ranks have columns of each."""
    model = _net()
    _shard_over(model, device_mesh((2, 2) if axes == SHARDS else (2, 1, 2), (*axes, "tp")), axes)
    return model


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
def test_a_hook_that_fails(rank: int, place: str) -> None:
    """The last reduction of one rank fails; ranks with other columns have no part in it."""
    expected = gradients_of_step(_sharded(), rank // 2)
    model, hook = _sharded(), Failing()
    handle = attach(model, hook)
    for fails in range(4):
        hook.fails_in = 2 if rank == fails else None
        with pytest.raises(OwnError if rank == fails else PeerError):
            gradients_of_step(model, rank // 2)
        hook.fails_in = None
        assert same_bits(gradients_of_step(model, rank // 2), expected), fails
    handle.remove()


@on_ranks("fsdp-4")
def test_ranks_that_differ(rank: int, place: str) -> None:
    """From the rank that has other columns of the same rows."""
    with pytest.raises(RuntimeError, match="the hook must be the same on all ranks"):
        attach(_sharded(), hooks.blockwise(bits=4 if rank % 2 else 8))


# ---- replicas that are apart ---------------------------------------------------------------------


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> str:
    """Takes a step, and returns the kind of the error that the optimizer's step raises."""
    optimizer.zero_grad()
    loss_of(model(batch(rank // 2, number))).backward()
    try:
        optimizer.step()
    except (OwnError, PeerError) as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("fails_in", [None, 0, 3])
@on_processes("fsdp-4")
def test_replicas_that_are_apart(rank: int, place: str, fails_in: int | None) -> None:
    """Two replicas, each of which two ranks have columns of; one rank fails at an exchange."""
    model, hook = _sharded(REPLICAS), Failing()
    handle = attach(model, hooks.local_sgd(2, outer=hooks.outer_sgd(1.0, 0.0), hook=hook))
    models = [_net().double() for _ in range(2)]
    optimizer, *others = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (model, *models)]
    for number in range(4):
        hook.fails_in = 1 if number == 1 and rank == fails_in else None
        said = _step(model, optimizer, rank, number)
        for data_rank, (each, its) in enumerate(zip(models, others, strict=True)):
            its.zero_grad()
            each(batch(data_rank, number).double()).square().sum().backward()
            its.step()
        if number == 1 and fails_in is not None:
            assert said == ("OwnError" if rank == fails_in else "PeerError")
            hook.fails_in = None
            handle.synchronize()
        else:
            assert said == "nothing", number
        if number % 2:
            with torch.no_grad():
                for one, other in zip(*(m.parameters() for m in models), strict=True):
                    mean = (one + other) / 2
                    one.copy_(mean)
                    other.copy_(mean)
        reshard(model)
        got = [whole(parameter) for parameter in model.parameters()]
        expected = [parameter.detach() for parameter in models[rank // 2].parameters()]
        assert far(got, expected, 1e-5, f"step {number}") == []
    handle.remove()


@pytest.mark.parametrize("fails_in", [None, 0, 3])
@on_processes("fsdp-4")
def test_a_fragment_in_the_background(rank: int, place: str, fails_in: int | None) -> None:
    """One rank fails where the exchange of a fragment begins.

    Fragments end after steps 3 and 5, or after 5 and 6 where the first fails.
    """
    model, hook = _sharded(REPLICAS), Failing()
    handle = attach(model, hooks.local_sgd(4, hook=hook, fragments=2, delay=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    said = []
    for number in range(6):
        hook.fails_in = 0 if number == 1 and rank == fails_in else None
        said.append(_step(model, optimizer, rank, number))
    steps = handle.stats().steps
    handle.synchronize()
    reshard(model)
    handle.remove()
    every = of_all_ranks([whole(p).tolist() for p in model.parameters()])
    kind = "OwnError" if rank == fails_in else "PeerError"
    fails = "nothing" if fails_in is None else kind
    assert said == ["nothing", "nothing", fails, "nothing", "nothing", "nothing"]
    assert steps == 2
    assert every[0] == every[rank]


# ---- states --------------------------------------------------------------------------------------

HOOKS: dict[str, Callable[[], Any]] = {
    "int4": lambda: hooks.error_feedback(hooks.blockwise(bits=4)),
    "local_sgd": lambda: hooks.local_sgd(3, hook=HOOKS["int4"]()),
}


def _steps(model: nn.Module, rank: int, numbers: range) -> list[list[Tensor]]:
    return [gradients_of_step(model, rank // 2, number) for number in numbers]


@pytest.mark.parametrize(
    ("name", "axes"), [("int4", SHARDS), ("int4", REPLICAS), ("local_sgd", REPLICAS)]
)
@on_processes("fsdp-4")
def test_a_checkpoint_of_all_ranks(
    rank: int, place: str, name: str, axes: tuple[str, ...], tmp_path: Path
) -> None:
    """Ranks that have other columns of a parameter have other entries in it."""
    model = _sharded(axes)
    handle = attach(model, HOOKS[name]())
    _steps(model, rank, range(3))
    state = handle.state_dict()
    loaded = {"hook": copy.deepcopy(state)}
    checkpoint.save({"hook": state}, checkpoint_id=tmp_path)
    expected = _steps(model, rank, range(3, 5))
    handle.remove()
    for value in tensors_by_path(loaded).values():
        value.zero_()
    checkpoint.load(loaded, checkpoint_id=tmp_path)
    other = _sharded(axes)
    other_handle = attach(other, HOOKS[name]())
    other_handle.load_state_dict(loaded["hook"])
    got = _steps(other, rank, range(3, 5))
    other_handle.remove()
    assert unlike(got, expected) == []
    keys = of_all_ranks([key for key in state if "rank" in key])
    assert len({key for each in keys for key in each}) == 4


@on_ranks("fsdp-4")
def test_a_state_of_another_part(rank: int, place: str) -> None:
    model = _sharded()
    handle = attach(model, HOOKS["int4"]())
    _steps(model, rank, range(1))
    state = handle.state_dict()
    others = of_all_ranks(state)
    with pytest.raises(ValueError, match=f"must contain part {rank % 2}"):
        handle.load_state_dict(others[rank ^ 1])
    with pytest.raises(ValueError, match="must be of 2 parts"):
        handle.load_state_dict({key: state[key] for key in state if key != "parts"})
    with pytest.raises(ValueError, match="tensor parallelism"):
        reshard_states(others, 2)
    handle.remove()
