"""Hooks on a device with streams, over a group whose collectives run on one, as NCCL's do.

A result that nobody waits for is NaN. In some tests the library runs its stages on streams of its
own, as on CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import time
import types
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stream_groups
import torch
import torch.distributed as dist
from cpp_libraries import library
from mode_cases import Mode, OwnError, batch, module
from on_ranks import on_pool
from rank_pool import KEPT_GROUPS, RankPool
from stream_groups import (
    DEVICE,
    MIXED,
    NAME,
    NAMES,
    STAGED,
    EchoGroup,
    assert_same,
    attached,
    hook_of,
    parameters_of_steps,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_commhook import GradBucket, HookHandle, PeerError, attach, hooks, load_cpp_hooks
from torch_commhook.codecs import CODECS
from torch_commhook.collectives import futures, wire
from torch_commhook.step import link, step_group

#: As MIXED, with messages that pass through the host.
HOST = "over the host"
#: The same for tensors of two processes on one GPU.
CUDA = "over the host on CUDA"
OVER = pytest.mark.parametrize("backend", [MIXED, pytest.param(HOST, marks=pytest.mark.long)])
Paths = tuple[str, str]
NO_PATHS = "", ""
EAGER = {model: Mode(model, "eager") for model in ("module", "ddp")}
by_model = pytest.mark.parametrize("model", EAGER)


def _cpp_hooks() -> str:
    return library("comm_hooks")


@pytest.fixture(scope="module")
def paths() -> Paths:
    return library("stream_device"), _cpp_hooks()


def _pool(size: int) -> Iterator[RankPool]:
    """Processes of their own: a device stays in one."""
    pool = RankPool(size)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    yield from _pool(2)


@pytest.fixture(scope="module")
def pairs() -> Iterator[RankPool]:
    yield from _pool(4)


def _compare(
    ranks: RankPool,
    train: Callable[..., list[Tensor]],
    *arguments: Any,
    same_bits: bool = True,
    backend: str = MIXED,
) -> None:
    """The same as on the CPU, where results are there when Futures are complete."""
    want = ranks.run(train, *arguments, None)
    got = ranks.run(train, *arguments, backend)
    assert all(tensor.isfinite().all() for on_cpu in want for tensor in on_cpu)
    assert_same(want, got, same_bits)


def _device(backend: str | None) -> str:
    return {None: "cpu", CUDA: "cuda:0"}.get(backend, DEVICE)


def _group(members: list[int], backend: str | None) -> Any:
    name = {None: "gloo", HOST: MIXED, CUDA: "gloo"}.get(backend, backend)
    return dist.new_group(members, backend=name)


def _options(backend: str | None) -> dict[str, str]:
    return {"wire": "host"} if backend in (HOST, CUDA) else {}


def _train(rank: int, paths: Paths, name: str, mode: Mode, backend: str | None) -> list[Tensor]:
    torch._dynamo.reset()
    if paths != NO_PATHS:
        load_cpp_hooks(paths[1])
        stream_groups.load(paths[0])  # also over Gloo: before the process's first backward
    group = _group([0, 1], backend)
    alone = [_group([each], backend) for each in range(2)][rank]
    hook, device = hook_of(name, group, alone), _device(backend)
    return _steps(rank, mode, module(), hook, group, device, **_options(backend))


def _steps(
    rank: int,
    mode: Mode,
    net: nn.Module,
    hook: Any,
    group: dist.ProcessGroup,
    device: str,
    **options: Any,
) -> list[Tensor]:
    model, handle = attached(mode, net.to(device), hook, group, **options)
    before = stream_groups.issued()  # with rank 0's parameters
    found = parameters_of_steps(rank, mode, model)
    handle.remove()
    # DDP itself uses the device's group.
    assert not options or mode.model == "ddp" or stream_groups.issued() == before
    return found


@by_model
@OVER
@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_over_gloo(
    ranks: RankPool, paths: Paths, name: str, backend: str, model: str
) -> None:
    """The bits are those of the CPU, except powersgd's: ATen computes its products on a device."""
    same_bits = name != "powersgd"
    _compare(ranks, _train, paths, name, EAGER[model], same_bits=same_bits, backend=backend)


