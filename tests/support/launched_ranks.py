"""Ranks as torchrun starts them, for frameworks that make the process group themselves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from rank_pool import RankPool, serve

_RESERVED: list[socket.socket] = []


def free_port(wanted: int = 0) -> int:
    """A port that the system gives to no other process while this one runs.

    A socket that never listens stays bound to it. A server can still listen there, since both set
    ``SO_REUSEADDR``; until then connections are refused.

    Raises:
        OSError: the ``wanted`` port is in use.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", wanted))
    _RESERVED.append(reserved)
    return int(reserved.getsockname()[1])


def _serve(rank: int, world_size: int, folder: str, connection: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        TORCHELASTIC_RUN_ID="test",
        OMP_NUM_THREADS="1",
        ACCELERATE_USE_CPU="1",
        HF_HUB_OFFLINE="1",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    serve(connection, rank, lambda: None)
    if dist.is_initialized():
        dist.destroy_process_group()


class LaunchedRanks(RankPool):
    """``world_size`` processes with torchrun's variables, without a process group."""

    serves = staticmethod(_serve)

    def _start(self) -> None:
        with mock.patch.dict(os.environ, MASTER_PORT=str(free_port())):
            super()._start()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 180) -> list[Any]:
        return super().run(function, *args, timeout=timeout)


def launched(
    function: Callable[..., Any], *args: Any, world_size: int = 2, seconds: float = 180
) -> list[Any]:
    """Runs ``function(rank, *args)`` in processes for ``seconds`` at most; returns the results."""
    pool = LaunchedRanks(world_size)
    try:
        return pool.run(function, *args, timeout=seconds)
    finally:
        pool.stop()


def first_says(program: str, folder: Path, argument: object = "") -> str:
    """What rank 0 prints.

    Args:
        program: Python code that kills rank 1. Its arguments are the rank, ``argument`` and the
            path of a ``FileStore``.
        folder: an empty folder.
        argument: of the program.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(argument), folder / "store"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, _ = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[1].returncode == -signal.SIGKILL
    return said
