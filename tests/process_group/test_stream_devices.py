"""Hooks on a device with streams, over a group whose collectives run on one, as NCCL's do."""

from __future__ import annotations

import functools
import time
import unittest.mock
from collections.abc import Iterator
from typing import Any

import pytest
import stream_groups
import torch
import torch.distributed as dist
from cpp_libraries import library
from echo_group import EchoGroup
from mode_cases import Mode, OwnError, batch, module
from rank_pool import KEPT_GROUPS, RankPool
from stream_groups import (
    DEVICE,
    MIXED,
    NAME,
    NAMES,
    STAGED,
    assert_same,
    attached,
    hook_of,
    parameters_of_steps,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from torch_commhook import GradBucket, attach, hooks, load_cpp_hooks

Paths = tuple[str, str]


def _cpp_hooks() -> str:
    return library("comm_hooks")


@pytest.fixture(scope="module")
def paths() -> Paths:
    return library("stream_device"), _cpp_hooks()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Processes of their own: a device stays in one."""
    pool = RankPool(2)
    yield pool
    pool.stop()


def _train(rank: int, paths: Paths, name: str, mode: Mode, backend: str | None) -> list[Tensor]:
    torch._dynamo.reset()
    load_cpp_hooks(paths[1])
    stream_groups.load(paths[0])  # also over Gloo: before the process's first backward
    device = "cpu" if backend is None else DEVICE
    group = dist.new_group(backend=backend or "gloo")
    alone = [dist.new_group([each], backend=backend or "gloo") for each in range(2)][rank]
    return _steps(rank, mode, module(), hook_of(name, group, alone), group, device)


def _steps(
    rank: int, mode: Mode, net: nn.Module, hook: Any, group: dist.ProcessGroup, device: str
) -> list[Tensor]:
    model, handle = attached(mode, net.to(device), hook, group)
    found = parameters_of_steps(rank, mode, model)
    handle.remove()
    return found


CASES = [(name, Mode(model, "eager")) for name in NAMES for model in ("module", "ddp")]


@pytest.mark.parametrize(("name", "mode"), CASES, ids=str)
def test_results_are_those_over_gloo(ranks: RankPool, paths: Paths, name: str, mode: Mode) -> None:
    """The same bits as on the CPU, where results are there when Futures are complete."""
    want = ranks.run(_train, paths, name, mode, None)
    got = ranks.run(_train, paths, name, mode, MIXED)
    assert_same(want, got, same_bits=name != "powersgd")  # whose products are ATen's on a device


@functools.cache
def _mesh(backend: str | None) -> DeviceMesh:
    """Of both ranks; one in a process, since DTensor remembers what it has planned for it."""
    group = dist.new_group(backend=backend or "gloo")
    KEPT_GROUPS.add(group.group_name)
    return DeviceMesh.from_group(group, "cpu" if backend is None else NAME)


def _train_sharded(rank: int, paths: Paths, name: str, backend: str | None) -> list[Tensor]:
    stream_groups.load(paths[0])
    device = "cpu" if backend is None else DEVICE
    mesh = _mesh(backend)
    group = mesh.get_group()
    model = module().to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    handle = attach(model, hook_of(name, group, group))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number in range(3):
        optimizer.zero_grad()
        model(batch(rank, number).to(device)).square().sum().backward()
        optimizer.step()
        found += [parameter.detach().to_local().cpu().clone() for parameter in model.parameters()]
    handle.remove()
    return found


@pytest.mark.parametrize("name", ["allreduce", "cast", "blockwise", "fp8", "sign"])
def test_results_of_shards_are_those_over_gloo(ranks: RankPool, paths: Paths, name: str) -> None:
    """Of fully_shard, as on the CPU."""
    want = ranks.run(_train_sharded, paths, name, None)
    got = ranks.run(_train_sharded, paths, name, MIXED)
    assert_same(want, got)


@pytest.mark.parametrize(
    "name", ["cpp allreduce", "cpp cast", "cpp gradients", "allreduce", "cast"]
)
def test_a_group_that_knows_no_streams(ranks: RankPool, paths: Paths, name: str) -> None:
    """Such as Gloo's, whose Futures are complete before the copies to a device."""
    mode = Mode("module", "eager")
    want = ranks.run(_train, paths, name, mode, None)
    got = ranks.run(_train, paths, name, mode, STAGED)
    assert_same(want, got)


# ---- on one device, without other processes ------------------------------------------------------


def _train_with_echo(
    rank: int, paths: Paths, device: str, name: str, mode: Mode, is_late: bool
) -> list[Tensor]:
    load_cpp_hooks(paths[1])
    if device == DEVICE:
        library = stream_groups.load(paths[0])
        pause = functools.partial(library.sleep, stream_groups.DELAY_SECONDS)
    else:
        pause = functools.partial(torch.cuda._sleep, 10_000_000)  # cycles of the clock
    group = EchoGroup(device, pause, is_late=is_late)
    torch.manual_seed(0)
    sizes = [(48, 64), (64, 64), (64, 8)]  # of which each rank has as many blocks
    net = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))
    return _steps(rank, mode, net, hook_of(name, group, group), group, device)


ECHO_NAMES = [name for name in NAMES if name not in ("adaptive", "hierarchical")]


