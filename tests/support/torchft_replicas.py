"""Replicas under torchft, each in a separate process; one may be killed."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import re
import time
import traceback
import urllib.request
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SECONDS = 180
TIMEOUT = timedelta(seconds=60)
#: The step in which replica 1 ends in its backward, the step in which its successor is back, and
#: the last step.
KILLED, BACK, STEPS = 3, 5, 8


class Net(nn.Module):
    """Two large layers, and one that only replica 1 uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 300)
        self.second = nn.Linear(300, 8)
        self.only_one = nn.Linear(8, 2)

    def loss(self, replica: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * replica + step)
        x = self(torch.randn(4, 8, generator=generator))
        return (self.only_one(x) if replica == 1 else x).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


#: Net's first layer has its gradient last, in a separate bucket.
BUCKET_CAP_MB = 0.008


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass
class Replica:
    number: int  # the replica's
    hook: Any  # as in :func:`attach_to`; or a function that makes one from the manager
    is_killed: bool = False  # whether its process ends in the backward of step KILLED
    joins: bool = False  # whether it replaces a killed one


@dataclass
class Result:
    """A replica's results: for each attempt the step, the replicas, and whether it committed."""

    attempts: list[tuple[int, int, bool]] = field(default_factory=list)
    states: dict[tuple[int, int], Any] = field(default_factory=dict)
    parameters: list[Tensor] = field(default_factory=list)
    bytes_sent: int = 0


@dataclass
class Meeting:
    """Events at which replicas wait for each other."""

    lighthouse: str
    here: list[Any]  # set by each replica at the start
    was_alone: Any  # set by the survivor; an earlier successor would be in its next quorum
    back: Any  # set by the successor

    def wait(self, events: list[Any]) -> None:
        for event in events:
            assert event.wait(SECONDS)

    def wait_until_lighthouse_says(self, pattern: str) -> None:
        """Waits until the lighthouse's page shows something."""
        deadline = time.monotonic() + SECONDS
        while True:
            with urllib.request.urlopen(f"{self.lighthouse}/status", timeout=SECONDS) as page:
                text = page.read().decode()
            if re.search(pattern, text):
                return
            assert time.monotonic() < deadline, f"{pattern} is not in {text}"
            time.sleep(0.05)


def train(replica: Replica, meeting: Meeting) -> Result:
    """Trains to the last step, or to the replica's end."""
    from torchft import Manager
    from torchft.process_group import ProcessGroupGloo

    from torch_commhook.integrations.torchft import attach_to

    if replica.joins:
        meeting.wait([meeting.was_alone])
    model, result = Net(), Result()
    optimizer = optimizer_of(model)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=meeting.lighthouse,
        replica_id=str(replica.number),
        hostname="localhost",
    )
    hook = replica.hook(manager) if callable(replica.hook) else replica.hook
    handle = attach_to(manager, model, hook, bucket_cap_mb=BUCKET_CAP_MB)
    # A lighthouse waits for a replica that it knows.
    meeting.wait_until_lighthouse_says(re.escape(store.get("replica_id").decode()) + ": seen")
    (meeting.back if replica.joins else meeting.here[replica.number]).set()
    meeting.wait(meeting.here)
    while manager.current_step() < STEPS:
        if manager.current_step() == BACK and not meeting.back.is_set():  # for a survivor
            meeting.was_alone.set()
            meeting.wait([meeting.back])
            # If the earlier replicas come first, the lighthouse takes only those.
            meeting.wait_until_lighthouse_says(r"\[1/1 participants healthy\]")
        manager.start_quorum()
        optimizer.zero_grad()
        step = manager.current_step()
        loss = model.loss(replica.number, step)
        result.states[step, len(result.attempts)] = handle._attached.memory.state_dict()
        if replica.is_killed and step == KILLED:
            model.first.weight.register_hook(lambda _: os._exit(9))
        loss.backward()
        participants, committed = manager.num_participants(), manager.should_commit()
        if committed:
            optimizer.step()
        result.attempts.append((step, participants, committed))
    result.parameters = [parameter.detach() for parameter in model.parameters()]
    result.bytes_sent = handle.stats().bytes_sent
    handle.remove()
    manager.shutdown(wait=False)
    return result


def run(hook: Any, *, kills: bool) -> dict[int, Result]:
    """Trains two replicas with a hook; with ``kills`` replica 1 ends, and another replaces it."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=5000
    )
    context = mp.get_context("spawn")
    here = [context.Event(), context.Event()]
    was_alone, back = context.Event(), context.Event()
    if not kills:
        back.set()
    port = lighthouse.address().rpartition(":")[2]
    meeting = Meeting(f"http://localhost:{port}", here, was_alone, back)
    replicas: list[_Process] = []
    try:
        replicas += [_Process(context, Replica(0, hook), meeting)]
        replicas += [_Process(context, Replica(1, hook, is_killed=kills), meeting)]
        if kills:
            killed = replicas.pop()
            killed.process.join(SECONDS)
            assert killed.process.exitcode == 9, killed.answer()
            replicas += [_Process(context, Replica(1, hook, joins=True), meeting)]
        return {each.replica.number: each.answer() for each in replicas}
    finally:
        for each in replicas:
            each.process.kill()
            each.process.join()
        lighthouse.shutdown()


class _Process:
    def __init__(self, context: Any, replica: Replica, meeting: Meeting) -> None:
        self.replica = replica
        self._here, there = context.Pipe(duplex=False)
        self.process = context.Process(target=_run, args=(replica, meeting, there), daemon=True)
        self.process.start()
        there.close()

    def answer(self) -> Result:
        result: Any = "no answer in time"
        if self._here.poll(SECONDS):
            try:
                result = pickle.loads(self._here.recv_bytes())
            except EOFError:
                result = "the process ended"
        assert isinstance(result, Result), f"replica {self.replica.number}: {result}"
        return result


def _run(replica: Replica, meeting: Meeting, connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        answer: Any = train(replica, meeting)
    except BaseException:
        answer = traceback.format_exc()
    # Connections send tensors by their memory, which would end with the process.
    connection.send_bytes(pickle.dumps(answer))


def plain(*, kills: bool) -> list[Tensor]:
    """The parameters after training with a plain average, in one process."""
    model = Net()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        alone = kills and KILLED <= step < BACK
        replicas = [0] if alone else [0, 1]
        found = []
        for replica in replicas:
            model.zero_grad()
            model.loss(replica, step).backward()
            found.append([parameter.grad for parameter in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *found, strict=True):
            used = [gradient for gradient in gradients if gradient is not None]
            parameter.grad = sum(gradient / len(replicas) for gradient in used) if used else None
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]
