"""Two or more ranks in separate processes that stay for the whole test run.

Starting Python and torch takes seconds; a pool pays that once. A function for the ranks must be at
the top level of a module. A rank that fails or hangs ends its pool; the next call starts a new one.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

import pytest

START_SECONDS = 90  # for a cold start of Python and torch on a busy machine
END_SECONDS = 10

_PYTHON_REDUCER = "torch.nn.parallel.distributed"


#: Names of process groups that a process keeps from one function to the next: those of meshes,
#: which are keys of DTensor's cache of plans.
KEPT_GROUPS: set[str] = set()


class RankError(AssertionError):
    """A rank raised an error; the message contains its traceback."""


def collect_less() -> None:
    """Collects garbage less often: with Dynamo's objects, this saves a quarter of compiling."""
    gc.collect()
    gc.freeze()  # imported modules stay
    gc.set_threshold(50_000, 20, 100)


def forget_python_reducer() -> None:
    """Compile later DDPs as if no DDP with ``optimize_ddp="python_reducer"`` had existed.

    PyTorch makes this a setting of the process. With it, a compiled DDP with
    ``find_unused_parameters`` fails in backward, with or without a hook.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and _PYTHON_REDUCER in rules.LEGACY_MOD_INLINELIST:
        rules.LEGACY_MOD_INLINELIST.remove(_PYTHON_REDUCER)
        rules.get_legacy_mod_inlinelist.cache_clear()


def _end_groups() -> None:
    """End an earlier function's groups: PyTorch names new groups by the number of existing ones.

    Not at the end of that function, since another rank may still be in it.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    for group, name in list(world.pg_names.items()):
        if name != dist.group.WORLD.group_name and name not in KEPT_GROUPS:
            dist.destroy_process_group(group)


def serve(connection: Connection, rank: int, prepare: Callable[[], None]) -> None:
    """Calls the functions that the pool sends, each after ``prepare()``, and sends the results."""
    collect_less()
    faulthandler.register(signal.SIGUSR1)  # shows where a rank hangs
    connection.send(("ready", None))
    while True:
        try:
            task = connection.recv()
        except EOFError:  # the test run has ended
            break
        if task is None:
            break
        function, args = task
        prepare()
        try:
            reply = ("ok", function(rank, *args))
        except (Exception, pytest.fail.Exception):  # the latter is no Exception
            reply = ("error", traceback.format_exc())
        connection.send(reply)


def _show_calls(processes: list[mp.process.BaseProcess]) -> None:
    """Let processes that hang write the calls of their threads."""
    for process in processes:
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)  # a killed process writes nothing, and none reports that it has written


def _prepare() -> None:
    _end_groups()
    forget_python_reducer()


def _serve(rank: int, world_size: int, folder: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    serve(connection, rank, _prepare)
    dist.destroy_process_group()


class RankPool:
    """``world_size`` processes with a shared Gloo group."""

    #: The main function of a process: (rank, world size, a folder of the pool, the connection to
    #: it).
    serves: ClassVar[Callable[[int, int, str, Connection], None]] = staticmethod(_serve)

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[mp.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            here, there = context.Pipe()
            process = context.Process(
                target=self.serves,
                args=(rank, self.world_size, self._folder.name, there),
                daemon=True,
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        self._replies(START_SECONDS)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """Runs ``function(rank, *args)`` on every rank; returns their results in order of rank."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        return self._replies(timeout)

    def _replies(self, timeout: float) -> list[Any]:
        replies: list[Any] = [None] * self.world_size
        waiting = dict(zip(self._connections, range(self.world_size), strict=True))
        errors = []
        while waiting:
            ready = wait(list(waiting), timeout)
            if not ready:
                _show_calls([self._processes[rank] for rank in waiting.values()])
                self.stop(kill=True)
                late = f"ranks {sorted(waiting.values())} gave no answer in {timeout} s"
                if errors:  # other ranks may have waited for them in vain
                    raise RankError("\n".join([*errors, late]))
                raise TimeoutError(late)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(10)
                    exit_code = self._processes[rank].exitcode
                    kind, value = "error", f"the process ended, exit code {exit_code}"
                if kind == "error":
                    errors.append(f"rank {rank}: {value}")
                    timeout = min(timeout, 5)  # the others may wait for it in vain
                replies[rank] = value
        if errors:
            self.stop(kill=True)
            raise RankError("\n".join(errors))
        return replies

    def stop(self, kill: bool = False) -> None:
        for connection in self._connections:
            if not kill:
                try:
                    connection.send(None)
                except (BrokenPipeError, ConnectionResetError):
                    kill = True
        for process in self._processes:
            if kill:
                process.kill()
            process.join(END_SECONDS)
            if process.is_alive():
                _show_calls([process])
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