@pytest.mark.parametrize("name", ["cpp allreduce", "blockwise", "topk", "hierarchical"])
def test_messages_over_the_host(ranks: RankPool, paths: Paths, name: str) -> None:
    """Of one hook of each kind; the long cases have all."""
    _compare(ranks, _train, paths, name, EAGER["module"], backend=HOST)


@pytest.mark.cuda
@by_model
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("cpp")])
def test_messages_over_the_host_on_cuda(ranks: RankPool, name: str, model: str) -> None:
    same_bits = name != "powersgd"
    _compare(ranks, _train, NO_PATHS, name, EAGER[model], same_bits=same_bits, backend=CUDA)


@pytest.mark.parametrize(
    "name", ["cpp allreduce", "cpp cast", "cpp gradients", "allreduce", "cast"]
)
def test_a_group_that_knows_no_streams(ranks: RankPool, paths: Paths, name: str) -> None:
    """Such as Gloo's, whose Futures are complete before the copies to a device."""
    _compare(ranks, _train, paths, name, EAGER["module"], backend=STAGED)


# ---- collectives of the backend "commhook" -------------------------------------------------------


OWN = f"cpu:commhook,{NAME}:commhook"


def _collectives(rank: int, path: str, backend: str | None) -> list[Tensor]:
    """The results of each; on a device values come late, and so does what results overwrite."""
    library = stream_groups.load(path) if path else None
    wire.register_backend()
    group = dist.new_group(backend=OWN if backend == HOST else "commhook")
    device = _device(backend)

    def late(*shape: int, value: float | None = None) -> Tensor:
        numel = torch.Size(shape).numel()
        tensor = torch.arange(numel, dtype=torch.float32).view(shape).to(device)
        times = 2 if value is None else 10
        if backend == CUDA:
            torch.cuda._sleep(times * 5_000_000)  # cycles of the clock
        elif library is not None and backend is not None:
            library.sleep(times * stream_groups.DELAY_SECONDS)
        return tensor.mul_(rank + 1.0).add_(1) if value is None else tensor.fill_(value)

    def old(*shape: int) -> Tensor:
        return late(*shape, value=-1.0)

    found: list[Tensor] = []

    def keep(work: Any, *results: Tensor) -> None:
        if work is not None:
            work.wait()
        found.extend(result.clone().cpu() for result in results)

    options: dict[str, Any] = {"group": group, "async_op": True}
    for numel in (5, 90_001, 2_000_000):
        tensor = late(numel)
        keep(dist.all_reduce(tensor, **options), tensor)
        tensor = late(numel)
        keep(dist.broadcast(tensor, group_src=1, **options), tensor)
        tensor, out = late(numel), old(2, numel)
        keep(dist.all_gather_into_tensor(out, tensor, **options), out)
        tensor, out = late(2, numel), old(numel)
        keep(dist.reduce_scatter_tensor(out, tensor, **options), out)
        tensor, out = late(numel), old(numel)
        splits = [2, numel - 2] if rank == 0 else [numel - 2, 2]
        sends = [2, numel - 2] if rank == 0 else [numel - 2, 2]
        keep(dist.all_to_all_single(out, tensor, splits, sends, **options), out)
        outs = [old(numel), old(numel)]
        keep(dist.all_gather(outs, late(numel), **options), *outs)
        tensor = late(numel, 2).t()
        keep(dist.all_reduce(tensor, op=dist.ReduceOp.MAX, **options), tensor)
        tensor = late(numel)
        keep(dist.reduce(tensor, group_dst=0, **options), *([tensor] if rank == 0 else []))
        outs = [old(numel), old(numel)] if rank == 0 else []
        keep(dist.gather(late(numel), outs or None, group_dst=0, **options), *outs)
        out = old(numel)
        parts = [late(numel), late(numel)] if rank == 0 else None
        keep(dist.scatter(out, parts, group_src=0, **options), out)
        if rank == 0:
            dist.send(late(numel), group=group, group_dst=1)
        else:
            dist.recv(out := old(numel), group=group, group_src=0)
            keep(None, out)
        several = [late(numel), late(3)]
        work = group.allreduce_coalesced(several)
        keep(work, *several)
        tensor = late(numel)
        future = dist.all_reduce(tensor, **options).get_future()
        keep(None, future.then(lambda done: done.value()[0] * 2).wait())
    return found


def test_collectives_of_the_backend(ranks: RankPool, paths: Paths) -> None:
    _compare(ranks, _collectives, paths[0], backend=HOST)


