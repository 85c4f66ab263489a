"""Train two replicas with torchft and a hook. One replica is killed, and a new one joins.

The hook averages gradients over the current replicas, in 4 bits with error feedback. It needs
torchft:

    pip install torchft-nightly
    python examples/torchft_training.py

Each line is a committed step: the replica, the step, the number of replicas, and a sum over the
parameters, which is the same on both.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torchft import Manager
from torchft.coordination import LighthouseServer
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

from torch_commhook.integrations.torchft import attach_to


def train(replica: int, lighthouse: str, options: argparse.Namespace, killed_at: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    # The store of one replica's ranks; here each replica has one rank.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,  # a joining replica needs its state before its forward
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{replica}",
        hostname="localhost",
    )
    optimizer = OptimizerWrapper(manager, adam)
    handle = attach_to(manager, model, options.hook)
    while manager.current_step() < options.steps:
        optimizer.zero_grad()  # starts the quorum
        step = manager.current_step()
        torch.manual_seed(1000 * replica + step)
        x = torch.randn(32, 16)
        loss = nn.functional.mse_loss(model(x), x.roll(1, 1))
        if step == killed_at:
            os._exit(9)
        loss.backward()
        optimizer.step()  # only if the step succeeded on all replicas
        if manager.current_step() > step:
            total = sum(parameter.double().sum().item() for parameter in model.parameters())
            say(replica, step, manager.num_participants(), f"{total:.9f}")
        if manager.num_participants() == 1:
            time.sleep(1.0)  # the other replica joins soon
    say(replica, "sent", handle.stats().bytes_sent, "bytes")
    manager.shutdown(wait=False)


def say(*words: object) -> None:
    """Print a line in one write, because two processes print."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hook", default="error_feedback(blockwise(bits=4))")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    # The lighthouse waits for each replica that has sent heartbeats.
    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10_000)
    lighthouse = f"http://localhost:{server.address().rpartition(':')[2]}"
    context = mp.get_context("spawn")

    def start(replica: int, killed_at: int = -1) -> Any:
        process = context.Process(target=train, args=(replica, lighthouse, options, killed_at))
        process.start()
        return process

    first, second = start(0), start(1, killed_at=options.steps // 2)
    try:
        second.join()
        say("replica 1 was killed; another takes its place")
        time.sleep(6.0)  # until the lighthouse notices the missing heartbeats
        second = start(1)
        for process in (first, second):
            process.join()
    finally:
        for process in (first, second):
            process.kill()
        server.shutdown()


if __name__ == "__main__":
    main()
