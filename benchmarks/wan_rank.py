"""One rank of bench_wan: trains in one way to the end, and reports its losses with their times.

``bench_wan`` starts it on each host, with the name of a file that holds the plan.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from link_rank import PYTORCH, Alone, carried

from torch_commhook.cli.launch_environment import LaunchEnvironment, read_launch_environment
from torch_commhook.cli.launcher import finish
from torch_commhook.cli.text_model import ByteTransformer, TextData, read_text, split_text
from torch_commhook.cli.train import (
    Run,
    held_out_loss,
    make_optimizer,
    prepare,
    train_step,
)
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.cli.world import World
from torch_commhook.hooks.expressions import NO_HOOK


@dataclass(frozen=True)
class DiLoCo:
    """Settings of torchft's DiLoCo, under shorter names.

    Attributes:
        sync_every: steps from one exchange to the next.
        delay: steps during which an exchange runs.
        mix: weight of a rank's own parameters at its end.
    """

    sync_every: int
    delay: int = 0
    mix: float = 0.0


#: DiLoCo of the library torchft, with its manager and its server.
TORCHFT = {
    "torchft DiLoCo(10)": DiLoCo(10),
    "torchft DiLoCo(30)": DiLoCo(30),
    "torchft DiLoCo(10, delay=8, mix=0.5)": DiLoCo(10, 8, 0.5),
}
_LIGHTHOUSE_PORT = 29510
_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Plan:
    """A run.

    Attributes:
        way: a hook expression, ``NO_HOOK`` for DDP alone, or a name in ``PYTORCH`` or ``TORCHFT``.
        every: steps from one measurement to the next.
        layers, dim, seq, batch, steps, seed: as in ``train``.
    """

    way: str
    every: int
    layers: int
    dim: int
    seq: int
    batch: int
    steps: int
    seed: int


@dataclass(frozen=True)
class Figures:
    """The results of a run.

    Attributes:
        steps: the steps done at each measurement.
        seconds: since the run began, on the slowest rank.
        losses: on held-out text, as means over the ranks' own models.
        link_bytes: bytes that left rank 0's host.
    """

    steps: list[int]
    seconds: list[float]
    losses: list[float]
    link_bytes: int


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class _Way:
    """A model that trains.

    Attributes:
        run: the model, its optimizer and its hook.
        end: called after the last step, within the time.
        check: called after the time; raises an error if the run does not count.
    """

    run: Run
    end: Callable[[], object] = _do_nothing
    check: Callable[[], object] = _do_nothing


def _hooked(plan: Plan, config: TrainConfig, world: World) -> _Way:
    """DDP with a hook or without."""
    run = prepare(config, world, None, main_run=True)
    if plan.way in PYTORCH:
        PYTORCH[plan.way](run.ddp)  # type: ignore[arg-type]
    end = _do_nothing if run.handle is None else run.handle.synchronize
    return _Way(run, end)


def _own_address() -> str:
    """The address at which the other host reaches this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 1))
        address: str = probe.getsockname()[0]
        return address


def _torchft(plan: Plan, config: TrainConfig, world: World, stack: ExitStack) -> _Way:
    """torchft's DiLoCo with the paper's outer optimizer, each rank a replica."""
    own = _own_address()
    # torchft tells others the host's name, and the hosts of a lab have no names that others know.
    socket.gethostname = lambda: own
    os.environ.setdefault("RUST_LOG", "error")
    logging.getLogger("torchft").setLevel(logging.ERROR)

    from torchft import Manager
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo as TorchftDiLoCo
    from torchft.process_group import ProcessGroupGloo

    torch.manual_seed(config.seed)
    model = ByteTransformer(config.layers, config.dim, config.heads)
    optimizer = make_optimizer(model, config)
    if world.rank == 0:
        server = LighthouseServer(bind=f"0.0.0.0:{_LIGHTHOUSE_PORT}", min_replicas=world.size)
        stack.callback(server.shutdown)
    dist.barrier()
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    stack.callback(lambda: store)  # keeps it alive until the end
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=world.size,
        use_async_quorum=False,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        connect_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{_LIGHTHOUSE_PORT}",
        replica_id=str(world.rank),
        hostname=own,
        init_sync=False,  # the models are the same
    )
    stack.callback(manager.shutdown, wait=False)
    settings = TORCHFT[plan.way]
    diloco = TorchftDiLoCo(
        manager,
        [model],
        optimizer,
        torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True),
        settings.sync_every,
        pin_memory=False,
        use_bucketization=True,
        fragment_sync_delay=settings.delay,
        fragment_update_alpha=settings.mix,
    )
    stack.enter_context(diloco)
    manager.start_quorum()  # connects the ranks before the time begins, as DDP does

    def check() -> None:
        # torchft continues after a failed exchange.
        done, wanted = manager.current_step(), plan.steps // settings.sync_every
        if done != wanted:
            raise RuntimeError(f"wan_rank: torchft has exchanged {done} times, not {wanted}")

    return _Way(Run(model, model, optimizer, handle=None), check=check)


def train(way: _Way, plan: Plan, config: TrainConfig, world: World, data: TextData) -> Figures:
    """Train to the last step; measures the parameters of earlier steps after the time is over."""
    parameters = list(way.run.model.parameters())
    steps, seconds, copies = [], [], []
    alone = Alone(**vars(world))  # averaging the losses would cost each step a round trip
    dist.barrier()
    sent, started = carried(), time.perf_counter()
    for step in range(1, plan.steps + 1):
        train_step(way.run, config, alone, data)
        if step == plan.steps:
            way.end()
        if step % plan.every == 0 or step == plan.steps:
            steps.append(step)
            seconds.append(time.perf_counter() - started)
            copies.append([parameter.detach().clone() for parameter in parameters])
    sent = carried() - sent
    way.check()
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    losses = []
    for copy in copies:
        with torch.no_grad():
            for parameter, value in zip(parameters, copy, strict=True):
                parameter.copy_(value)
        loss = held_out_loss(way.run.model, world, data, plan.seq)
        assert loss is not None
        losses.append(loss)
    return Figures(steps, slowest.tolist(), losses, sent)


def main(path: Path, place: LaunchEnvironment) -> None:
    plan = Plan(**json.loads(path.read_text()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    world = World(place.rank, place.size, torch.device("cpu"), "gloo")
    ours = plan.way not in PYTORCH and plan.way not in TORCHFT
    settings: dict[str, Any] = {}
    if plan.way == "pytorch-powersgd":
        settings["bucket_cap_mb"] = (1024.0,)  # see link_rank
    config = TrainConfig(
        layers=plan.layers,
        dim=plan.dim,
        seq=plan.seq,
        batch=plan.batch,
        steps=plan.steps,
        seed=plan.seed,
        ranks=place.size,
        hook=plan.way if ours else NO_HOOK,
        **settings,
    )
    data = split_text(read_text(None, config.cap_bytes, config.seq), config.seq)
    with ExitStack() as stack:
        if plan.way in TORCHFT:
            way = _torchft(plan, config, world, stack)
        else:
            way = _hooked(plan, config, world)
        figures = train(way, plan, config, world, data)
        if place.rank == 0:
            path.with_name("figures.json").write_text(json.dumps(asdict(figures)))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    found = read_launch_environment(os.environ)
    if found is None or len(sys.argv) != 2:
        sys.exit("wan_rank: bench_wan starts this program")
    main(Path(sys.argv[1]), found)
    finish()  # skips PyTorch's own threads, which may abort a process that ends