@pytest.mark.cuda
def test_collectives_of_the_backend_on_cuda(ranks: RankPool) -> None:
    _compare(ranks, _collectives, "", backend=CUDA)


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


@by_model
@pytest.mark.parametrize("name", ECHO_NAMES)
def test_results_are_waited_for(ranks: RankPool, paths: Paths, name: str, model: str) -> None:
    """The same bits as where the host waits in each collective."""
    arguments = paths, DEVICE, name, EAGER[model]
    want = ranks.run(_train_with_echo, *arguments, False)
    assert_same(want[:1], ranks.run(_train_with_echo, *arguments, True)[:1])


@pytest.mark.cuda
@by_model
@pytest.mark.parametrize("name", ECHO_NAMES)
def test_results_are_waited_for_on_cuda(one_rank: None, name: str, model: str) -> None:
    """The same, behind a kernel that sleeps."""
    arguments = ("", _cpp_hooks()), "cuda:0", name, EAGER[model]
    want = _train_with_echo(0, *arguments, False)
    assert_same([want], [_train_with_echo(0, *arguments, True)])


# ---- overlap -------------------------------------------------------------------------------------


@on_pool("ranks")
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
    rank: int, paths: Paths, hook: Any, messages: int
) -> None:
    """All messages of a bucket are issued, and the backward waits for none, before its end.

    Meanwhile the wire is held.
    """
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
    assert passed[0] == (messages, True)
    assert torch.equal(model.weight.grad.cpu(), torch.full((8, 16), 1.5))


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


@on_pool("ranks")
@by_model
def test_a_failed_step_over_the_host_may_be_repeated(rank: int, paths: Paths, model: str) -> None:
    """All ranks raise in that step; the steps after it are those of a run without it."""
    stream_groups.load(paths[0])
    mode, found = EAGER[model], []
    for fails in (False, True):
        group = dist.new_group(backend=MIXED)
        hook = FailsAtSecondBucket()
        net, handle = attached(mode, module().to(DEVICE), hook, group, wire="host")
        errors = []
        with mode.step_function(net) as step:
            for number in range(4):
                hook.fails = fails and rank == 1 and number == 2
                for _ in range(2 if fails and number == 2 else 1):
                    net.zero_grad()
                    try:
                        step(batch(rank, number).to(DEVICE))
                    except (RuntimeError, OwnError) as error:
                        errors.append(error)
                        hook.fails = False
                found.append([parameter.grad.cpu() for parameter in net.parameters()])
        if fails:
            (error,) = errors
            wanted = OwnError if rank == 1 else PeerError
            assert isinstance(error, wanted) and "boo" in str(error)
            assert rank == 1 or error.rank == 1
        handle.remove()
    assert_same(found[:4], found[4:])


@on_pool("ranks")
def test_the_way_of_a_ddp_stays(rank: int, paths: Paths) -> None:
    stream_groups.load(paths[0])
    group = dist.new_group(backend=MIXED)
    model, handle = attached(EAGER["ddp"], module().to(DEVICE), hooks.cast(), group, wire="host")
    handle.remove()
    with pytest.raises(ValueError, match="wire='device' must be as for the first hook of this"):
        attach(model, hooks.cast(), wire="device")
    with attach(model, hooks.cast(), wire="host"):
        pass


def test_ways_are_named() -> None:
    with pytest.raises(ValueError, match="wire must be one of 'auto', 'host', 'device', got 'x'"):
        attach(module(), hooks.cast(), wire="x")


@on_pool("ranks")
@pytest.mark.parametrize(("rate", "is_slow"), [(2e8, True), (2e10, False)])
@pytest.mark.parametrize("backend", [MIXED, NAME])
def test_a_far_and_slow_link_is_found(
    rank: int, paths: Paths, backend: str, rate: float, is_slow: bool
) -> None:
    """Then messages go over the host, without any word of the user."""
    stream_groups.load(paths[0])
    group = dist.new_group(backend=backend)
    measured = link.Link(0.05, {1: rate, link.MANY: rate})
    with unittest.mock.patch.object(link, "measure_briefly", lambda *_: measured):
        net, handle = attached(EAGER["module"], module().to(DEVICE), hooks.cast(), group)
    before = stream_groups.issued()
    with EAGER["module"].step_function(net) as step:
        step(batch(rank, 0).to(DEVICE))
    assert (stream_groups.issued() == before) == is_slow
    handle.remove()


