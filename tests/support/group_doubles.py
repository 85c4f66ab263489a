"""Process groups in Python that need no other rank, and ways to register them for a while."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.device_mesh import DeviceMesh

from torch_commhook import ProcessGroup, Work
from torch_commhook.process_group import WrapperProcessGroup, register

#: The release of torch: (2, 13).
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def completed(value: Any) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return future


def wait_until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class _Counted:
    """Counts, in its group, the calls of wait() and get_future()."""

    def __init__(self, value: Any, group: LonelyGroup) -> None:
        super().__init__()
        self.future = completed(value)
        self.group = weakref.proxy(group)

    def wait(self, timeout: timedelta) -> bool:
        self.group.waits += 1
        return True

    def get_future(self) -> torch.futures.Future:
        self.group.futures += 1
        return self.future


class CountedWork(_Counted, Work):
    """A counting Work of this library's class."""


class CountedTorchWork(_Counted, dist.Work):
    """A counting Work of PyTorch's class."""


#: Possible results of a lonely group's collective, by name.
RESULTS: dict[str, Callable[[Any, Any], Any]] = {
    "our Work": CountedWork,
    "torch's Work": CountedTorchWork,
    "Work of a Future": lambda value, group: _create_work_from_future(completed(value)),
    "Future": lambda value, group: completed(value),
}
COUNTED = ("our Work", "torch's Work")


class LonelyGroup(ProcessGroup):
    """A group of one rank, with collectives that do nothing."""

    def __init__(self, result: str) -> None:
        super().__init__(0, 1)
        self.result = result  # a key of ``RESULTS``
        self.waits = self.futures = 0

    def _done(self, value: Any) -> Any:
        return RESULTS[self.result](value, self)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        for output, input in zip(outputs[0], inputs, strict=True):
            output.copy_(input)
        return self._done(outputs)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._done(tensors)

    def getBackendName(self) -> str:  # noqa: N802
        return "lonely"


class DoneWork(Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class Alike(ProcessGroup):
    """Ranks that hold the same, whose works know nothing but to be waited for."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        # the names of the called exchanges and gathers, with their timeouts
        self.called: list[tuple[str, Any]] = []

    def all_to_all_single(self, output: Any, input: Any, outs: Any, ins: Any, opts: Any) -> Any:
        self.called.append(("all_to_all_single", opts.timeout))
        own = input[: ins[0] if ins else len(input) // self.size()]
        output.copy_(own.repeat(self.size()))
        return DoneWork()

    def all_gather_single(self, output: Any, input: Any, opts: Any) -> Any:
        self.called.append(("all_gather_single", opts.timeout))
        output.copy_(input.repeat(self.size()))
        return DoneWork()

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        tensors[0].mul_(self.size())
        return DoneWork()


class MarkingGroup(ProcessGroup):
    """Leaves a different mark on the tensors of each collective, and does not communicate."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(store, rank, size)
        self.called: list[str] = []  # the names of the called collectives, in order
        self.was_aborted = self.was_shut_down = False

    def _add(self, name: str, tensors: list[Tensor], mark: int) -> DoneWork:
        self.called.append(name)
        for tensor in tensors:
            tensor.add_(mark)
        return DoneWork()

    def _copy(self, name: str, outputs: Any, inputs: Any) -> DoneWork:
        self.called.append(name)
        for output, input in zip(outputs, inputs, strict=True):
            output.copy_(input)
        return DoneWork()

    def getBackendName(self) -> str:  # noqa: N802
        return "marking"

    def broadcast(self, tensors: Any, opts: Any = None) -> DoneWork:
        return self._add("broadcast", tensors, 1)

    def allreduce(self, tensors: Any, opts: Any = None) -> DoneWork:
        return self._add("allreduce", tensors, 2)

    def send(self, tensors: Any, destination: int, tag: int = 0) -> DoneWork:
        return self._add("send", tensors, 4)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> DoneWork:
        return self._add("recv", tensors, 5)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> DoneWork:
        return self._copy("allgather", outputs[0], inputs * len(outputs[0]))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> DoneWork:
        return self._copy("reduce_scatter", outputs, [inputs[0][self.rank()]])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> DoneWork:
        return self._copy("all_gather_single", output.chunk(self.size()), [input] * self.size())

    def barrier(self, opts: Any = None) -> DoneWork:
        return self._add("barrier", [], 0)

    def abort(self) -> None:
        self.was_aborted = True

    def shutdown(self) -> None:
        self.was_shut_down = True


class CoalescingGroup(MarkingGroup):
    """Counts the regions in which its calls are coalesced."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(store, rank, size)
        self.started = self.ended = 0

    supports_coalescing = True

    def start_coalescing(self, device: torch.device) -> None:
        self.started += 1

    def end_coalescing(self, device: torch.device) -> Any:
        self.ended += 1
        return completed([])


def around_gloo(store: dist.Store, rank: int, size: int) -> WrapperProcessGroup:
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return WrapperProcessGroup(group)


#: Places where torch.distributed registers backends.
_REGISTRY = (
    *("_plugins", "backend_list", "backend_capability", "backend_type_map"),
    "default_device_backend_map",
)


@contextmanager
def registered(make: Any, name: str, **options: Any) -> Iterator[None]:
    """Registers a backend for a ``with`` block."""
    before = {part: getattr(dist.Backend, part).copy() for part in _REGISTRY}
    try:
        register(make, name, **options)
        yield
    finally:
        for part, known in before.items():
            setattr(dist.Backend, part, known)
        if hasattr(dist.Backend, name.upper()):
            delattr(dist.Backend, name.upper())


@contextmanager
def registered_mesh(group: Any, name: str) -> Iterator[DeviceMesh]:
    """Registers a group for a ``with`` block, and makes a mesh of it."""
    register(group, name)
    try:
        # By its own name: DTensor takes equal meshes for one, whatever their groups.
        yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name.replace(" ", "_"),))
    finally:
        dist.destroy_process_group(group)


@contextmanager
def default_group(
    make: Any, name: str = "own_backend", *, size: int = 2, asked: str | None = None
) -> Iterator[Any]:
    """Makes a default group of a class, or of the backends ``asked`` for; this is its rank 0."""
    with registered(make, name):
        dist.init_process_group(asked or name, rank=0, world_size=size, store=dist.HashStore())
        try:
            yield dist.group.WORLD
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class Later(ProcessGroup):
    """Completes values when the test asks for it."""

    def __init__(self, rank: int = 0, size: int = 4) -> None:
        super().__init__(rank, size)
        self.futures: list[torch.futures.Future] = []

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        self.futures.append(torch.futures.Future())
        return self.futures[-1]

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        raise OSError("cable")

    def barrier(self, opts: Any = None) -> Any:
        return DoneWork()
