"""Local steps, replicas of shards, and compiled backwards on a device with streams.

Collectives run on a stream of their own, as NCCL's do. A result that nobody waits for is NaN. The
library runs its stages on streams of its own, as on CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import types
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stream_groups
import torch
import torch.distributed as dist
from cpp_libraries import library
from mode_cases import Mode, batch, module
from rank_pool import KEPT_GROUPS, RankPool
from stream_groups import DEVICE, MIXED, NAME, assert_same, attached, parameters_of_steps
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_commhook import HookHandle, attach, hooks
from torch_commhook.codecs import CODECS
from torch_commhook.collectives import streams

RANKS = 4


@pytest.fixture(scope="module")
def path() -> str:
    return library("stream_device")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Processes of their own: a device stays in one."""
    pool = RankPool(RANKS)
    yield pool
    pool.stop()


def _compare(
    ranks: RankPool, train: Callable[..., list[Tensor]], *arguments: Any, same_bits: bool = True
) -> None:
    """What there is on the CPU, where results are there when Futures are complete."""
    want = ranks.run(train, *arguments, None)
    got = ranks.run(train, *arguments, MIXED)
    assert all(tensor.isfinite().all() for on_cpu in want for tensor in on_cpu)
    assert_same(want, got, same_bits)


def _device(backend: str | None) -> str:
    return "cpu" if backend is None else DEVICE


@contextlib.contextmanager
def _late(path: str, backend: str | None) -> Iterator[Callable[[], None]]:
    """Have the library's own streams on the device. Gives what holds up the current stream."""
    if backend is None:
        yield lambda: None
        return
    library = stream_groups.load(path)
    cuda = types.SimpleNamespace(
        Stream=lambda *_, **__: torch.Stream(DEVICE),
        current_device=lambda: 0,
        current_stream=lambda *_: torch.accelerator.current_stream(DEVICE),
        is_current_stream_capturing=lambda: False,
        stream=lambda stream: stream,
    )
    as_torch = types.SimpleNamespace(cuda=cuda)
    with unittest.mock.patch.multiple(streams, torch=as_torch, _WITH_STREAMS={NAME}, _of_device={}):
        yield lambda: library.sleep(2 * stream_groups.DELAY_SECONDS)


def _group(members: list[int], backend: str | None) -> Any:
    return dist.new_group(members, backend=backend or "gloo")


def _parameters(model: nn.Module) -> list[Tensor]:
    """Copies of this rank's, on the host."""
    own = [parameter.detach() for parameter in model.parameters()]
    return [(p.to_local() if isinstance(p, DTensor) else p).cpu().clone() for p in own]


def _ended(handle: HookHandle, model: nn.Module, found: list[Tensor]) -> list[Tensor]:
    """Adds the parameters after the last synchronization."""
    handle.synchronize()
    found += _parameters(model)
    handle.remove()
    return found


def _feedback() -> Any:
    return hooks.error_feedback(hooks.blockwise(8, 64))


# ---- whole gradients, and local steps ------------------------------------------------------------

HOOKS: dict[str, Callable[[], Any]] = {
    "cast": hooks.cast,
    "feedback": _feedback,
    "topk": lambda: hooks.error_feedback(hooks.topk(0.1)),
    "powersgd": lambda: hooks.error_feedback(hooks.powersgd(2)),
    "policy": lambda: hooks.policy([("numel > 2500", hooks.cast())], _feedback()),
    "clip": lambda: hooks.clip(0.1, _feedback()),
}
LOCAL: dict[str, Callable[[], Any]] = {
    "allreduce": lambda: hooks.local_sgd(2),
    "compressed": lambda: hooks.local_sgd(2, hook=_feedback()),
    "error_reset": lambda: hooks.local_sgd(2, hook=_feedback(), error_reset=True),
    "clip": lambda: hooks.local_sgd(2, hook=hooks.clip(0.01, hooks.cast())),
    "fragments": lambda: hooks.local_sgd(2, hook=_feedback(), fragments=2),
    "streaming": lambda: hooks.local_sgd(4, hook=_feedback(), fragments=2, delay=1, mix=0.5),
}


