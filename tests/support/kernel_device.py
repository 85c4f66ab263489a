"""The place of the CUDA kernels in a test: on a GPU, or simulated on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from cuda_on_host import cuda_kernels_on_host, take_launched
from torch import Tensor

ON_GPU = pytest.param("cuda", marks=pytest.mark.cuda)
#: Compiling the kernels takes a minute.
ON_HOST = pytest.param("host", marks=pytest.mark.long)
#: Lengths of lists around the capacities of the kernels' tables, and beyond the longest.
COUNTS = (1, 2, 215, 216, 217, 895, 896, 897, 1879, 1880, 1881, 4000)


class KernelDevice:
    """The device of a test's tensors, which may be that of the CUDA kernels."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_slow = False  # whether CUDA kernels are simulated on the host, within kernels()

    def kernels(self, warps: int = 128) -> AbstractContextManager[None]:
        """Within this block, ``torch.ops.commhook`` has the CUDA kernels for this device's tensors.

        On the host, ``warps`` warps fit on the device at once.
        """
        return cuda_kernels_on_host(warps) if self.is_slow else nullcontext()

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies on this device, with the same strides and offsets in storages of the same size."""
        copies = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            bytes_ = torch.empty(0, dtype=torch.uint8).set_(storage).to(self.name, copy=True)
            copy = torch.empty(0, dtype=tensor.dtype, device=self.name)
            copy.set_(
                bytes_.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )
            copies.append(copy)
        return copies

    def misaligned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Foreign memory, zeros of float32 or int64, one byte after an aligned address."""
        memory = torch.zeros(count * dtype.itemsize + 1, dtype=torch.uint8, device=self.name)
        if self.name == "cpu":
            return torch.frombuffer(memory.numpy(), dtype=dtype, offset=1, count=count)

        class Foreign:
            owner = memory
            __cuda_array_interface__ = {  # noqa: RUF012
                "shape": (count,),
                "typestr": {torch.float32: "<f4", torch.int64: "<i8"}[dtype],
                "data": (memory.data_ptr() + 1, False),
                "version": 2,
            }

        return torch.as_tensor(Foreign(), device=self.name)

    def kernels_of(self, function: Callable[[], object]) -> list[str]:
        """The kernels that the function launches; skips the test if a GPU reports none."""
        if self.name != "cuda":
            take_launched()
            function()
            return take_launched()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            function()
            torch.cuda.synchronize()
        names = [
            event.name
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        if not names:
            pytest.skip("the profiler sees no kernels here")
        return names


@contextmanager
def no_waiting_on_gpu() -> Iterator[None]:
    """Within this block the host may not wait for a GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def captured(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """What replays a step that is captured in a CUDA graph, and what the step returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = step()
    return graph.replay, returned


#: The device of the running test.
DEVICE = KernelDevice("cuda")


@pytest.fixture(params=[ON_GPU, ON_HOST])
def kernel_device(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    DEVICE.is_slow = request.param == "host"
    DEVICE.name = "cpu" if DEVICE.is_slow else "cuda"
    yield DEVICE
    DEVICE.name = "cuda"


@pytest.fixture
def cuda_kernels(kernel_device: KernelDevice) -> Iterator[None]:
    """Runs the whole test within kernels()."""
    with kernel_device.kernels():
        yield
