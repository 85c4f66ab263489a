"""A group around Gloo's on every way that PyTorch takes to a group, with two ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from collective_cases import FUNCTIONAL
from layered_net import Net, differing, train
from rank_pool import RankPool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import ProcessGroup, attach, hooks
from torch_commhook.process_group import WrapperProcessGroup, register


class Noting(WrapperProcessGroup):
    """Notes what passes through it."""

    def __init__(self, parent: dist.ProcessGroup) -> None:
        super().__init__(parent)
        self.events: list[tuple[str, str]] = []

    def change_arguments(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.events.append(("arguments", operation))
        return arguments

    @contextmanager
    def _noting(self, operation: str) -> Any:
        self.events.append(("enter", operation))
        yield
        self.events.append(("leave", operation))

    def context(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        return self._noting(operation)

    def wrap_work(self, operation: str, arguments: tuple[Any, ...], work: Any) -> Any:
        self.events.append(("work", operation))
        return work


def _x(rank: int) -> torch.Tensor:
    return torch.arange(4.0) + 10 * rank


def _all_gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    pieces = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(pieces, x, group=group)
    return torch.cat(pieces)


def _into(call: Callable[..., Any], size: int) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, group: Any) -> torch.Tensor:
        output = torch.empty(size)
        call(output, x, group=group)
        return output

    return run


def _in_place(call: Callable[..., Any], **options: Any) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, group: Any) -> torch.Tensor:
        call(x, group=group, **options)
        return x

    return run


def _gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    pieces = [torch.zeros_like(x) for _ in range(2)]
    dist.gather(x, pieces if dist.get_rank() == 0 else None, dst=0, group=group)
    return torch.cat(pieces)


def _scatter(x: torch.Tensor, group: Any) -> torch.Tensor:
    output = torch.empty_like(x)
    dist.scatter(output, [x, x + 1] if dist.get_rank() == 0 else None, src=0, group=group)
    return output


def _send_and_recv(x: torch.Tensor, group: Any) -> torch.Tensor:
    if dist.get_rank() == 0:
        dist.send(x, 1, group=group)
        return x
    output = torch.empty_like(x)
    dist.recv(output, 0, group=group)
    return output


def _barrier(x: torch.Tensor, group: Any) -> torch.Tensor:
    dist.barrier(group=group)
    # The function of torch.distributed asks for Gloo's by name.
    (group or dist.group.WORLD).monitored_barrier(timedelta(seconds=20), True)
    return x


#: Functions of torch.distributed.
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "all_reduce": _in_place(dist.all_reduce),
    "all_reduce max": _in_place(dist.all_reduce, op=dist.ReduceOp.MAX),
    "broadcast": _in_place(dist.broadcast, src=1),
    "reduce": _in_place(dist.reduce, dst=0),
    "all_gather": _all_gather,
    "all_gather_into_tensor": _into(dist.all_gather_into_tensor, 8),
    "reduce_scatter_tensor": _into(dist.reduce_scatter_tensor, 2),
    "all_to_all_single": _into(dist.all_to_all_single, 4),
    "gather": _gather,
    "scatter": _scatter,
    "send and recv": _send_and_recv,
    "barriers": _barrier,
}


#: Functional collectives, which find the group by its name.
def _wrapped(name: str) -> Noting:
    group = Noting(dist.new_group())
    register(group, name)
    return group


def _functions(rank: int) -> dict[str, bool]:
    group = _wrapped("functions")
    equal = {}
    for name, run in FUNCTIONS.items():
        count = len(group.events)
        got, expected = run(_x(rank), group), run(_x(rank), None)
        equal[name] = torch.equal(got, expected) and len(group.events) > count
    dist.destroy_process_group(group)
    return equal


def test_functions_of_torch_distributed(two_ranks: RankPool) -> None:
    for equal in two_ranks.run(_functions):
        assert equal == dict.fromkeys(FUNCTIONS, True)


def _by_name(rank: int, compiled: bool) -> dict[str, bool]:
    group = _wrapped(f"by name {compiled}")
    equal = {}
    for name, run in FUNCTIONAL.items():
        torch._dynamo.reset()
        call = torch.compile(run, fullgraph=True) if compiled else run
        count = len(group.events)
        got = call(_x(rank), group.group_name)
        expected = run(_x(rank), dist.group.WORLD.group_name)
        equal[name] = torch.equal(got, expected) and len(group.events) > count
    dist.destroy_process_group(group)
    return equal


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_functional_collectives_by_name(two_ranks: RankPool, compiled: bool) -> None:
    for equal in two_ranks.run(_by_name, compiled):
        assert equal == dict.fromkeys(FUNCTIONAL, True)


def _models(rank: int, kind: str) -> tuple[list[int], bool]:
    group = _wrapped(kind)
    found = []
    for each in (dist.group.WORLD, group):
        torch.manual_seed(0)
        model: nn.Module = Net()
        if kind == "module":
            attach(model, hooks.allreduce(), process_group=each)
        else:
            model = DDP(model, process_group=each, bucket_cap_mb=0.004)
            if kind == "hooked":
                attach(model, hooks.cast(torch.bfloat16))
        found.append(train(model, rank))
    used = ("work", "allreduce") in group.events
    dist.destroy_process_group(group)
    return differing(*found), used


@pytest.mark.parametrize("kind", ["ddp", "hooked", "module"])
def test_models_train_on_it(two_ranks: RankPool, kind: str) -> None:
    for different, used in two_ranks.run(_models, kind):
        assert (different, used) == ([], True)


def _sharded(rank: int) -> tuple[list[int], set[str]]:
    group = _wrapped("sharded")
    meshes = [init_device_mesh("cpu", (2,)), DeviceMesh.from_group(group, "cpu")]
    found = []
    for mesh in meshes:
        torch.manual_seed(0)
        model = Net()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        gradients = train(model, rank)
        found.append([gradient.full_tensor() for gradient in gradients])
    operations = {operation for _, operation in group.events}
    dist.destroy_process_group(group)
    return differing(*found), operations


def test_fully_shard(two_ranks: RankPool) -> None:
    for different, operations in two_ranks.run(_sharded):
        assert different == []
        assert {"all_gather_single", "reduce_scatter_single"} <= operations


def _tensors(rank: int) -> tuple[list[float], list[float], set[str]]:
    group = _wrapped("tensors")
    x = torch.arange(16.0).view(4, 4)
    found = []
    for mesh in (init_device_mesh("cpu", (2,)), DeviceMesh.from_group(group, "cpu")):
        rows = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        columns = distribute_tensor(x + 1, mesh, [Shard(1)])
        product = (rows @ columns).redistribute(mesh, [Replicate()])
        product.square().sum().backward()
        found.append([*product.to_local().flatten().tolist(), *rows.grad.full_tensor().flatten()])
    operations = {operation for _, operation in group.events}
    dist.destroy_process_group(group)
    return *found, operations


def test_dtensor(two_ranks: RankPool) -> None:
    for expected, got, operations in two_ranks.run(_tensors):
        assert got == expected
        assert operations


def _mesh(rank: int) -> tuple[list[float], list[float]]:
    group = _wrapped("mesh")
    mesh = DeviceMesh.from_group(group, "cpu")
    got = functional.all_reduce(_x(rank), "sum", mesh)
    expected = functional.all_reduce(_x(rank), "sum", dist.group.WORLD)
    sizes = (mesh.size(), mesh.get_local_rank())
    assert sizes == (2, rank)
    dist.destroy_process_group(group)
    return got.tolist(), expected.tolist()


def test_a_device_mesh(two_ranks: RankPool) -> None:
    for got, expected in two_ranks.run(_mesh):
        assert got == expected


def _seams(rank: int) -> list[tuple[str, str]]:
    group = _wrapped("seams")
    group.allreduce([_x(rank)], dist.AllreduceOptions()).wait()
    group.broadcast(_x(rank), 0).wait()  # PyTorch's short forms
    dist.destroy_process_group(group)
    return group.events


def test_seams(two_ranks: RankPool) -> None:
    expected = [
        (event, operation)
        for operation in ("allreduce", "broadcast")
        for event in ("arguments", "enter", "leave", "work")
    ]
    for events in two_ranks.run(_seams):
        assert events == expected


class Retrying(WrapperProcessGroup):
    """Issues a collective once more where the first try has failed."""

    tries = 0

    def run_collective(
        self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        try:
            return super().run_collective(operation, arguments, keywords)
        except RuntimeError:
            return super().run_collective(operation, arguments, keywords)

    def change_arguments(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.tries += 1
        if self.tries == 1:
            raise RuntimeError("not yet")
        return arguments


@pytest.mark.usefixtures("one_rank")
def test_the_seam_around_the_others_runs_them_again() -> None:
    group = Retrying(dist.group.WORLD)
    x = torch.arange(4.0)
    group.allreduce([x], dist.AllreduceOptions()).wait()
    assert group.tries == 2 and x.tolist() == [0, 1, 2, 3]


def test_another_thread_leaves_the_parent_to_the_main_one() -> None:
    """A backend that ends on one of its own threads would wait for that, and abort."""
    dropped: list[int] = []

    class Parent(ProcessGroup):
        def __del__(self) -> None:
            dropped.append(threading.get_ident())

    def drop(groups: list[Any]) -> None:
        groups.clear()

    for on_main in (False, True):
        groups = [WrapperProcessGroup(Parent(0, 1))]
        thread = threading.Thread(target=drop, args=(groups,))
        if on_main:
            drop(groups)
        else:
            thread.start()
            thread.join()
        deadline = time.monotonic() + 20
        while not dropped:
            assert time.monotonic() < deadline
        assert dropped.pop() == threading.get_ident()


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
def test_a_backend() -> None:
    made: list[Any] = []

    class Own(ProcessGroup):
        def __init__(self, store: dist.Store, rank: int, size: int) -> None:
            super().__init__(store, rank, size)
            made.append(self)

        def set_timeout(self, timeout: timedelta) -> None:
            made.append(timeout)

        def allreduce(self, tensors: Any, opts: Any) -> Any:
            for tensor in tensors:
                tensor.add_(1)
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(tensors)
            return future

    register(Own, "backend_of_this_test")
    group = dist.new_group(backend="backend_of_this_test", timeout=timedelta(seconds=7))
    assert made == [group, timedelta(seconds=7)]
    x = torch.zeros(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [1, 1]
    assert functional.all_reduce(x, "sum", group).tolist() == [2, 2]
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="there is a backend 'backend_of_this_test' already"):
        register(Own, "backend_of_this_test")
    register(lambda store, rank, size: None, "no_backend")
    with pytest.raises(TypeError, match="backend 'no_backend' must make a ProcessGroup, got None"):
        dist.new_group(backend="no_backend")


@pytest.mark.usefixtures("one_rank")
def test_what_cannot_be_registered() -> None:
    group = WrapperProcessGroup(dist.group.WORLD)
    for name in ("", "Own", "own-backend", "gloo"):
        with pytest.raises(ValueError, match="register: "):
            register(WrapperProcessGroup, name)
    with pytest.raises(TypeError, match="register: name must be a str, got int"):
        register(group, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a ProcessGroup, or a class of them, got int"):
        register(3, "x")
    with pytest.raises(ValueError, match=r"ranks must be 1 different ones, got \[0, 1\]"):
        register(group, "x", ranks=[0, 1])
    assert group.name() == "custom"
    register(group, "x")
    with pytest.raises(ValueError, match="the group is known already, as 'x'"):
        register(group, "y")
    with pytest.raises(ValueError, match="there is a process group 'x' already"):
        register(WrapperProcessGroup(dist.group.WORLD), "x")
    with pytest.raises(TypeError, match="parent must be a ProcessGroup, got None"):
        WrapperProcessGroup(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "names",
    [
        ("all_gather_single", "_allgather_base"),
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        ("start_coalescing", "_start_coalescing", "startCoalescing"),
    ],
    ids=lambda names: names[0],
)
def test_a_method_has_all_its_names(names: tuple[str, ...]) -> None:
    """Whichever of them a subclass defines, callers of each get that, and not the parent's."""
    for defined in names:

        def own(self: Any, *arguments: Any) -> str:
            return "own"

        group = type("Own", (WrapperProcessGroup,), {defined: own})(ProcessGroup(0, 2))
        for name in names:
            assert getattr(group, name)(None) == "own", f"{name} where the class has {defined}"
