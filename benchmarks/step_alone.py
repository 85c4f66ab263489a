"""A training step without communication, on as many processes as a lab has ranks."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from torch_commhook.cli.text_model import ByteTransformer, read_text, split_text, training_batch
from torch_commhook.cli.train import make_optimizer
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.planning.model import copy_gradients

_WARM_UP, _STEPS = 2, 9
_CLIPPED = 1.0  # train's


def on_all_ranks(ranks: int, run: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function in several processes at the same time, and return their results.

    They share this machine's processors and memory, as the ranks of a lab do.

    Args:
        ranks: the number of processes.
        run: the function; it gets a barrier of all processes and ``arguments``. JSON must be able
            to represent its result.
        arguments: further arguments.
    """
    with tempfile.TemporaryDirectory() as name:
        context = mp.get_context("spawn")
        barrier = context.Barrier(ranks)
        shared = (barrier, Path(name), run, arguments)
        mp.spawn(_on_rank, shared, nprocs=ranks)  # type: ignore[no-untyped-call]
        return [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(ranks)]


def _on_rank(
    rank: int, barrier: Any, folder: Path, run: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    (folder / f"{rank}.json").write_text(json.dumps(run(barrier, *arguments)))


def _step_alone(barrier: Any, shape: dict[str, int], batch: int) -> tuple[float, float]:
    """The median times of a step without communication, as in link_rank, and of DDP's copies."""
    config = TrainConfig(**shape, batch=batch)
    model = ByteTransformer(config.layers, config.dim, config.heads)
    optimizer = make_optimizer(model, config)
    data = split_text(read_text(None, config.cap_bytes, config.seq), config.seq)
    parameters = list(model.parameters())
    buckets = [torch.empty_like(each) for each in parameters]
    barrier.wait()
    seconds, copies = [], []
    for step in range(_WARM_UP + _STEPS):
        begun = time.thread_time()
        windows = training_batch(data, seed=0, step=step + 1, rank=0, batch=batch, seq=config.seq)
        model(windows[:, :-1], windows[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIPPED)
        optimizer.step()
        seconds.append(time.thread_time() - begun)
        begun = time.thread_time()
        copy_gradients(parameters, buckets)
        copies.append(time.thread_time() - begun)
        optimizer.zero_grad(set_to_none=True)
    return statistics.median(seconds[_WARM_UP:]), statistics.median(copies[_WARM_UP:])


def step_alone(shape: dict[str, int], batch: int) -> tuple[float, float]:
    """Measure a step of training without communication, while the other ranks train, too.

    Args:
        shape: the model: fields of its configuration.
        batch: the number of sequences.

    Returns:
        The seconds of the step, and of the copies of gradients into DDP's buckets.
    """
    steps, copies = zip(*on_all_ranks(TrainConfig().ranks, _step_alone, shape, batch), strict=True)
    return statistics.fmean(steps), statistics.fmean(copies)
