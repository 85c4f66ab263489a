"""Ranks as torchrun starts them, for frameworks that make the process group themselves."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

SECONDS = 120


def launched(
    function: Callable[..., Any], *args: Any, world_size: int = 2, seconds: float = SECONDS
) -> list[Any]:
    """``function(rank, *args)`` in processes of their own; what each has returned.

    Raises:
        AssertionError: one raised, ended, or gave no answer in ``seconds``.
    """
    context = mp.get_context("spawn")
    port, processes, connections = _free_port(), [], []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(rank, world_size, port, there, function, args), daemon=True
        )
        process.start()
        there.close()
        processes.append(process)
        connections.append(here)
    try:
        return _answers(connections, seconds)
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


def _answers(connections: list[Connection], seconds: float) -> list[Any]:
    answers: dict[int, Any] = {}
    errors: list[str] = []
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    while waiting:
        ready = wait(list(waiting), seconds if not errors else 5)
        if not ready:
            errors.append(f"ranks {sorted(waiting.values())} gave no answer")
            break
        for connection in ready:
            rank = waiting.pop(connection)  # type: ignore[index]
            try:
                good, answers[rank] = connection.recv()  # type: ignore[union-attr]
            except EOFError:
                good, answers[rank] = False, "the process ended"
            if not good:
                errors.append(f"rank {rank}: {answers[rank]}")
    assert not errors, "\n".join(errors)
    return [answers[rank] for rank in range(len(connections))]


def _run(
    rank: int,
    world_size: int,
    port: int,
    connection: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
        OMP_NUM_THREADS="1",
        ACCELERATE_USE_CPU="1",
        HF_HUB_OFFLINE="1",
    )
    import torch

    torch.set_num_threads(1)
    try:
        answer = True, function(rank, *args)
    except BaseException:
        answer = False, traceback.format_exc()
    connection.send(answer)
