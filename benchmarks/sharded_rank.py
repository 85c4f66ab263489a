"""One rank of bench_sharded: trains with one way of sharding after another, and times each step.

``bench_sharded`` starts it, with the name of a file that holds the plan.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from link_rank import Rounds, carried, goes_on
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_commhook
from torch_commhook.cli.text_model import ByteTransformer
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.hooks.expressions import parse_hook

ALONE = "no communication"
FLOAT32 = "fully_shard, float32"
BFLOAT16 = "fully_shard, reduce_dtype=bfloat16"
#: Separates a job's hook and the codec of its weights.
WEIGHTS = ", weights="
_COLLECTIVE_SECONDS = 300.0


@dataclass(frozen=True)
class Plan(Rounds):
    """The plan of the measurement.

    Attributes:
        jobs: ``ALONE``, ``FLOAT32``, ``BFLOAT16``, and hooks' expressions, some with ``WEIGHTS``.
        replicas: the number of the model's replicas, with equally many ranks each.
        seq: bytes in a sequence.
    """

    jobs: list[str]
    replicas: int
    seq: int


@dataclass
class Figures:
    """Measurements of a job.

    Attributes:
        seconds: of each step, on rank 0.
        link_bytes: bytes that the link has carried away from rank 0's host, in all steps.
    """

    seconds: list[float] = field(default_factory=list)
    link_bytes: int = 0


def make_model(job: str, plan: Plan, mesh: DeviceMesh) -> tuple[nn.Module, Callable[[], None]]:
    """Makes a job's model; also returns a function that ends the job."""
    config = TrainConfig()
    torch.manual_seed(0)
    model = ByteTransformer(config.layers, config.dim, config.heads)
    if job == ALONE:
        return model, lambda: None
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if job == BFLOAT16 else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if job in (FLOAT32, BFLOAT16):
        return model, lambda: None
    hook, _, weights = job.partition(WEIGHTS)
    codec = parse_hook(weights).codec if weights else None
    handle = torch_commhook.attach(model, parse_hook(hook), weights=codec)
    return model, handle.remove


def _measure_turn(job: str, plan: Plan, mesh: DeviceMesh, figures: Figures) -> None:
    model, end = make_model(job, plan, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    draw = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        windows = torch.randint(256, (plan.batch, plan.seq + 1), generator=draw)
        loss: Tensor = model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(plan.warm_up):
        step()
    dist.barrier()
    before = carried()
    for _ in range(plan.steps):
        started = time.perf_counter()
        step()
        figures.seconds.append(time.perf_counter() - started)
    dist.barrier()
    figures.link_bytes += carried() - before
    end()


def measure(plan: Plan) -> dict[str, Figures]:
    """Figures by job."""
    size = dist.get_world_size()
    if plan.replicas > 1:
        shape, names = (plan.replicas, size // plan.replicas), ("replicas", "shards")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    else:
        mesh = init_device_mesh("cpu", (size,))
    shuffle = random.Random(0).shuffle  # the same on all ranks
    order = list(plan.jobs)
    results = {job: Figures() for job in plan.jobs}
    end = time.perf_counter() + plan.seconds
    for number in range(plan.rounds):
        late = number >= plan.least_rounds and time.perf_counter() > end
        if not goes_on(dist.get_rank(), not late):
            break
        shuffle(order)
        for job in order:
            _measure_turn(job, plan, mesh, results[job])
            gc.collect()
    return results


def main(path: Path) -> None:
    plan = Plan(**json.loads(path.read_text()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_COLLECTIVE_SECONDS))
    results = measure(plan)
    if dist.get_rank() == 0:
        plain: dict[str, Any] = {job: asdict(figures) for job, figures in results.items()}
        path.with_name("figures.json").write_text(json.dumps(plain))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    from torch_commhook.cli.launcher import finish

    if "RANK" not in os.environ or len(sys.argv) != 2:
        sys.exit("sharded_rank: bench_sharded starts this program")
    main(Path(sys.argv[1]))
    finish()  # skips PyTorch's own threads, which may abort a process that ends
