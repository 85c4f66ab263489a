"""Trains on ranks that come and go, and prints what each has seen: a line of JSON for each case.

The arguments are a folder, and cases as JSON. The ranks of a case are processes that are forked
from this one, which has imported what takes time. It must have no threads: a rank that is forked
while one holds a lock, such as that of the C library's look-ups of hosts, waits for it forever. So
the store has a process of its own. A case has:

``ranks``: how many begin. ``steps``: in all. ``hook``: a key of ``HOOKS``.
``events``: what happens to a rank, by its number in the order of starting, in the step of a
number: ``kill``, ``stop`` (and go on much later), ``raise`` (in the hook), ``leave``, ``kill the
first that sends`` a new rank its state.
``late``: ranks that start when the first one has done so many steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torch_commhook as commhook
from torch_commhook import hooks
from torch_commhook.attachment import elastic as elastic_module
from torch_commhook.reducer import reducer  # noqa: F401  (now, not in each fork)

GRACE = 2.0
TIMEOUT = 60.0
HOOKS: dict[str, Any] = {
    "allreduce": hooks.allreduce,
    "blockwise": lambda: hooks.blockwise(bits=8),
    "with error": lambda: hooks.error_feedback(hooks.blockwise(bits=4)),
    "topk": lambda: hooks.error_feedback(hooks.topk(0.1)),
    "powersgd": lambda: hooks.error_feedback(hooks.powersgd(1)),
}


def _digest(model: nn.Module) -> str:
    values = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(values)).hexdigest()[:12]


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)  # others on each rank: new ones get those of the training
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _send_or_die(mark: Path, send: Any, *args: Any) -> None:
    with suppress(FileExistsError):
        mark.touch(exist_ok=False)
        _die()
    send(*args)


def _happens(
    event: dict[str, Any], handle: commhook.HookHandle, model: nn.Module, folder: Path
) -> None:
    """What an event makes of the step that begins."""
    if event["do"] == "kill":
        model[0].weight.register_hook(lambda gradient: _die())
    elif event["do"] == "kill at the end":
        commhook.step.step_group.StepGroup.end = lambda self: _die()  # type: ignore[attr-defined]
    elif event["do"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif event["do"] == "raise":
        handle.register_buffer_prehook(lambda bucket: 1 / 0)
    elif event["do"] == "leave":
        handle.remove()
        raise SystemExit
    elif event["do"] == "kill the first that sends":
        elastic_module.send = partial(_send_or_die, folder / "died", elastic_module.send)


def _train(number: int, case: dict[str, Any], folder: Path, port: int) -> str:
    model = _model(number)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    settings = commhook.Elastic(
        min_ranks=case.get("min_ranks", 1),
        grace=GRACE,
        state=[optimizer, scheduler],
        store=f"localhost:{port}",
        ranks=case["ranks"],
        name=folder.name,
        timeout=TIMEOUT,
    )
    events = {event["step"]: event for event in case["events"] if event["rank"] == number}
    with (folder / f"steps{number}").open("w", buffering=1) as log:
        handle = commhook.attach(model, HOOKS[case["hook"]](), elastic=settings)
        views: list[int] = []
        handle.on_membership(lambda rank, size: views.append(size))
        while handle.steps < case["steps"]:
            event = events.pop(handle.steps + 1, None)
            if event is not None:
                _happens(event, handle, model, folder)
            inputs = torch.randn(8, 16)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            scheduler.step()
            rate = optimizer.param_groups[0]["lr"]
            print(json.dumps([handle.steps, _digest(model), rate, views]), file=log)
            time.sleep(case.get("pause", 0.0))
        handle.remove()
    return "done"


def _start(number: int, case: dict[str, Any], folder: Path, port: int) -> int:
    process = os.fork()
    if process == 0:
        try:
            said = _train(number, case, folder, port)
        except SystemExit:
            said = "left"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        (folder / f"said{number}").write_text(said)
        os._exit(0)
    return process


def _steps_done(folder: Path) -> int:
    with suppress(OSError, IndexError):
        return int(json.loads((folder / "steps0").read_text().splitlines()[-1])[0])
    return 0


def _run(case: dict[str, Any], folder: Path, port: int) -> dict[str, Any]:
    folder.mkdir()
    processes = [_start(number, case, folder, port) for number in range(case["ranks"])]
    for number, after in enumerate(case.get("late", []), case["ranks"]):
        while _steps_done(folder) < after:
            time.sleep(0.01)
        processes.append(_start(number, case, folder, port))
    stopped = {event["rank"] for event in case["events"] if event["do"] == "stop"}
    for number, process in enumerate(processes):
        if number not in stopped:
            os.waitpid(process, 0)
    for number in stopped:
        os.kill(processes[number], signal.SIGCONT)
        os.waitpid(processes[number], 0)
    found: dict[str, Any] = {"said": [], "steps": []}
    for number in range(len(processes)):
        said, steps = folder / f"said{number}", folder / f"steps{number}"
        found["said"].append(said.read_text() if said.exists() else "killed")
        lines = steps.read_text().splitlines() if steps.exists() else []
        found["steps"].append([json.loads(line) for line in lines])
    return found


def _start_store() -> tuple[int, int]:
    """Fork a process that runs a store until this one has ended; its process id, and the port."""
    port, told = os.pipe()
    process = os.fork()
    if process == 0:
        parent = os.getppid()
        store = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=TIMEOUT))
        os.write(told, str(store.port).encode())
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(0)
    found = int(os.read(port, 16))
    os.close(port)
    os.close(told)
    return process, found


def main(folder: str, cases: str) -> None:
    torch.set_num_threads(1)
    store, port = _start_store()
    try:
        for number, case in enumerate(json.loads(cases)):
            print(json.dumps(_run(case, Path(folder) / str(number), port)), flush=True)
    finally:
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