@on_pool("ranks")
@pytest.mark.parametrize("backend", [MIXED, NAME])
@by_model
def test_no_collective_meets_those_of_a_step_that_failed(
    rank: int, paths: Paths, backend: str, model: str
) -> None:
    """All ranks raise in that step, and refuse the next one, before they send anything."""
    library = stream_groups.load(paths[0])
    group = dist.new_group(backend=backend)
    mode = EAGER[model]
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
    assert library.issued() == issued
    handle.remove()
    # What rank 0 has left there, a collective of rank 1 meets.
    met = rank == 0
    for size in sizes[1:] if rank == 1 else []:
        own_tensor = torch.zeros(size, device=DEVICE)
        dist.all_reduce(own_tensor, group=group)
        met = bool(own_tensor.any())
    torch.accelerator.synchronize(DEVICE)
    assert met
    assert said[:2] == ["good", "good"]
    assert said[2].startswith("OwnError: boo" if rank == 1 else "PeerError: "), said[2]
    assert "boo" in said[2]
    assert said[3].startswith("RuntimeError: "), said[3]
    assert "Its collectives may still be running" in said[3]


# ---- streams of the library's own ----------------------------------------------------------------


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
    as_torch = types.SimpleNamespace(**{**vars(torch), "cuda": cuda})
    with unittest.mock.patch.multiple(futures, torch=as_torch, _WITH_STREAMS={NAME}, _of_device={}):
        yield lambda: library.sleep(2 * stream_groups.DELAY_SECONDS)


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


HOOKS: dict[str, Callable[[], Any]] = {
    "cast": hooks.cast,
    "feedback": _feedback,
    "topk": lambda: hooks.error_feedback(hooks.topk(0.1)),
    "powersgd": lambda: hooks.error_feedback(hooks.powersgd(2)),
    "policy": lambda: hooks.policy([("numel > 2500", hooks.cast())], _feedback()),
    "clip": lambda: hooks.clip(0.1, _feedback()),
    "local allreduce": lambda: hooks.local_sgd(2),
    "local compressed": lambda: hooks.local_sgd(2, hook=_feedback()),
    "local error_reset": lambda: hooks.local_sgd(2, hook=_feedback(), error_reset=True),
    "local clip": lambda: hooks.local_sgd(2, hook=hooks.clip(0.01, hooks.cast())),
    "local fragments": lambda: hooks.local_sgd(2, hook=_feedback(), fragments=2),
    "streaming": lambda: hooks.local_sgd(4, hook=_feedback(), fragments=2, delay=1, mix=0.5),
}


