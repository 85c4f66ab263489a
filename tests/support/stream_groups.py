"""Process groups that run collectives on a stream, like NCCL, for tensors on the CPU.

Works and Futures are complete at once. Their values come ``DELAY_SECONDS`` later or more, when the
stream has run the collective: for callers of ``wait()``.
"""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

DELAY_SECONDS = 0.005
BACKEND = "streams"


@cache
def load_library(name: str, path: str) -> Any:
    """Loads a module that ``cpp_libraries`` has built."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stream_backend(path: str, gloo: dist.ProcessGroupGloo, name: str = BACKEND) -> Any:
    """Makes a backend that runs a Gloo backend's collectives on a stream.

    Args:
        path: the library that ``cpp_libraries`` builds from the folder ``stream_group``.
        gloo: the Gloo backend.
        name: what it says when asked for its name.
    """
    return load_library("stream_group", path).around(gloo, DELAY_SECONDS, name)


@cache
def _register(path: str) -> None:
    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return stream_backend(path, dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(BACKEND, make, devices=["cpu"])


def stream_group(path: str, ranks: list[int] | None = None) -> dist.ProcessGroup:
    """Makes a new group; all ranks must call it.

    Args:
        path: the library that ``cpp_libraries`` builds from the folder ``stream_group``.
        ranks: its members; None for all.
    """
    _register(path)
    return dist.new_group(ranks, backend=BACKEND)
