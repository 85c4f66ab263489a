"""Ranks as threads of one process, each with a ``torch.distributed`` and a store of its own."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d

from torch_commhook.process_group.simulated import SimulatedProcessGroup
from torch_commhook.process_group.simulated.link import Links
from torch_commhook.process_group.simulated.scheduler import (
    Awaited,
    RunEndedError,
    Scheduler,
    current_rank,
)
from torch_commhook.wording import check_type

# ---- a store for threads as ranks: a rank that waits for a key lets the others run ---------------


class _Keys(Awaited):
    """Keys that a rank waits for."""

    def __init__(self, owner: int, keys: Sequence[str]) -> None:
        self.owner = owner
        self.keys = keys

    def describe(self) -> str:
        return f"{', '.join(self.keys)} in the store"


class SimulatedStore(dist.Store):
    """The store of ``torch.distributed`` inside ``run_ranks``.

    For a key that never appears it raises a ``DeadlockError`` in place of a timeout.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._values: dict[str, bytes] = {}
        self._waiting: list[_Keys] = []

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = _bytes(value)
        for keys in [keys for keys in self._waiting if self.check(keys.keys)]:
            self._waiting.remove(keys)
            self._scheduler.complete(keys)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        number = int(self._values.get(key, b"0")) + amount
        self.set(key, str(number))
        return number

    def append(self, key: str, value: str | bytes) -> None:
        self.set(key, self._values.get(key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if its value is as expected, or if it is missing and nothing is expected."""
        current = self._values.get(key)
        if current == _bytes(expected) or (current is None and not expected):
            self.set(key, desired)
            return _bytes(desired)
        return _bytes(expected) if current is None else current

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Let other ranks run until the keys exist."""
        if self.check(keys):
            return
        rank = current_rank()
        if rank is None:
            raise RuntimeError(
                f"store: keys must be there, or waited for by a rank, got {', '.join(keys)}"
            )
        rank = self._scheduler.enter(rank.number, "store")
        missing = _Keys(rank.number, list(keys))
        self._waiting.append(missing)
        self._scheduler.wait(rank, missing)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: there is no timeout."""

    def clone(self) -> Any:
        return self

    # The names that C++ calls.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# ---- gives each rank that is a thread its own torch.distributed ----------------------------------
#
# PyTorch keeps its process groups in one object, and groups by name in a table in C++. The table
# can be thread-local. The object is replaced by one that forwards to the thread's own.


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


def _new_world() -> Any:
    """A new world, as a process has when it starts: with empty tables of its own."""
    world = distributed_c10d._World()
    own: dict[str, Any] = {"group_count": 0}
    for name, value in vars(distributed_c10d._World).items():
        if isinstance(value, property) and name not in ("pg_config_info", "default_pg"):
            table = getattr(world, name)  # of the process
            if isinstance(table, (dict, list)):
                own[name] = type(table)()
    return type("_RankWorld", (distributed_c10d._World,), own)()


@contextmanager
def worlds_of_ranks(left: Callable[[], list[threading.Thread]]) -> Iterator[None]:
    """Give threads their own worlds inside the block.

    The threads that ``left()`` returns at the end keep them, and so touch no groups of the process.
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
    _local.world = world = _new_world()
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
        for table in vars(type(world)).values():
            if isinstance(table, (dict, list)):
                table.clear()
        # PyTorch frees the thread's cache of DTensor's plans under a mutex when the thread has
        # ended, and releases the GIL meanwhile: two threads that end at once can deadlock.
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


# ---- ranks as threads of one process -------------------------------------------------------------


Result = TypeVar("Result")

_one_run = threading.Lock()


def run_ranks(
    fn: Callable[..., Result],
    world_size: int,
    *args: Any,
    seed: int = 0,
    timeout: float = 60.0,
) -> list[Result]:
    """Call ``fn(rank, *args)`` on each of ``world_size`` ranks, which are threads of this process.

    Inside, ``torch.distributed`` is initialized. The default group is a
    :class:`torch_commhook.process_group.SimulatedProcessGroup`. ``new_group``, device meshes,
    functional collectives, DDP, ``fully_shard``, DTensor and :func:`torch_commhook.attach` work as
    in processes. Other threads see the process's own ``torch.distributed``.

    One rank runs at a time, until it issues a collective or waits for other ranks; then ``seed``
    decides which rank runs next. The same seed gives the same order of events.

    Ranks share the state of the process: ``torch.manual_seed``, the compiler's caches, environment
    variables. Objects in ``fn``'s closure are the same for all ranks.

    Args:
        fn: called with the rank and ``args``.
        world_size: the number of ranks.
        args: further arguments of ``fn``.
        seed: the seed of the order in which ranks run.
        timeout: the number of seconds that a rank may run without reaching a collective.

    Returns:
        Each rank's result, in rank order.

    Raises:
        DeadlockError: no rank can continue. The message says what each rank waits for.
        MismatchedCollectiveError: two ranks' n-th collectives on a group differ. The message
            describes both.
        TimeoutError: a rank has not reached a collective in time. A thread that cannot be ended
            keeps running.
        BaseException: the first rank that failed raised it; a note names the rank (Python 3.11
            and newer). The other ranks are ended.
        RuntimeError: another ``run_ranks`` is running.
        TypeError, ValueError: an argument is none of the above.

    Example:
        >>> def total(rank):
        ...     x = torch.tensor([float(rank)])
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> run_ranks(total, 8)
        [28.0, 28.0, 28.0, 28.0, 28.0, 28.0, 28.0, 28.0]
    """
    check_type("run_ranks: fn", fn, "callable", Callable)
    for name, value in (("world_size", world_size), ("seed", seed)):
        check_type(f"run_ranks: {name}", value, "an int", int)
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size must be at least 1, got {world_size}")
    check_timeout("run_ranks", timeout)
    return run_with_links(lambda rank, _: fn(rank, *args), world_size, seed, timeout)[0]


def run_with_links(
    fn: Callable[[int, Links], Result], world_size: int, seed: int, timeout: float = 60.0
) -> tuple[list[Result], Links]:
    """Run a function that also gets all groups of the run, as :func:`run_ranks`; returns these."""
    if current_rank() is not None:
        raise RuntimeError("run_ranks: a rank must not call run_ranks, which is running already")
    if not _one_run.acquire(blocking=False):
        raise RuntimeError("run_ranks: another thread is running run_ranks; wait until it ends")
    try:
        scheduler = Scheduler(world_size, seed, timeout)
        links = Links(scheduler)
        store = SimulatedStore(scheduler)

        def run_rank(rank: int) -> Result:
            # Backward of CUDA tensors stays on the rank's own thread, too.
            with (
                torch.autograd.set_multithreading_enabled(False),
                world_of(links, store, rank, world_size),
            ):
                return fn(rank, links)

        with worlds_of_ranks(scheduler.threads):
            scheduler.run(run_rank)
        _raise_failure(scheduler)
        return [rank.result for rank in scheduler.ranks], links
    finally:
        _one_run.release()


def _raise_failure(scheduler: Scheduler) -> None:
    failure, errors = scheduler.failure, [rank.error for rank in scheduler.ranks]
    if failure is None:
        return
    # Tracebacks refer to models, and hooks in C++ to the scheduler. No collector sees that cycle.
    scheduler.failure = type(failure)(*failure.args)
    for rank in scheduler.ranks:
        rank.error = None
    for rank, error in zip(scheduler.ranks, errors, strict=True):
        if error is None or isinstance(error, RunEndedError):
            continue
        if isinstance(failure, RunEndedError):
            if rank is scheduler.first_to_fail:
                if hasattr(error, "add_note"):
                    error.add_note(f"raised by rank {rank.number} of {len(scheduler.ranks)}")
                raise error
        elif type(error) is type(failure) and error.args == failure.args:
            raise error  # with the traceback of the rank
    raise failure


def check_timeout(function: str, timeout: object) -> None:
    """Check that a timeout is a positive number of seconds."""
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not timeout > 0:  # type: ignore[operator]
        raise ValueError(f"{function}: timeout must be a positive number of s, got {timeout!r}")
