"""One rank of bench_link: trains with one hook after another, and times each step.

``bench_link`` starts it on each host, with the name of a file that holds the plan.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook.cli.launch_environment import LaunchEnvironment
from torch_commhook.cli.text_model import TextData, read_text, split_text
from torch_commhook.cli.train import Run, prepare, train_step
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.cli.world import Mean, World
from torch_commhook.hooks.expressions import NO_HOOK

#: Each rank trains by itself, all at the same time: the time of a step without a network.
ALONE = "no communication"
#: Begins the line that requests other links, by their number in the plan.
LINK = b"link "
#: The number of links that are fast and near, for untimed steps.
WARM_UP = -1
_INTERFACE = "eth0"
_ONE_BUCKET_MB = 1024.0
_WAIT_SECONDS = 60.0
_COLLECTIVE_SECONDS = 300.0
#: Untimed steps on a link before those that are timed: TCP learns the link.
_STEPS_ON_LINK = 8


def _fp16(model: DDP) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _powersgd(model: DDP) -> None:
    # At least the first two of all steps are without it.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


#: PyTorch's own hooks, by the names used here.
PYTORCH: Mapping[str, Callable[[DDP], None]] = {
    "pytorch-fp16": _fp16,
    "pytorch-powersgd": _powersgd,
}


@dataclass(frozen=True)
class Rounds:
    """The number of turns of each job, and their lengths.

    Attributes:
        batch: sequences of each rank in a step.
        steps: timed steps in a turn.
        rounds: in each, every job has a turn, on all links if there are several.
        seconds: after these, no further round begins, once there were ``least_rounds``.
        warm_up: untimed steps before those.
    """

    batch: int
    steps: int
    rounds: int
    least_rounds: int
    seconds: float
    warm_up: int


@dataclass(frozen=True)
class Plan(Rounds):
    """The plan of the measurement.

    Attributes:
        jobs: hook expressions, names in ``PYTORCH``, and ``ALONE``.
        links: the number of links, which have different rates or delays.
        bucket_cap_mb: as in DDP.
    """

    jobs: list[str]
    links: int
    bucket_cap_mb: Sequence[float]


@dataclass
class Figures:
    """Measurements of a job on a link, on rank 0.

    Attributes:
        seconds: of each step.
        link_bytes: bytes that the link has carried away from this rank, in all steps.
        hook_bytes: bytes in ``handle.stats()`` for the same steps; None without a handle.
    """

    seconds: list[float] = field(default_factory=list)
    link_bytes: int = 0
    hook_bytes: int | None = None


class Alone(World):
    """A world of ranks that do not communicate."""

    def start_mean(self, value: Tensor, flag: bool = False) -> Callable[[], Mean]:
        return lambda: Mean(value.item(), flag)


class Subject:
    """A model that trains in one of the compared ways."""

    def __init__(self, job: str, config: TrainConfig, world: World, data: TextData) -> None:
        ours = job not in PYTORCH and job != ALONE
        self.config = replace(config, hook=job if ours else NO_HOOK)
        if job == "pytorch-powersgd":
            # This hook issues collectives from callbacks: with several buckets its ranks may do so
            # in different orders, which aborts them.
            self.config = replace(self.config, bucket_cap_mb=(_ONE_BUCKET_MB,))
        self.data = data
        self.world = world
        self.run: Run = prepare(self.config, world, None, main_run=True)
        if job in PYTORCH:
            PYTORCH[job](self.run.ddp)
        elif job == ALONE:
            self.run.ddp = self.run.model  # type: ignore[assignment]
            self.world = Alone(**vars(world))

    def step(self) -> None:
        train_step(self.run, self.config, self.world, self.data)

    def close(self) -> None:
        """End the hook's threads, which would wake up while other jobs are timed."""
        if self.run.handle is not None:
            self.run.handle.remove()

    def hook_bytes(self) -> int | None:
        return None if self.run.handle is None else self.run.handle.stats().bytes_sent

    def measure(self, steps: int, figures: Figures) -> None:
        """Time some steps, and count their bytes."""
        dist.barrier()
        told, before = self.hook_bytes(), carried()
        for _ in range(steps):
            started = time.perf_counter()
            self.step()
            figures.seconds.append(time.perf_counter() - started)
        figures.link_bytes += carried() - before
        now = self.hook_bytes()
        if told is not None and now is not None:
            figures.hook_bytes = (figures.hook_bytes or 0) + now - told


def carried() -> int:
    """The bytes that the link has carried away from this host."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == _INTERFACE:
            return int(counters.split()[8])
    raise RuntimeError(f"link_rank: there is no interface {_INTERFACE}; bench_link starts this")


def set_link(number: int, folder: Path) -> None:
    """Ask the process that has made the links to change them, and wait until it has done so."""
    dist.barrier()
    if dist.get_rank() == 0:
        done = link_file(folder, number)
        done.unlink(missing_ok=True)
        print(LINK.decode() + str(number), flush=True)
        deadline = time.monotonic() + _WAIT_SECONDS
        while not done.exists():
            if time.monotonic() >= deadline:
                raise RuntimeError(f"link_rank: the links do not become those of number {number}")
            time.sleep(0.01)
    dist.barrier()


def link_file(folder: Path, number: int) -> Path:
    """The file that exists once the links with that number are set."""
    return folder / f"link{number}"


def goes_on(rank: int, answer: bool) -> bool:
    """Sends rank 0's answer to all ranks."""
    shared = torch.tensor([rank == 0 and answer], dtype=torch.int64)
    dist.broadcast(shared, 0)
    return bool(shared.item())


def measure(plan: Plan, place: LaunchEnvironment, folder: Path) -> list[dict[str, Figures]]:
    """Figures by link and job."""
    world = World(place.rank, place.size, torch.device("cpu"), "gloo")
    caps = tuple(plan.bucket_cap_mb)
    config = TrainConfig(ranks=place.size, bucket_cap_mb=caps, batch=plan.batch)
    data = split_text(read_text(None, config.cap_bytes, config.seq), config.seq)
    shuffle = random.Random(0).shuffle  # the same on all ranks
    order = list(plan.jobs)
    results = [{job: Figures() for job in plan.jobs} for _ in range(plan.links)]
    end = time.perf_counter() + plan.seconds
    for number in range(plan.rounds):
        late = number >= plan.least_rounds and time.perf_counter() > end
        if not goes_on(place.rank, not late):
            break
        shuffle(order)
        for job in order:
            set_link(WARM_UP, folder)
            subject = Subject(job, config, world, data)
            for _ in range(plan.warm_up):
                subject.step()
            for link in range(plan.links):
                set_link(link, folder)
                for _ in range(_STEPS_ON_LINK):
                    subject.step()
                subject.measure(plan.steps, results[link][job])
            subject.close()
            del subject
            gc.collect()
    return results


def main(path: Path, place: LaunchEnvironment) -> None:
    plan = Plan(**json.loads(path.read_text()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_COLLECTIVE_SECONDS))
    results = measure(plan, place, path.parent)
    if place.rank == 0:
        plain = [{job: asdict(figures) for job, figures in jobs.items()} for jobs in results]
        path.with_name("figures.json").write_text(json.dumps(plain))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import os

    from torch_commhook.cli.launch_environment import read_launch_environment
    from torch_commhook.cli.launcher import finish

    found = read_launch_environment(os.environ)
    if found is None or len(sys.argv) != 2:
        sys.exit("link_rank: bench_link starts this program")
    main(Path(sys.argv[1]), found)
    finish()  # skips PyTorch's own threads, which may abort a process that ends
