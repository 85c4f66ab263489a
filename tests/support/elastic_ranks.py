"""Trains on ranks that come and go, and prints their observations: a line of JSON for each case.

The arguments are a folder, and cases as JSON. The ranks of a case are forks of this process, which
has done the slow imports. This process must have no threads: if a thread holds a lock during a
fork, such as the C library's lock for look-ups of hosts, the forked rank waits for it forever. So
the store runs in a separate process. A case has:

``ranks``: the number at the beginning. ``steps``: in all. ``hook``: a key of ``HOOKS``.
``events``: faults of ranks, by a rank's number in the order of starting and by the step: ``kill``,
``kill in its exchange`` of local steps, ``kill at the end``, ``stop`` (and continue much later),
``raise`` (in the hook), ``leave``, ``leave in order`` by a signal, ``kill the first that sends`` a
new rank its state, ``kill in a piece``: the first that sends a third piece, ``slow``: from that
step on, ``replace``: the hook, by the one that late ranks attach.
``in_pieces``: new ranks get their state in pieces; the first one has so many bytes.
``counts``: each rank's steps move its two numbers by 1 and 0.75 times a number of this list, and
nothing else; these are logged. ``straggler``: settings for slow ranks.
``together``: ranks call ``synchronize()`` before each step with a number that is 1 more than a
multiple of this.
``device``: which has the models. Each rank loads the library of a device with late streams.
``late``: ranks that start when the first one has done so many steps; with ``late_hook`` if given.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import stream_groups
import torch
from torch import nn

import torch_commhook as commhook
from torch_commhook import hooks
from torch_commhook.attachment import choosing, elastic, training_state
from torch_commhook.elastic import joining
from torch_commhook.elastic.stores import serve
from torch_commhook.elastic.stragglers import StepTimer
from torch_commhook.planning.choice import Choice
from torch_commhook.reducer import reducer  # noqa: F401  (now, not in each fork)

GRACE = 4.0
TIMEOUT = 60.0


def _auto() -> hooks.Hook:
    """Finds ``powersgd(rank=4)``, which remembers what all ranks have alike."""
    choosing.choose_hook = lambda *_, **__: Choice(7, "a test says so")  # type: ignore[assignment]
    return hooks.auto(max_error=1.0)


HOOKS: dict[str, Any] = {
    "auto": _auto,
    "auto that measures": lambda: hooks.auto(max_error=1.0),
    "allreduce": hooks.allreduce,
    "blockwise": lambda: hooks.blockwise(bits=8),
    "largest": lambda: hooks.error_feedback(hooks.topk(0.5)),
    "with error": lambda: hooks.error_feedback(hooks.blockwise(bits=4)),
    "topk": lambda: hooks.error_feedback(hooks.topk(0.1)),
    "powersgd": lambda: hooks.error_feedback(hooks.powersgd(1)),
    "in C++": lambda: hooks.cpp("allreduce"),
    "local": lambda: hooks.local_sgd(4),
    "local mean": lambda: hooks.local_sgd(4, outer=hooks.outer_sgd(1.0, 0.0)),
    "in background": lambda: hooks.local_sgd(2, delay=1, outer=hooks.outer_sgd(1.0, 0.0)),
    "streaming": lambda: hooks.local_sgd(4, fragments=2, delay=1),
    "streaming with error": lambda: hooks.local_sgd(
        6, fragments=2, delay=2, mix=0.5, hook=hooks.error_feedback(hooks.blockwise(bits=4))
    ),
    "fragments": lambda: hooks.local_sgd(
        4, fragments=2, hook=hooks.error_feedback(hooks.powersgd(1))
    ),
    "local largest": lambda: hooks.local_sgd(
        1, hook=hooks.error_feedback(hooks.topk(0.5)), outer=hooks.outer_sgd(1.0, 0.0)
    ),
    "local with error": lambda: hooks.local_sgd(
        3, hook=hooks.error_feedback(hooks.blockwise(bits=4)), outer=hooks.outer_sgd(1.0, 0.0)
    ),
    "local powersgd": lambda: hooks.local_sgd(2, hook=hooks.error_feedback(hooks.powersgd(1))),
    "local with error reset": lambda: hooks.local_sgd(
        3, hook=hooks.error_feedback(hooks.topk(0.1)), error_reset=True
    ),
}


def _digest(model: nn.Module) -> str:
    values = [each.detach().cpu().numpy().tobytes() for each in model.state_dict().values()]
    return hashlib.sha256(b"".join(values)).hexdigest()[:12]


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)  # differs on each rank; new ranks receive the training's
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


class _Counter(nn.Module):
    """Moves two numbers by the same amount in each step of SGD with a learning rate of 1."""

    def __init__(self, count: float) -> None:
        super().__init__()
        self._count = count
        self.value = nn.Parameter(torch.zeros(2))
        self.register_buffer("unused", torch.zeros(1))  # sent in each exchange

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._count * (self.value[0] + 0.75 * self.value[1])


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _send_or_die(mark: Path, send: Any, *args: Any) -> None:
    with suppress(FileExistsError):
        mark.touch(exist_ok=False)
        _die()
    send(*args)


def _send_piece_or_die(mark: Path, send: Any, donor: joining.Donor) -> None:
    donor.sent = getattr(donor, "sent", 0) + 1  # type: ignore[attr-defined]
    if donor.sent == 3:  # type: ignore[attr-defined]
        _send_or_die(mark, send, donor)
    else:
        send(donor)


def _say_seconds(seconds: float) -> None:
    """Lets the rank say that each step takes so long, where it has measured one."""
    seconds_of = StepTimer.seconds
    StepTimer.seconds = lambda self, steps=1: (  # type: ignore[method-assign]
        None if seconds_of(self, steps) is None else seconds
    )


def _happens(
    event: dict[str, Any], handle: commhook.HookHandle, model: nn.Module, folder: Path
) -> None:
    """Applies an event to the step that begins."""
    if event["do"] == "kill":
        next(model.parameters()).register_hook(lambda gradient: _die())
    elif event["do"] == "kill at the end":
        commhook.step.step_group.StepGroup.end = lambda self: _die()  # type: ignore[attr-defined]
    elif event["do"] == "kill in its exchange":
        elastic.broadcast = lambda *args, **kwargs: _die()  # type: ignore[attr-defined]
    elif event["do"] == "slow":
        _say_seconds(0.25)
    elif event["do"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif event["do"] == "raise":
        handle.register_buffer_prehook(lambda bucket: 1 / 0)
    elif event["do"] == "leave":
        handle.remove()
        raise SystemExit
    elif event["do"] == "leave in order":
        signal.raise_signal(signal.SIGTERM)  # on this thread, so at once
    elif event["do"] == "kill the first that sends":
        send = training_state.send
        training_state.send = partial(_send_or_die, folder / "died", send)
    elif event["do"] == "kill in a piece":
        send = partial(_send_piece_or_die, folder / "died", joining.Donor._send)
        joining.Donor._send = lambda self: send(self)  # type: ignore[method-assign]


def _is_together(handle: commhook.HookHandle) -> bool:
    """Whether all ranks have the same parameters after a step."""
    hook = handle.hook
    if not isinstance(hook, hooks.local_sgd):
        return True
    if hook.error_reset or hook.mix or hook.fragments > 1:
        return False
    return handle.steps > hook.delay and (handle.steps - hook.delay) % hook.H == 0


def _began(handle: commhook.HookHandle, model: nn.Module) -> dict[str, bool]:
    """Whether buckets have the hook's memory, and parameters are at the beginning of a round."""
    state = handle.state_dict()
    anchors = state.get("shared", {}).get("local_sgd_anchor", {})
    return {
        "remembers": all(state["buckets"]) and bool(state["buckets"]) if state else True,
        "at_anchor": all(
            torch.equal(each, anchors[name])
            for name, each in model.named_parameters()
            if name in anchors
        ),
    }


