"""Joins the process group of a run, and chooses the rank's device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_commhook.cli.launch_environment import LaunchEnvironment
from torch_commhook.cli.launcher import LAUNCHER_FOLDER
from torch_commhook.cli.option_types import WorldOptions


class Mean(NamedTuple):
    """A mean over the ranks, and whether a rank has set its flag."""

    value: float
    flag: bool


@dataclass(frozen=True)
class World:
    """This rank, the device of its model, and its process group over ``gloo`` or ``nccl``."""

    rank: int
    size: int
    device: torch.device
    backend: str

    def start_mean(self, value: torch.Tensor, flag: bool = False) -> Callable[[], Mean]:
        """Start to average a scalar over the ranks, and to compare their flags, in the background.

        Returns:
            A function that waits for the mean, and for whether a rank has set its flag.
        """
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        total[0] = value.detach()
        total[1] = float(flag)
        work = dist.all_reduce(total, async_op=True)
        assert work is not None

        def mean() -> Mean:
            work.wait()
            both, flags = total.tolist()
            return Mean(both / self.size, flags > 0)

        return mean

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.start_mean(torch.zeros((), dtype=torch.float32, device="cpu"))()


def join_world(options: WorldOptions, place: LaunchEnvironment) -> World:
    """Join the process group of our launcher or of torchrun, as the rank at ``place``.

    Raises:
        RuntimeError: the other ranks do not come within ``options.timeout`` seconds.
    """
    device, backend = _choose_device(options, place)
    folder = os.environ.get(LAUNCHER_FOLDER)
    # Another program could take a port between its choice and its use, but not a file.
    address = "env://" if folder is None else (Path(folder) / "rendezvous").resolve().as_uri()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(options.threads)
    dist.init_process_group(
        backend,
        init_method=address,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=options.timeout),
    )
    return World(place.rank, place.size, device, backend)


def _choose_device(options: WorldOptions, place: LaunchEnvironment) -> tuple[torch.device, str]:
    gpus = torch.cuda.device_count()
    use_cuda = options.device == "cuda" or options.backend == "nccl"
    if options.device == "auto" and not use_cuda:
        use_cuda = gpus >= place.local_size
    if not use_cuda:
        return torch.device("cpu"), "gloo"
    backend = "nccl" if options.backend == "auto" else options.backend
    return torch.device("cuda", place.local_rank % gpus), backend
