"""One rank of bench_elastic: trains with ranks that come and go, and logs each step.

``bench_elastic`` forks it, so that a process that starts again does not import torch at the expense
of the processors that all ranks share.
"""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import hashlib
import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import torch_commhook as commhook
from torch_commhook.cli.text_model import ByteTransformer, TextData, training_batch
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.reducer import reducer  # noqa: F401  (now, not in each fork)

#: If this file exists, ranks compute as fast as they can.
FREE = "free"
#: This file holds the number of the last step.
END = "end"
#: On this signal, a rank prints the stacks of its threads to stderr.
DUMP_SIGNAL = signal.SIGUSR1
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_LOWEST_LR = 0.1


@dataclass(frozen=True)
class Plan:
    """A training.

    Attributes:
        folder: for its files.
        name: of the training, in the store.
        store: ``"host:port"``.
        interface: the network interface of the ranks.
        ranks: the number of ranks at the beginning.
        grace: Elastic's, in seconds.
        hook: an expression.
        pace: seconds of a step's computation, before gradients are sent.
        steps: the number of steps after which the learning rate is at its minimum.
        every: steps from one copy of the parameters to the next.
        layers, dim, heads, seq, batch, lr, seed: as in ``train``.
    """

    folder: str
    name: str
    store: str
    interface: str
    ranks: int
    grace: float
    hook: str
    pace: float
    steps: int
    every: int
    layers: int = 2
    dim: int = 64
    heads: int = 2
    seq: int = 64
    batch: int = 2
    lr: float = 2e-3
    seed: int = 1


def log_of(folder: Path, process: int) -> Path:
    """The log of a process: a line of JSON for each step, [time, step, digest, loss, changes].

    The time is ``time.monotonic()``. The changes are those of the ranks that the process has seen.
    """
    return folder / f"steps-{process}"


def said_of(folder: Path, process: int) -> Path:
    """The file in which a process reports how it has ended, unless it is killed."""
    return folder / f"said-{process}"


def copy_of(folder: Path, step: int) -> Path:
    """The file with the parameters after a step."""
    return folder / f"parameters-{step}.pt"


def model_of(plan: Plan) -> ByteTransformer:
    """The initial model."""
    torch.manual_seed(plan.seed)
    return ByteTransformer(plan.layers, plan.dim, plan.heads)


def start(plan: Plan, data: TextData, namespace: str, host: int, process: int) -> int:
    """Fork a rank into a network namespace; returns its process id.

    Args:
        plan: the training's.
        data: the training data.
        namespace: the host's name in ``ip netns``.
        host: the rank's; selects its batches.
        process: its number, unique in the training.
    """
    pid = os.fork()
    if pid == 0:
        said = "nothing"
        try:
            _move(namespace, Path(plan.folder) / f"stderr-{process}")
            _train(plan, data, host, process)
            said = "done"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
            logging.getLogger("elastic_rank").exception("ended")
        finally:
            with suppress(BaseException):
                said_of(Path(plan.folder), process).write_text(said)
            os._exit(0)
    return pid


def _move(namespace: str, output: Path) -> None:
    """Leave the terminal and the network of the program that has forked this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(f"/run/netns/{namespace}") as entered:
        if libc.setns(entered.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({namespace})")
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    with open(os.devnull) as nothing, output.open("w") as errors:
        os.dup2(nothing.fileno(), 0)
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S"
    )


def _train(plan: Plan, data: TextData, host: int, process: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = plan.interface
    folder = Path(plan.folder)
    model = model_of(plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.95), fused=True)
    _warm_up(model, optimizer, plan, data)  # while the others do not wait for this rank
    handle = commhook.attach(
        model,
        parse_hook(plan.hook),
        elastic=commhook.Elastic(
            min_ranks=2,
            grace=plan.grace,
            state=[optimizer],
            store=plan.store,
            ranks=plan.ranks,
            name=plan.name,
        ),
    )
    changes: list[int] = []
    handle.on_membership(lambda rank, size: changes.append(size))
    with log_of(folder, process).open("w", buffering=1) as log:
        while handle.steps < _last_step(folder):
            begun = time.monotonic()
            done = handle.steps
            windows = training_batch(
                data, seed=plan.seed, step=done, rank=host, batch=plan.batch, seq=plan.seq
            )
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * max(_LOWEST_LR, 1.0 - done / plan.steps)
            optimizer.zero_grad()
            loss = model(windows[:, :-1], windows[:, 1:])
            if not (folder / FREE).exists():
                time.sleep(max(0.0, begun + plan.pace - time.monotonic()))
            loss.backward()
            optimizer.step()
            changed = len(changes) - 1
            line = [time.monotonic(), handle.steps, _digest(model), loss.item(), changed]
            print(json.dumps(line), file=log)
            if handle.steps % plan.every == 0:
                _copy(model, copy_of(folder, handle.steps))
    handle.remove()


def _warm_up(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, data: TextData
) -> None:
    """Do a step that changes nothing, since a process's first step takes longer than later ones."""
    windows = training_batch(data, seed=plan.seed, step=0, rank=0, batch=plan.batch, seq=plan.seq)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    nothing = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        model(windows[:, :-1], windows[:, 1:]).backward()
        optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(nothing)
    model.load_state_dict(before)


def _last_step(folder: Path) -> int:
    with suppress(FileNotFoundError):
        return int((folder / END).read_text())
    return sys.maxsize


def _digest(model: nn.Module) -> str:
    """A digest of the bits of all parameters."""
    values = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(values)).hexdigest()[:16]


def _copy(model: nn.Module, path: Path) -> None:
    """Write the parameters, unless another rank has."""
    if not path.exists():
        part = path.with_name(f"{path.name}.{os.getpid()}")
        torch.save(model.state_dict(), part)
        part.replace(path)
