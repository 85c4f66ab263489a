"""Hooks over a group whose collectives run on a stream: results are used when they are there."""

from __future__ import annotations

import unittest.mock
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cpp_libraries import library
from mode_cases import BreaksTheGraph, Mode, OwnError, batch, module
from on_ranks import on_processes
from rank_pool import RankPool
from stream_groups import (
    NAMES,
    assert_same,
    attached,
    hook_of,
    parameters_of_steps,
    stream_backend,
    stream_group,
)
from torch import Tensor, nn
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import FakeProcessGroup, _ProcessGroupWrapper
from torch._dynamo.utils import counters
from torch.distributed import distributed_c10d
from torch.profiler import ProfilerActivity, profile
from torch_releases import since

from torch_commhook import _C, attach, hooks, load_cpp_hooks
from torch_commhook.codecs import CODECS
from torch_commhook.collectives import symmetric
from torch_commhook.step.step_group import StepGroup

Paths = tuple[str, str]


@pytest.fixture(scope="module")
def paths() -> Paths:
    return library("stream_group"), library("comm_hooks")


def _train(
    rank: int, paths: Paths, name: str, mode: Mode, streams: bool, options: dict[str, Any]
) -> list[Tensor]:
    torch._dynamo.reset()
    load_cpp_hooks(paths[1])
    group = stream_group(paths[0]) if streams else dist.new_group()
    alone = dist.new_subgroups(1)[0]
    model, handle = attached(mode, module(), hook_of(name, group, alone), group, **options)
    found = parameters_of_steps(rank, mode, model)
    handle.remove()
    return found


EAGER = Mode("module", "eager")
CASES = [
    (name, Mode(model, "eager"), {})
    for name in NAMES
    if name != "adaptive"
    for model in ("module", "ddp")
]
CASES += [
    (name, EAGER, {"gradient_as_bucket_view": True}) for name in ("cpp allreduce", "blockwise")
]
# Several buckets, whose second stages wait for each other's first ones.
CASES += [
    (name, EAGER, {"bucket_cap_mb": 0.01})
    for name in ("blockwise", "fp8", "error_feedback", "powersgd", "policy", "clip")
]
CASES += [
    (name, Mode("module", "context", backend="aot_eager"), {})
    for name in ("cpp allreduce", "blockwise")
]


@pytest.mark.parametrize(("name", "mode", "options"), CASES, ids=str)
def test_results_are_waited_for(
    two_ranks: RankPool, paths: Paths, name: str, mode: Mode, options: dict[str, Any]
) -> None:
    """The same bits as over Gloo, whose Futures are complete when the values are there."""
    want = two_ranks.run(_train, paths, name, mode, False, options)
    got = two_ranks.run(_train, paths, name, mode, True, options)
    assert_same(want, got)


# ---- after a step that failed --------------------------------------------------------------------


class Fails:
    """As a posthook: raises when it is told to."""

    def __init__(self) -> None:
        self.now = False

    def __call__(self, gradients: tuple[Tensor, ...], local: tuple[Tensor, ...]) -> None:
        if self.now:
            raise OwnError("boo")


#: What travels over a group whose collectives nobody can end.
OVER = ["the model's group", "the hook's group", "a device's backend"]


@on_processes
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("model", ["module", "ddp"])
def test_no_step_after_one_that_failed(rank: int, paths: Paths, model: str, over: str) -> None:
    """Its collectives may still be under way, where those of the next step would meet them."""
    mode = Mode(model, "eager")
    torch._dynamo.reset()
    streams = stream_group(paths[0])
    hook = hooks.blockwise(8)
    group = dist.new_group()
    if over == "the model's group":
        group = streams
    elif over == "the hook's group":
        hook = hooks.blockwise(8, process_group=streams)
    # Tensors on the CPU stand for those of a device for which the group has another backend.
    on_device = unittest.mock.patch.object(
        StepGroup, "group_for", lambda self, device: on_a_device(self, torch.device("meta"))
    )
    on_a_device = StepGroup.group_for
    said = []
    with on_device if over == "a device's backend" else nullcontext():
        net, handle = attached(mode, module(), hook, group)
        fails = Fails()
        handle.register_posthook(fails)
        with mode.step_function(net) as step:
            for number in range(4):
                if over == "the model's group" and rank == 0 and number > 1:
                    break  # where nobody tells it, it would wait for rank 1
                fails.now = number == rank == 1
                net.zero_grad()
                try:
                    step(batch(rank, number))
                    said.append("good")
                except RuntimeError as error:
                    said.append(f"{type(error).__name__}: {error}")
                except OwnError:
                    said.append("OwnError")
        handle.remove()
        if over != "the hook's group" and len(said) == 4:
            with pytest.raises(RuntimeError, match="collectives may still be running"):
                attach(net, hook, process_group=None if mode.model == "ddp" else group)
    final = "Its collectives may still be running"
    assert all(each.startswith("RuntimeError: ") and final in each for each in said[2:])
    assert said[0] == "good"
    if rank == 1:
        assert said[1] == "OwnError" and len(said) == 4
    elif over != "the model's group":
        assert said[1].startswith("PeerError: ") and "on rank 1: OwnError: boo" in said[1]