def _train_pairs(rank: int, path: str, name: str, model: str, backend: str | None) -> list[Tensor]:
    stream_groups.load(path)  # on the CPU too: before the process's first backward
    group = [_group([0, 1], backend), _group([2, 3], backend)][rank // 2]
    mode = EAGER[model]
    found = []
    with _late(path, backend) as hold_up:
        hook = HOOKS[name]()
        net, handle = attached(
            mode, module().to(_device(backend)), hook, group, **_options(backend)
        )
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


@by_model
@OVER
@pytest.mark.parametrize("name", HOOKS)
def test_stages_on_streams_of_their_own(
    pairs: RankPool, paths: Paths, name: str, backend: str, model: str
) -> None:
    same_bits = name != "powersgd"
    _compare(pairs, _train_pairs, paths[0], name, model, same_bits=same_bits, backend=backend)


def _train_nodes(rank: int, path: str, is_inside: bool, backend: str | None) -> list[Tensor]:
    """Two nodes of two ranks."""
    library = stream_groups.load(path)
    group = _group([0, 1, 2, 3], backend)
    hook = hooks.hierarchical(CODECS["blockwise"](8), levels=[2])
    of_node = f"node {rank // 2 if is_inside else rank}"
    with unittest.mock.patch.object(step_group, "machine", lambda: of_node):
        net = module().to(_device(backend))
        model, handle = attached(EAGER["module"], net, hook, group, **_options(backend))
    # PyTorch would give the next groups of the same ranks the same names, and places in the store.
    KEPT_GROUPS.update(each.group_name for each in hook.own_groups())
    before = library.issued()
    found = parameters_of_steps(rank, EAGER["module"], model)
    handle.remove()
    if backend == HOST:
        assert (library.issued() > before) == is_inside
    return found


@pytest.mark.parametrize(("backend", "is_inside"), [(MIXED, True), (HOST, True), (HOST, False)])
def test_nodes(pairs: RankPool, paths: Paths, backend: str, is_inside: bool) -> None:
    """Inside a node the group of the device is used, between nodes the host."""
    _compare(pairs, _train_nodes, paths[0], is_inside, backend=backend)


# ---- shards --------------------------------------------------------------------------------------


@functools.cache
def _mesh(backend: str | None, is_replicated: bool) -> DeviceMesh:
    """Two replicas of two shards, or four shards.

    One in a process, since DTensor remembers what it has planned for it.
    """
    lines = [[[0, 2], [1, 3]], [[0, 1], [2, 3]]] if is_replicated else [[[0, 1, 2, 3]]]
    axes = []
    for along in lines:
        groups = [_group(members, backend) for members in along]
        axes += [
            each for members, each in zip(along, groups, strict=True) if dist.get_rank() in members
        ]
    KEPT_GROUPS.update(group.group_name for group in axes)
    device = "cpu" if backend is None else NAME
    if not is_replicated:
        return DeviceMesh.from_group(axes[0], device)
    return DeviceMesh.from_group(
        axes, device, mesh=torch.arange(4).view(2, 2), mesh_dim_names=("replicas", "shards")
    )


#: The arguments of ``attach``.
SHARDED: dict[str, Callable[[], dict[str, Any]]] = {
    "allreduce": lambda: {"hook": hooks.allreduce()},
    "cast": lambda: {"hook": hooks.cast()},
    "feedback": lambda: {"hook": _feedback()},
    "topk": lambda: {"hook": hooks.topk(0.1)},
    "shard_hook": lambda: {"hook": hooks.cast(), "shard_hook": _feedback()},
    "weights": lambda: {"hook": hooks.cast(), "weights": CODECS["blockwise"](8)},
    "local_sgd": lambda: {"hook": hooks.local_sgd(2, hook=_feedback())},
    "streaming": lambda: {"hook": hooks.local_sgd(2, hook=_feedback(), delay=1, mix=0.5)},
}


def _train_sharded(
    rank: int, path: str, name: str, is_replicated: bool, backend: str | None
) -> list[Tensor]:
    """Replicas use streams of the library's own; shards alone do not."""
    stream_groups.load(path)
    mesh = _mesh(backend, is_replicated)
    model = module().to(_device(backend))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = []
    with _late(path, backend if is_replicated else None) as hold_up:
        given = SHARDED[name]() if is_replicated else {}
        if not is_replicated:
            given["hook"] = hook_of(name, mesh.get_group(), mesh.get_group())
        handle = attach(model, **given, **_options(backend))
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


@pytest.mark.parametrize(
    ("name", "is_replicated"),
    [
        *((name, True) for name in SHARDED),
        *((name, False) for name in ("allreduce", "cast", "blockwise", "fp8", "sign")),
    ],
)
@OVER
def test_results_of_shards(
    pairs: RankPool, paths: Paths, backend: str, name: str, is_replicated: bool
) -> None:
    # On the CPU the library adds in the order of ranks, Gloo under the device in another one.
    same_bits = is_replicated or name != "allreduce" or backend == HOST
    arguments = paths[0], name, is_replicated
    _compare(pairs, _train_sharded, *arguments, same_bits=same_bits, backend=backend)


# ---- compiled autograd ---------------------------------------------------------------------------

#: With all-reduces alone, one and two: the group does not have the gathers of compiled code.
COMPILED: dict[str, Callable[[], Any]] = {
    "clip": lambda: hooks.clip(0.1, hooks.cast()),
    "powersgd": lambda: hooks.error_feedback(hooks.powersgd(2)),
}


def _train_compiled(rank: int, path: str, name: str, backend: str | None) -> list[Tensor]:
    torch._dynamo.reset()
    stream_groups.load(path)
    group = _group([0, 1], backend)
    mode = Mode("module", "context", fullgraph=True, backend="aot_eager")
    return _steps(rank, mode, module(), COMPILED[name](), group, _device(backend))


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_backward(ranks: RankPool, paths: Paths, name: str) -> None:
    _compare(ranks, _train_compiled, paths[0], name, same_bits=name != "powersgd")
