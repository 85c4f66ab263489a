"""Kills a rank in a backward, and prints the others' errors: a line of JSON for each.

The arguments are a folder for the stores, and cases as JSON. Each case runs in forks of this
process, which has done the slow imports.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import attach, hooks
from torch_commhook.reducer import reducer  # noqa: F401  (now, not in each fork)
from torch_commhook.step.step_group import StepGroup

TIMEOUT = timedelta(seconds=20)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _store(kind: str, folder: Path, rank: int, size: int) -> dist.Store:
    if kind == "file":
        return dist.FileStore(str(folder / "store"), size)
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("localhost", 0, size, True, timeout=TIMEOUT, wait_for_workers=False)
        (folder / "writing").write_text(str(store.port))
        (folder / "writing").rename(port)
        return store
    while not port.exists():
        os.sched_yield()
    return dist.TCPStore("localhost", int(port.read_text()), size, False, timeout=TIMEOUT)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    optimizer.zero_grad()
    width = next(model.parameters()).shape[0]
    model(torch.full((4, width), rank + 1.0)).square().sum().backward()
    optimizer.step()


def _survive(case: dict[str, Any], folder: Path, rank: int) -> list[str]:
    size, victim = case["size"], case["victim"]
    store = _store(case["store"], folder, rank, size)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store, timeout=TIMEOUT)
    torch.manual_seed(0)
    width = case["width"]
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
    capacity = 4 * width * width / (1 << 20)
    options: dict[str, Any] = {"bucket_cap_mb": capacity}
    if case["model"] == "ddp":
        model, options = DistributedDataParallel(model, bucket_cap_mb=capacity), {}
    handle = attach(model, case["hook"], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    _step(model, optimizer, rank)
    if rank == victim and case["when"] == "where an exchange begins":
        hooks.allreduce.average = lambda self, bucket: _die()  # type: ignore[method-assign]
    _step(model, optimizer, rank)
    if rank == victim and case["when"] == "before":
        _die()
    if rank == victim and case["when"] == "in a bucket":
        module = next(m for m in model.modules() if isinstance(m, nn.Linear))
        module.weight.register_hook(lambda gradient: _die())  # in the last bucket
    if rank == victim and case["when"] == "at the end":
        StepGroup.end_agreed = lambda self, agree: _die()  # type: ignore[method-assign]
    try:
        _step(model, optimizer, rank)
    except Exception as error:
        return [type(error).__name__, str(error)]
    finally:
        handle.remove()
    return ["nothing", ""]


def _run(case: dict[str, Any], folder: Path) -> dict[str, list[str]]:
    folder.mkdir()
    processes = []
    for rank in range(case["size"]):
        process = os.fork()
        if process == 0:
            try:
                said = _survive(case, folder, rank)
            except BaseException as error:
                said = [f"outside of the step: {type(error).__name__}", str(error)]
            (folder / f"said{rank}").write_text(json.dumps(said))
            os._exit(0)  # skips the clean-up of lost connections
        processes.append(process)
    for process in processes:
        with suppress(ChildProcessError):
            os.waitpid(process, 0)
    found = {}
    for rank in range(case["size"]):
        said = folder / f"said{rank}"
        found[str(rank)] = json.loads(said.read_text()) if said.exists() else ["killed", ""]
    return found


def main(folder: str, cases: str) -> None:
    torch.set_num_threads(1)
    for number, case in enumerate(json.loads(cases)):
        print(json.dumps(_run(case, Path(folder) / str(number))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
