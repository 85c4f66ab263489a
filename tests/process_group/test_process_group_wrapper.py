"""A group around Gloo's on every way that PyTorch takes to a group, with two ranks."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from group_doubles import completed, wait_until
from layered_net import differing
from on_ranks import on_processes
from torch.distributed.device_mesh import DeviceMesh
from trained_models import KINDS, trained

from torch_commhook import ProcessGroup
from torch_commhook.process_group import WrapperProcessGroup, register


class Noting(WrapperProcessGroup):
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


def _wrapped(name: str) -> Noting:
    group = Noting(dist.new_group())
    register(group, name)
    return group


#: Operations that kinds of models call; by default, an all-reduce.
USED = {"fully_shard": {"all_gather_single", "reduce_scatter_single"}, "dtensor": set()}


@on_processes
@pytest.mark.parametrize("kind", KINDS)
def test_models_train_on_it(rank: int, kind: str) -> None:
    group = _wrapped("training")
    assert differing(trained(rank, kind), trained(rank, kind, group)) == []
    operations = {operation for event, operation in group.events if event == "work"}
    assert operations and USED.get(kind, {"allreduce"}) <= operations


@on_processes
def test_a_device_mesh(rank: int) -> None:
    mesh = DeviceMesh.from_group(_wrapped("mesh"), "cpu")
    got, expected = (
        functional.all_reduce(_x(rank), "sum", on).tolist() for on in (mesh, dist.group.WORLD)
    )
    assert got == expected
    assert (mesh.size(), mesh.get_local_rank()) == (2, rank)


@on_processes
def test_seams(rank: int) -> None:
    group = _wrapped("seams")
    group.allreduce([_x(rank)], dist.AllreduceOptions()).wait()
    group.broadcast(_x(rank), 0).wait()  # PyTorch's short forms
    events = ("arguments", "enter", "leave", "work")
    operations = ("allreduce", "broadcast")
    assert group.events == [(event, each) for each in operations for event in events]


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

    for on_main in (False, True):
        groups = [WrapperProcessGroup(Parent(0, 1))]
        thread = threading.Thread(target=groups.clear)
        if on_main:
            groups.clear()
        else:
            thread.start()
            thread.join()
        wait_until(lambda: dropped)
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
            return completed(tensors)

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
        own = {defined: lambda self, *arguments: "own"}
        group = type("Own", (WrapperProcessGroup,), own)(ProcessGroup(0, 2))
        for name in names:
            assert getattr(group, name)(None) == "own", f"{name} where the class has {defined}"
