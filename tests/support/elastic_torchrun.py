"""A rank of an elastic training under torchrun; it dies once, if its folder says so.

The arguments are the store's port, the rank's name, a folder for its observations, and the steps.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import torch_commhook as commhook
from torch_commhook import hooks

#: A process dies in this step, counted among the steps that it has seen itself.
DIES_AFTER = 10


def main(port: str, name: str, folder: str, steps: str) -> None:
    torch.set_num_threads(1)
    dies = Path(folder) / f"{name} dies"
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = commhook.attach(
        model,
        hooks.error_feedback(hooks.blockwise(bits=8)),
        elastic=commhook.Elastic(
            min_ranks=1,
            name="torchrun",
            grace=8.0,
            state=[optimizer],
            store=f"localhost:{port}",
            ranks=2,
        ),
    )
    seen = 0
    with (Path(folder) / f"{name}.log").open("a", buffering=1) as log:
        while handle.steps < int(steps):
            seen += 1
            if seen > DIES_AFTER and dies.exists():
                dies.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            values = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
            print(handle.steps, hashlib.sha256(values).hexdigest()[:12], os.getpid(), file=log)
            time.sleep(0.05)
    handle.remove()


if __name__ == "__main__":
    main(*sys.argv[1:])