def _train(number: int, case: dict[str, Any], folder: Path, port: int) -> str:
    if "in_pieces" in case:
        joining.AT_ONCE, joining._FIRST_BYTES = 0, case["in_pieces"]
        joining._MOST_BYTES = 2 * case["in_pieces"]
    if "straggler" in case:  # processors may be busy
        _say_seconds(0.05)
    hook = case["hook"] if number < case["ranks"] else case.get("late_hook", case["hook"])
    counts = case.get("counts")
    model = _Counter(counts[number]) if counts else _model(number)
    device = case.get("device", "cpu")
    if device == stream_groups.DEVICE:
        stream_groups.load(case["device_library"])
    model.to(device)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if counts:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 1.0 if counts else 0.9)
    settings = commhook.Elastic(
        min_ranks=case.get("min_ranks", 1),
        grace=GRACE,
        state=[optimizer, scheduler],
        store=f"localhost:{port}",
        ranks=case["ranks"],
        name=folder.name,
        timeout=TIMEOUT,
        leave_on=signal.SIGTERM,
        on_leave=lambda: (folder / f"saved{number}").write_text(
            json.dumps([handle.steps, _digest(model)])
        ),
        **case.get("straggler", {}),
    )
    events = {event["step"]: event for event in case["events"] if event["rank"] == number}
    with (folder / f"steps{number}").open("w", buffering=1) as log:
        handle = commhook.attach(model, HOOKS[hook](), elastic=settings)
        own = handle._road.elastic.ranks.membership.own  # type: ignore[attr-defined]
        (folder / f"own{number}").write_text(str(own))
        views: list[int] = []
        handle.on_membership(lambda rank, size: views.append(size))
        assert len(views) == 1  # it is called at once
        began = _began(handle, model)
        together: list[tuple[int, str]] = []
        lets_in = False
        while handle.steps < case["steps"]:
            if handle.steps % case.get("together", case["steps"]) == 0:
                before = views[-1]
                handle.synchronize()
                lets_in = lets_in or views[-1] > before
                together.append((handle.steps, _digest(model)))
            event = events.pop(handle.steps + 1, None)
            if event is not None:
                if event["do"] == "replace":
                    handle.replace(HOOKS[case["late_hook"]]())
                else:
                    _happens(event, handle, model, folder)
            inputs = torch.randn(8, 16).to(device)
            optimizer.zero_grad()
            loss = model(inputs)
            joins = handle.is_joining  # in this step
            (loss.sum() if counts else loss.square().mean()).backward()
            assert handle.is_joining or not joins  # the other parts come before the next forward
            optimizer.step()
            scheduler.step()
            rate = optimizer.param_groups[0]["lr"]
            # Otherwise each rank has its own parameters.
            is_together = _is_together(handle)
            digest = _digest(model) if is_together else None
            if counts and is_together:
                digest = model.value.tolist()
            if joins:
                digest = "joining"
            print(json.dumps([handle.steps, digest, rate, views]), file=log)
            time.sleep(case.get("pause", 0.0))
        handle.synchronize()
        together.append((handle.steps, _digest(model)))
        stats = handle.stats()
        events_seen = [asdict(event) for event in stats.membership]
        seen = {
            "membership": events_seen,
            "stragglers": stats.stragglers,
            "together": together,
            "lets_in": lets_in,
            "began": began,
            "choice": stats.choice,
        }
        (folder / f"stats{number}").write_text(json.dumps(seen))
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
    found: dict[str, Any] = {"said": [], "steps": [], "stats": [], "own": [], "saved": []}
    for number in range(len(processes)):
        said, steps = folder / f"said{number}", folder / f"steps{number}"
        found["said"].append(said.read_text() if said.exists() else "killed")
        found["own"].append(int((folder / f"own{number}").read_text()))
        saved, stats = folder / f"saved{number}", folder / f"stats{number}"
        found["saved"].append(json.loads(saved.read_text()) if saved.exists() else None)
        found["stats"].append(json.loads(stats.read_text()) if stats.exists() else None)
        lines = steps.read_text().splitlines() if steps.exists() else []
        found["steps"].append([json.loads(line) for line in lines])
    return found


def _start_store() -> tuple[int, int]:
    """Forks a process that runs a store until this one ends; returns its process id and port."""
    port, told = os.pipe()
    process = os.fork()
    if process == 0:
        parent = os.getppid()
        _store, own = serve("localhost", 0)
        os.write(told, str(own).encode())
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(0)
    found = int(os.read(port, 16))
    os.close(port)
    os.close(told)
    return process, found


def main(folder: str, cases: str) -> None:
    torch.set_num_threads(1)
    # A TCPStore asks the name server for the name of its peer. An answer may take 5 s by default,
    # but ranks begin without those that come 2 s after them, half of GRACE.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    store, port = _start_store()
    try:
        for number, case in enumerate(json.loads(cases)):
            print(json.dumps(_run(case, Path(folder) / str(number), port)), flush=True)
    finally:
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