# ---- a compiled backward that is cut in two ------------------------------------------------------


def _train_broken(rank: int, path: str, name: str, is_traced: bool) -> tuple[list[Tensor], int]:
    """The gradients of each step, and how many graphs the backward was traced into."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    group = stream_group(path)
    layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(6))
    handle = attach(layers, hook_of(name, group, group), process_group=group, bucket_cap_mb=0.01)
    compiler = torch.compile(backend="eager")
    found = []
    for step in range(3):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(8 * step + rank))
        for index, layer in enumerate(layers):
            x = BreaksTheGraph.apply(layer(x)) if index == 2 else layer(x)
        enabled = torch._dynamo.compiled_autograd._enable(compiler)
        with enabled if is_traced else nullcontext():
            layers.zero_grad()
            x.square().sum().backward()
        found += [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    handle.remove()
    return found, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ["blockwise", "error_feedback", "policy"])
def test_a_graph_break_between_buckets(two_ranks: RankPool, paths: Paths, name: str) -> None:
    """Second stages that wait at the break are issued with those of the buckets after it."""
    want = two_ranks.run(_train_broken, paths[0], name, False)
    got = two_ranks.run(_train_broken, paths[0], name, True, timeout=60)
    for (eager, _), (traced, graphs) in zip(want, got, strict=True):
        assert len(eager) == 36 and graphs >= 2
        assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


# ---- names of backends ---------------------------------------------------------------------------


def _broadcast(rank: int, backend: Any, group: dist.ProcessGroup) -> tuple[list[list[int]], int]:
    """Two tensors after a broadcast in one buffer, and the number of copies to and from it."""
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    tensors = [torch.full((3 - i,), 2 * i + rank, dtype=torch.uint8) for i in range(2)]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _C.broadcast_coalesced(group, tensors, 1 << 20, 0)
    copies = [each for each in profiler.events() or () if each.name == "aten::_foreach_copy_"]
    return [each.tolist() for each in tensors], len(copies)


@on_processes
@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-legacy", "nccl-lazy"])
def test_a_compiled_backend_of_any_name(rank: int, paths: Paths, name: str) -> None:
    """Memory of GPUs may be shared; each rank of a broadcast copies only once."""
    cuda = torch.device("cuda", 0)
    gloo = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend = stream_backend(paths[0], gloo, name)
    assert backend.name() == name
    group = dist.ProcessGroup(dist.HashStore(), rank, 2)
    group._register_backend(cuda, dist.ProcessGroup.BackendType.CUSTOM, backend)
    known = {group: ("custom", dist.HashStore())}
    with unittest.mock.patch.dict(distributed_c10d._world.pg_map, known):
        assert symmetric._may_share(CODECS["blockwise"](), cuda, group)
    assert _broadcast(rank, backend, group) == ([[0] * 3, [2] * 2], 1)


def test_a_backend_that_sends_nothing() -> None:
    """PyTorch's fake backend leaves buffers as they are; so the tensors stay as they are."""
    fake = FakeProcessGroup._create_internal(1, 2)
    group = dist.ProcessGroup(dist.HashStore(), 1, 2)
    assert not _C.has_compiled_backend(group, torch.device("cpu"))  # it has none yet
    assert _broadcast(1, fake, group) == ([[1] * 3, [3] * 2], 2)
    assert not _C.has_compiled_backend(group, torch.device("cpu"))
    assert not _C.has_compiled_backend(group, torch.device("cuda"))


def test_a_backend_inside_pytorchs_wrapper() -> None:
    """As with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``: it may be any backend."""
    make: Any = dist.ProcessGroupGloo
    gloo = make(dist.HashStore(), 0, 1, timedelta(seconds=10))
    for backend, is_compiled in ((gloo, True), (_ProcessGroupWrapper(gloo, gloo), False)):
        group = dist.ProcessGroup(dist.HashStore(), 0, 1)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        assert _C.has_compiled_backend(group, torch.device("cpu")) == is_compiled


@since("2.14")
def test_a_backend_of_a_python_class() -> None:
    """All ranks take what it writes, the source too."""

    class Adds(_distributed_c10d.Backend):  # type: ignore[misc]
        def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
            tensors[0].add_(1)
            return Done()

    class Done(dist.Work):
        def wait(self, timeout: Any = None) -> bool:
            return True

    group = dist.ProcessGroup(dist.HashStore(), 0, 2)
    assert _broadcast(0, Adds(0, 2), group) == ([[1] * 3, [3] * 2], 2)
    assert not _C.has_compiled_backend(group, torch.device("cpu"))