def _train(rank: int, path: str, name: str, model: str, backend: str | None) -> list[Tensor]:
    """Two pairs of ranks."""
    stream_groups.load(path)  # on the CPU too: before the process's first backward
    group = [_group([0, 1], backend), _group([2, 3], backend)][rank // 2]
    mode = Mode(model, "eager")
    found = []
    with _late(path, backend) as hold_up:
        hook = {**HOOKS, **LOCAL}[name]()
        net, handle = attached(mode, module().to(_device(backend)), hook, group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with mode.step_function(net) as step:
            for number in range(5):
                if number == 2:  # as a load does it, just after local steps have come together
                    with torch.no_grad():
                        next(net.parameters()).mul_(0.5)
                optimizer.zero_grad()
                hold_up()
                step(batch(rank, number).to(_device(backend)))
                hold_up()
                optimizer.step()
                found += _parameters(net)
        return _ended(handle, net, found)


@pytest.mark.parametrize("model", ["module", "ddp"])
@pytest.mark.parametrize("name", HOOKS)
def test_stages_on_streams_of_their_own(ranks: RankPool, path: str, name: str, model: str) -> None:
    """The products of powersgd are ATen's on a device."""
    _compare(ranks, _train, path, name, model, same_bits=name != "powersgd")


@pytest.mark.parametrize("model", ["module", "ddp"])
@pytest.mark.parametrize("name", LOCAL)
def test_ranks_come_together(ranks: RankPool, path: str, name: str, model: str) -> None:
    _compare(ranks, _train, path, name, model)


# ---- replicas of shards --------------------------------------------------------------------------


@functools.cache
def _mesh(backend: str | None) -> DeviceMesh:
    """Two replicas of two shards; one in a process, since DTensor remembers what it has planned."""
    axes = []
    for lines in ([[0, 2], [1, 3]], [[0, 1], [2, 3]]):
        groups = [_group(members, backend) for members in lines]
        axes += [
            each for members, each in zip(lines, groups, strict=True) if dist.get_rank() in members
        ]
    KEPT_GROUPS.update(group.group_name for group in axes)
    return DeviceMesh.from_group(
        axes,
        "cpu" if backend is None else NAME,
        mesh=torch.arange(RANKS).view(2, 2),
        mesh_dim_names=("replicas", "shards"),
    )


SHARDED: dict[str, Callable[[nn.Module], HookHandle]] = {
    "allreduce": lambda model: attach(model, hooks.allreduce()),
    "cast": lambda model: attach(model, hooks.cast()),
    "feedback": lambda model: attach(model, _feedback()),
    "topk": lambda model: attach(model, hooks.topk(0.1)),
    "shard_hook": lambda model: attach(model, hooks.cast(), shard_hook=_feedback()),
    "weights": lambda model: attach(model, hooks.cast(), weights=CODECS["blockwise"](8)),
    "local_sgd": lambda model: attach(model, hooks.local_sgd(2, hook=_feedback())),
    "streaming": lambda model: attach(
        model, hooks.local_sgd(2, hook=_feedback(), delay=1, mix=0.5)
    ),
}


def _train_sharded(rank: int, path: str, name: str, backend: str | None) -> list[Tensor]:
    stream_groups.load(path)
    mesh = _mesh(backend)
    model = module().to(_device(backend))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = []
    with _late(path, backend) as hold_up:
        handle = SHARDED[name](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            loss = model(batch(rank, number).to(_device(backend))).square().sum()
            hold_up()
            loss.backward()
            hold_up()
            optimizer.step()
            found += _parameters(model)
        return _ended(handle, model, found)


@pytest.mark.parametrize("name", SHARDED)
def test_replicas_of_shards(ranks: RankPool, path: str, name: str) -> None:
    _compare(ranks, _train_sharded, path, name)


# ---- compiled autograd ---------------------------------------------------------------------------

#: With all-reduces alone, one and two: the group does not have the gathers of compiled code.
COMPILED: dict[str, Callable[[], Any]] = {
    "clip": lambda: hooks.clip(0.1, hooks.cast()),
    "powersgd": lambda: hooks.error_feedback(hooks.powersgd(2)),
}


def _train_compiled(rank: int, path: str, name: str, backend: str | None) -> list[Tensor]:
    """On two of the ranks."""
    torch._dynamo.reset()
    stream_groups.load(path)
    group = _group([0, 1], backend)
    if rank > 1:
        return []
    mode = Mode("module", "context", fullgraph=True, backend="aot_eager")
    model, handle = attached(mode, module().to(_device(backend)), COMPILED[name](), group)
    found = parameters_of_steps(rank, mode, model)
    handle.remove()
    return found


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_backward(ranks: RankPool, path: str, name: str) -> None:
    """The products of powersgd are ATen's on a device."""
    _compare(ranks, _train_compiled, path, name, same_bits=name != "powersgd")


# ---- groups --------------------------------------------------------------------------------------


def _groups_of_second_stages(rank: int, path: str, backend: str | None) -> list[str]:
    """Those that there are after a step."""
    stream_groups.load(path)
    group = _group([0, 1, 2, 3], backend)
    model = nn.Linear(16, 8).to(_device(backend))
    handle = attach(model, hooks.blockwise(8), process_group=group)
    model(torch.ones(1, 16).to(_device(backend))).sum().backward()
    found = [each.group_desc for each in distributed_c10d._world.pg_names]
    handle.remove()
    return [each for each in found if each.endswith("second stages")]


def test_only_the_cpu_has_a_group_of_second_stages(ranks: RankPool, path: str) -> None:
    """On other devices both stages share one communicator."""
    assert all(len(found) == 1 for found in ranks.run(_groups_of_second_stages, path, None))
    assert ranks.run(_groups_of_second_stages, path, MIXED) == [[]] * RANKS
