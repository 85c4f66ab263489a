"""Sharded models: what gathers and scatters send, and states that go on in a new attachment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_commhook import attach
from torch_commhook.attachment.handle import HookHandle
from torch_commhook.codecs import CODECS
from torch_commhook.hooks import allreduce, blockwise, cast, error_feedback, powersgd
from torch_commhook.metrics import HookStats
from torch_commhook.testing import run_ranks

#: Elements of the shards of a rank of two: of the inner layer, and of the other.
INNER, REST = 32 * 64 + 32, 32 * 64 + 32


def filled_up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


#: Bytes of their messages in 8 bits, with a scale for each block of 256.
INT8 = {numel: filled_up(numel) + filled_up(4 * -(-numel // 256)) for numel in (INNER, REST)}


def sharded(replicas: int) -> nn.Module:
    """A model in two shards, for each of so many replicas; one where there is no such axis."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    if replicas == 1:
        mesh = init_device_mesh("cpu", (2,))
    else:
        mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def step(model: nn.Module, rank: int, number: int) -> None:
    """A step of SGD."""
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * number + rank))
    model(inputs).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad
            parameter.grad = None


def stats_of_a_step(rank: int, replicas: int, options: dict[str, Any]) -> HookStats:
    model = sharded(replicas)
    handle = attach(model, allreduce(), **options)
    step(model, rank, 0)
    return handle.stats()


@pytest.mark.parametrize(
    ("weights", "sent"),
    [(None, 4 * (2 * INNER + REST)), ("blockwise", 2 * INT8[INNER] + INT8[REST])],
)
def test_gathers_are_counted(weights: str | None, sent: int) -> None:
    """The inner layer's parameters are gathered in forward and backward, the root's once."""
    options = {} if weights is None else {"weights": CODECS[weights]()}
    for stats in run_ranks(stats_of_a_step, 2, 1, options):
        assert stats.bytes_gathered == sent
        assert stats.bytes_scattered == 0
        assert stats.bytes_sent == 4 * (INNER + REST)


@pytest.mark.parametrize(
    ("shard_hook", "sent"), [(None, 4 * (INNER + REST)), (blockwise, INT8[INNER] + INT8[REST])]
)
def test_scatters_within_a_replica_are_counted(
    shard_hook: Callable[[], Any] | None, sent: int
) -> None:
    options = {} if shard_hook is None else {"shard_hook": shard_hook()}
    for stats in run_ranks(stats_of_a_step, 4, 2, options):
        assert stats.bytes_scattered == sent
        assert stats.bytes_sent == 4 * (INNER + REST)  # across the replicas


# ---- states --------------------------------------------------------------------------------------


def whole(model: nn.Module) -> list[Tensor]:
    return [parameter.full_tensor() for parameter in model.parameters()]


def goes_on(rank: int, replicas: int, attach_to: Callable[[nn.Module], HookHandle]) -> bool:
    """Whether steps after a state was loaded give the bits of steps that were not interrupted."""
    first = sharded(replicas)
    handle = attach_to(first)
    for number in range(2):
        step(first, rank, number)
    state, parameters = handle.state_dict(), first.state_dict()
    second = sharded(replicas)
    second.load_state_dict(parameters)
    attach_to(second).load_state_dict(state)
    for model in (first, second):
        for number in range(2, 4):
            step(model, rank, number)
    return all(map(torch.equal, whole(first), whole(second)))


def int4() -> error_feedback:
    return error_feedback(blockwise(bits=4))


@pytest.mark.parametrize(
    ("replicas", "attach_to"),
    [
        pytest.param(1, lambda model: attach(model, int4()), id="on shards"),
        pytest.param(2, lambda model: attach(model, int4()), id="across replicas"),
        pytest.param(
            2,
            lambda model: attach(model, error_feedback(powersgd(rank=2)), shard_hook=int4()),
            id="both",
        ),
        pytest.param(
            2, lambda model: attach(model, cast(), shard_hook=int4()), id="within replicas"
        ),
    ],
)
def test_a_state_goes_on_in_a_new_attachment(
    replicas: int, attach_to: Callable[[nn.Module], HookHandle]
) -> None:
    assert all(run_ranks(goes_on, 2 * replicas, replicas, attach_to))


def load_other(rank: int, saved: dict[str, Any], loaded: dict[str, Any]) -> str:
    model = sharded(2)
    handle = attach(model, int4(), **saved)
    step(model, rank, 0)
    state = handle.state_dict()
    handle.remove()
    with pytest.raises(ValueError, match="load_state_dict: ") as caught:
        attach(model, int4(), **loaded).load_state_dict(state)
    return str(caught.value)


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (True, False, "the memory of a shard_hook if there is one, got one"),
        (False, True, "the memory of a shard_hook if there is one, got none"),
    ],
)
def test_a_state_of_another_shard_hook_is_refused(saved: bool, loaded: bool, message: str) -> None:
    with_hook, without = {"shard_hook": int4()}, {"shard_hook": cast()}
    arguments = [with_hook if one else {} if saved else without for one in (saved, loaded)]
    for said in run_ranks(load_other, 4, *arguments):
        assert message in said
