"""Gives each rank that is a thread its own ``torch.distributed``.

PyTorch keeps its process groups in one object, and groups by name in a table in C++. The table can
be thread-local. The object is replaced by one that forwards to the thread's own.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d

from torch_commhook.process_group.simulated import SimulatedProcessGroup
from torch_commhook.process_group.simulated.link import Links
from torch_commhook.testing.scheduler import current_rank

BACKEND = "simulated"

_local = threading.local()
_forgetting = threading.Lock()
_left: list[threading.Thread] = []  # of runs that could not end all their threads


class _Worlds:
    """Forwards to the thread's world: a rank's, or the process's."""

    def __init__(self, process: Any) -> None:
        object.__setattr__(self, "_process", process)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_local, "world", self._process), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getattr(_local, "world", self._process), name, value)


class _RankWorld(distributed_c10d._World):
    """A new world, as a process has when it starts."""

    group_count = 0


def _own_table(name: str) -> property:
    def get(self: Any) -> Any:
        return self.__dict__[name]

    return property(get)


def _tables() -> dict[str, type]:
    """The tables of the process, in the installed torch."""
    world = distributed_c10d._World()
    tables = {}
    for name, value in vars(distributed_c10d._World).items():
        if isinstance(value, property) and name not in ("pg_config_info", "default_pg"):
            table = getattr(world, name)
            if isinstance(table, (dict, list)):
                tables[name] = type(table)
    return tables


_TABLES = _tables()
for _name in _TABLES:
    setattr(_RankWorld, _name, _own_table(_name))


@contextmanager
def worlds_of_ranks(left: Callable[[], list[threading.Thread]]) -> Iterator[None]:
    """Give threads their own worlds inside the block.

    Args:
        left: returns the threads that still run at the end. They keep their worlds, so that they do
            not touch groups of the process.
    """
    process = distributed_c10d._world
    if isinstance(process, _Worlds):  # threads of an earlier run may still need it
        process = process._process
    # Values that init_process_group() sets for the whole process, if a rank calls it again.
    settings = (distributed_c10d._backend, distributed_c10d._default_pg_init_method, sys.excepthook)
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"]
        )
    # Otherwise torch 2.11 crashes: see docs/torch_versions.md.
    torch._C._ensureCUDADeviceGuardSet()
    distributed_c10d._world = _Worlds(process)  # type: ignore[assignment]
    _set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        distributed_c10d._backend, distributed_c10d._default_pg_init_method = settings[:2]
        sys.excepthook = settings[2]
        _left[:] = [thread for thread in (*_left, *left()) if thread.is_alive()]
        if not _left:
            distributed_c10d._world = process


@contextmanager
def world_of(links: Links, store: dist.Store, rank: int, world_size: int) -> Iterator[None]:
    """Give this thread a world with a rank's simulated group as its default group."""
    world = _RankWorld()
    world.__dict__.update({name: table() for name, table in _TABLES.items()})
    _local.world = world
    _local.links = links
    try:
        group, _ = distributed_c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(BACKEND),
            dist.PrefixStore("default_pg", store),
            distributed_c10d._process_group_name([], use_hashed_name=False),
            timeout=timedelta(minutes=30),
            group_desc="default_pg",
        )
        distributed_c10d._update_default_pg(group)
        world.pg_group_ranks[group] = {number: number for number in range(world_size)}
        yield
    finally:
        distributed_c10d._unregister_all_process_groups()
        world.default_pg = None
        for name in _TABLES:
            world.__dict__[name].clear()
        _forget_plans()


def _forget_plans() -> None:
    """Free this thread's cache of DTensor's plans.

    PyTorch frees it under a mutex when the thread has ended, and releases the GIL meanwhile: two
    threads that end at once can deadlock.
    """
    with _forgetting:
        values_of_thread().pop("__DTensor_fastpath_thread_cache_cleanup", None)


def values_of_thread() -> dict[Any, Any]:
    """The dictionary of this thread's state, where C++ keeps values until the thread has ended."""
    get = ctypes.pythonapi.PyThreadState_GetDict
    get.restype = ctypes.c_void_p  # as py_object the reference would count as new
    values: dict[Any, Any] = ctypes.cast(get(), ctypes.py_object).value
    return values


def _make_group(options: Any, _: Any) -> SimulatedProcessGroup:
    rank = current_rank()
    if rank is None:
        raise RuntimeError(
            f"backend '{BACKEND}': a group must be made inside of torch_commhook.testing.run_ranks"
        )
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    link = _local.links.get(options.group_id, members, rank.number)
    return SimulatedProcessGroup(link, options.group_rank)