@pytest.mark.parametrize("model", ["module", "ddp"])
@pytest.mark.parametrize("name", ECHO_NAMES)
def test_results_are_waited_for(ranks: RankPool, paths: Paths, name: str, model: str) -> None:
    """The same bits as where the host waits in each collective."""
    arguments = paths, DEVICE, name, Mode(model, "eager")
    want = ranks.run(_train_with_echo, *arguments, False)
    assert_same(want[:1], ranks.run(_train_with_echo, *arguments, True)[:1])


@pytest.mark.cuda
@pytest.mark.parametrize("model", ["module", "ddp"])
@pytest.mark.parametrize("name", ECHO_NAMES)
def test_results_are_waited_for_on_cuda(one_rank: None, name: str, model: str) -> None:
    """The same, behind a kernel that sleeps."""
    arguments = ("", _cpp_hooks()), "cuda:0", name, Mode(model, "eager")
    want = _train_with_echo(0, *arguments, False)
    assert_same([want], [_train_with_echo(0, *arguments, True)])


# ---- overlap -------------------------------------------------------------------------------------


def _goes_on(rank: int, paths: Paths, hook: Any) -> tuple[int, bool, Tensor]:
    """Messages on a wire that is held, whether the current stream goes on, and the result."""
    library = stream_groups.load(paths[0])
    group = dist.new_group(backend=MIXED)
    model = nn.Linear(16, 8).to(DEVICE)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    attach(model, hook, process_group=group)
    before = library.issued()
    end = torch.Event(DEVICE)
    average, passed = hook.average, []

    def watched(bucket: GradBucket) -> Any:
        future = average(bucket)
        end.record()
        deadline = time.monotonic() + 60
        while not end.query() and time.monotonic() < deadline:
            time.sleep(0.001)
        passed.append((library.issued() - before, end.query()))
        library.release()
        return future

    torch.accelerator.current_stream(DEVICE).synchronize()  # with what attach() has sent
    library.hold()
    try:
        with unittest.mock.patch.object(
            type(hook), "average", lambda self, bucket: watched(bucket)
        ):
            model(torch.full((1, 16), rank + 1.0).to(DEVICE)).sum().backward()
    finally:
        library.release()
    assert model.weight.grad is not None
    return *passed[0], model.weight.grad.cpu()


@pytest.mark.parametrize(
    ("hook", "messages"),
    [
        (hooks.allreduce(), 1),
        (hooks.cast(), 1),
        (hooks.policy([("dim <= 1", hooks.allreduce())], hooks.cast()), 2),
        (hooks.policy([("dim <= 1", hooks.cast())], hooks.allreduce()), 2),
    ],
    ids=str,
)
def test_the_stream_of_the_gradients_goes_on(
    ranks: RankPool, paths: Paths, hook: Any, messages: int
) -> None:
    """All messages of a bucket are issued, and the backward waits for none, before its end."""
    for issued, went_on, gradient in ranks.run(_goes_on, paths, hook):
        assert issued == messages
        assert went_on
        assert torch.equal(gradient, torch.full((8, 16), 1.5))


# ---- after a step that failed --------------------------------------------------------------------


class FailsAtSecondBucket(hooks.allreduce):
    """Fails on one rank when it is told to, and notes the buckets that come."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.sizes: list[int] = []

    def average(self, bucket: GradBucket) -> Any:
        self.sizes.append(bucket.numel())
        if self.fails and bucket.index() == 1:
            raise OwnError("boo")
        return super().average(bucket)


def _fails_on_rank_1(rank: int, paths: Paths, backend: str, model: str) -> tuple[list[str], bool]:
    library = stream_groups.load(paths[0])
    group = dist.new_group(backend=backend)
    mode = Mode(model, "eager")
    hook = FailsAtSecondBucket()
    net, handle = attached(mode, nn.Sequential(module(), nn.BatchNorm1d(4)).to(DEVICE), hook, group)
    said = []
    issued = 0
    with mode.step_function(net) as step:
        for number in range(4):
            hook.fails = rank == 1 and number == 2
            if number < 3:
                hook.sizes.clear()
            try:
                step(batch(rank, number).to(DEVICE))
                said.append("good")
            except (RuntimeError, OwnError) as error:
                said.append(f"{type(error).__name__}: {error}")
            if number == 1:
                sizes = list(hook.sizes)
            elif number == 2:
                issued = library.issued()
    is_quiet = library.issued() == issued
    handle.remove()
    # What rank 0 has left there, a collective of rank 1 meets.
    met = rank == 0
    for size in sizes[1:] if rank == 1 else []:
        own_tensor = torch.zeros(size, device=DEVICE)
        dist.all_reduce(own_tensor, group=group)
        met = bool(own_tensor.any())
    torch.accelerator.synchronize(DEVICE)
    return said, is_quiet and met


@pytest.mark.parametrize("backend", [MIXED, NAME])
@pytest.mark.parametrize("model", ["module", "ddp"])
def test_no_collective_meets_those_of_a_step_that_failed(
    ranks: RankPool, paths: Paths, backend: str, model: str
) -> None:
    """All ranks raise in that step, and refuse the next one, before they send anything."""
    found = ranks.run(_fails_on_rank_1, paths, backend, model, timeout=60)
    for rank, (said, is_safe) in enumerate(found):
        assert said[:2] == ["good", "good"]
        assert said[2].startswith("OwnError: boo" if rank == 1 else "PeerError: "), said[2]
        assert "boo" in said[2]
        assert said[3].startswith("RuntimeError: "), said[3]
        assert "Its collectives may still be running" in said[3]
        assert is_safe
