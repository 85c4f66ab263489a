"""Lets torchtitan run on the CPU, which it does not support: adds the missing parts.

Import it before torchtitan. ``python titan_on_cpu.py FILE`` runs a script with it.
"""

from __future__ import annotations

import runpy
import sys
import types
from typing import Any

import torch
import torch._utils
import torch.distributed as dist


class _NoKernels(types.ModuleType):
    """Replaces a module of Triton kernels, which nothing calls."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _prepare() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.current_device = lambda: 0  # PyTorch returns a name, but barrier() takes a number
    if not hasattr(dist, "set_timeout"):  # only in releases after torch 2.13
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout
    kernels = "torchtitan.distributed.minimal_async_ep.kernels"
    sys.modules[kernels] = _NoKernels(kernels)
    from torchtitan.components import metrics

    class NoMonitor:
        device_name = "cpu"

        def get_peak_stats(self) -> Any:
            return metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))

        def reset_peak_stats(self) -> None:
            pass

    metrics.build_device_memory_monitor = NoMonitor


_prepare()

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
