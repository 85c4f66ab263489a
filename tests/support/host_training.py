"""A program for torchrun: trains with a hook, as a rank, and writes its results.

``host_training.py FOLDER`` writes ``rankN.pt`` there: the parameters, the bytes sent, and the
host's name. It also has the error of another step, in which rank 1's hook fails, and the gradients
of the step after that.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from framework_training import Data, How, Net, loop, loss_of
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import PeerError, attach, hooks, run_hook


def _recovered(rank: int) -> tuple[str, list[torch.Tensor]]:
    """After a failed step the library makes all of its connections anew."""
    compressing = hooks.blockwise()
    steps = iter(range(3))

    def hook(state: Any, bucket: Any) -> Any:
        if next(steps) == 1 and rank == 1:
            raise ArithmeticError
        return run_hook(compressing, state, bucket)

    model = DDP(Net())
    handle = attach(model, hook)
    raised = "nothing"
    for x, labels in Data(rank, 3).batches():
        model.zero_grad()
        try:
            loss_of(model(x), labels).backward()
        except (ArithmeticError, PeerError) as error:
            raised = type(error).__name__
    handle.remove()
    return raised, [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trained = loop(rank, How())
    raised, gradients = _recovered(rank)
    result = {
        "parameters": trained.parameters,
        "bytes": trained.bytes_sent,
        "raised": raised,
        "gradients": gradients,
    }
    place = {"host": socket.gethostname(), "local_rank": os.environ["LOCAL_RANK"]}
    torch.save((result, place), Path(sys.argv[1]) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


main()
