"""A device with operators and collectives that run on streams, like those of CUDA and NCCL.

Its memory is the host's, and its streams are threads (``stream_device/``). An operator returns a
tensor at once; its values come later, and are NaN until then. Collectives take ``DELAY_SECONDS`` or
more. Their Futures are complete at once, and name the device.
"""

from __future__ import annotations

import types
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from stream_groups import load_library

DELAY_SECONDS = 0.005
NAME = "streams"
DEVICE = f"{NAME}:0"
#: A group without streams, such as Gloo for tensors on CUDA.
STAGED = f"cpu:gloo,{NAME}:staged"
#: A group that sends tensors on the CPU over Gloo, as ``init_process_group()`` makes it.
MIXED = f"cpu:gloo,{NAME}:{NAME}"


def _device_module() -> types.ModuleType:
    """The parts of ``torch.<name>`` that PyTorch needs of a device."""
    module = types.ModuleType(NAME)
    values: dict[str, Any] = {
        "Stream": lambda *_, **__: torch.Stream(DEVICE),
        "Event": lambda *_, **__: torch.Event(DEVICE),
        "current_stream": lambda *_: torch.accelerator.current_stream(DEVICE),
        "stream": lambda stream: stream,
        "synchronize": lambda *_: torch.accelerator.synchronize(DEVICE),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "manual_seed_all": lambda _: None,
        "_is_in_bad_fork": lambda: False,
    }
    vars(module).update(values)
    return module


def _with_kernels() -> list[str]:
    """The library's operators that have kernels for devices, as for CUDA."""
    names = ["flatten", "flatten.out", "flatten_stats", "unflatten", "unflatten_into"]
    names += ["check_finite", "sum_rows"]
    for codec in ("blockwise", "chunk_topk", "fp8", "randomk", "sign", "topk"):
        operators = ("encode", "decode", "decode_sum", "reduce")
        names += [f"{codec}_{each}" for each in operators]
    return [each for each in names if hasattr(torch.ops.commhook, each.partition(".")[0])]


@cache
def load(path: str) -> Any:
    """Loads the library of the device, and registers its name with PyTorch.

    Args:
        path: the library that ``cpp_libraries`` builds from the folder ``stream_device``.
    """
    library = load_library("stream_device", path)
    library.use_cpu_kernels(_with_kernels())
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return library.around(dist.ProcessGroupGloo(store, rank, size, timeout), DELAY_SECONDS)

    def make_staged(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return library.staged(dist.ProcessGroupGloo(store, rank, size, timeout), DELAY_SECONDS)

    dist.Backend.register_backend(NAME, make, devices=[NAME])
    dist.Backend.register_backend("staged", make_staged, devices=[NAME])
    return library
