"""Measures a step in each mode: this library's reducer, DDP, and DDP with its Python reducer.

``python benchmarks/bench_modes.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_hook import ALONE, Vectors
from harness import Against, Job, Report, parse, parser
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks

MODELS = ("gpt2-2-layers", "1000x64")
DDP_AT_MOST, HOOK_AT_MOST, PYTHON_REDUCER_AT_MOST = 1.0, 0.75, 1.0


class Gpt2(nn.Module):
    """GPT-2's parameters with two layers, on a few tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens_in = nn.Embedding(50257, 768)
        self.positions = nn.Embedding(1024, 768)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(768)
        self.tokens = torch.randint(50257, (1, 8))

    def forward(self) -> Tensor:
        x = self.tokens_in(self.tokens) + self.positions.weight[: self.tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return (self.norm(x) @ self.tokens_in.weight.T).square().mean()


def make(name: str) -> nn.Module:
    return Gpt2() if name == MODELS[0] else Vectors(1000, 64, torch.device("cpu"))


def ddp(model: nn.Module) -> nn.Module:
    return DDP(model)


def ddp_with_torch_hook(model: nn.Module) -> nn.Module:
    wrapped = DDP(model)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    return wrapped


def ddp_with_ours(model: nn.Module) -> nn.Module:
    wrapped = DDP(model)
    attach(wrapped, hooks.allreduce())
    return wrapped


def reducer(model: nn.Module, **options: object) -> nn.Module:
    attach(model, hooks.allreduce(), **options)  # type: ignore[arg-type]
    return model


def python_reducer(model: nn.Module) -> nn.Module:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return DDP(model)


def python_reducer_with_ours(model: nn.Module) -> nn.Module:
    wrapped = python_reducer(model)
    attach(wrapped, hooks.allreduce())
    return wrapped


def together(call: Callable[[], object]) -> Callable[[], object]:
    """Calls ``call``, then waits for all ranks."""
    if dist.get_world_size() == 1:
        return call

    def prepare() -> None:
        call()
        dist.barrier()

    return prepare


def backward_job(name: str, model: nn.Module, against: Against | None = None) -> Job:
    loss: list[Tensor] = []

    def forward() -> None:
        model.zero_grad(set_to_none=True)
        loss[:] = [model()]

    return Job(name, lambda: loss[0].backward(), against=against, prepare=together(forward))


def compiled_job(name: str, model: nn.Module, against: Against | None = None) -> Job:
    """A whole step with a compiled forward, and its backward by compiled autograd."""
    mode = "python_reducer" if isinstance(model, DDP) else "ddp_optimizer"
    forward = torch.compile(model)

    def step() -> None:
        with torch._dynamo.config.patch(optimize_ddp=mode):
            loss = forward()
            with torch._dynamo.compiled_autograd._enable(torch.compile()):
                loss.backward()

    def zero() -> None:
        model.zero_grad(set_to_none=True)

    job = Job(name, step, against=against, prepare=together(zero))
    for _ in range(3):  # compiles
        assert job.prepare is not None
        job.prepare()
        step()
    return job


def eager_jobs(name: str) -> list[Job]:
    def against(baseline: str, at_most: float | None = None) -> Against:
        return Against(baseline, at_most=at_most, beyond=ALONE)

    return [
        backward_job(ALONE, make(name)),
        backward_job("DDP", ddp(make(name))),
        backward_job("DDP, PyTorch allreduce_hook", ddp_with_torch_hook(make(name))),
        backward_job("DDP, allreduce()", ddp_with_ours(make(name)), against("DDP")),
        backward_job("reducer", reducer(make(name)), against("DDP", DDP_AT_MOST)),
        backward_job(
            "reducer, against the hook",
            reducer(make(name)),
            against("DDP, PyTorch allreduce_hook", HOOK_AT_MOST),
        ),
        backward_job(
            "reducer, gradients as views",
            reducer(make(name), gradient_as_bucket_view=True),
            against("DDP"),
        ),
    ]


def compiled_jobs(name: str) -> list[Job]:
    baseline = "DDP's Python reducer"
    limit = Against(baseline, at_most=PYTHON_REDUCER_AT_MOST)
    # Its hooks are for single parameters, and Inductor joins their collectives. Compiled first,
    # since attaching ours switches that off.
    jobs = [compiled_job(baseline, python_reducer(make(name)))]
    jobs.append(compiled_job(ALONE, make(name)))
    jobs.append(compiled_job("reducer", reducer(make(name)), limit))
    jobs.append(
        compiled_job("reducer, in DDP's place", python_reducer_with_ours(make(name)), limit)
    )
    return jobs


def run(options: argparse.Namespace) -> Report:
    report = Report("bench_modes", options)
    ranks = dist.get_world_size()
    names = options.models[-1:] if options.quick else options.models
    for threads in options.threads if ranks == 1 else [1]:
        torch.set_num_threads(threads)
        where = f"{threads} thread{'s' if threads > 1 else ''}, {ranks} rank{'s' * (ranks > 1)}"
        for name in names:
            report.run(
                f"{name}, eager, {where}",
                eager_jobs(name),
                f"backward, eager, {name}, {where}; ratios count the time beyond '{ALONE}'",
            )
            report.run(
                f"{name}, compiled, {where}",
                compiled_jobs(name),
                f"step, compiled autograd, {name}, {where}",
            )
            torch._dynamo.reset()
    return report


def rank_main(rank: int, options: argparse.Namespace, ranks: int, store: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=5),
    )
    try:
        if rank == 0:
            run(options).finish()
        else:
            with contextlib.redirect_stdout(io.StringIO()):
                run(options)
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--ranks", type=int, default=1, help="processes (default: 1)")
    parsed = parse(options, arguments)
    if parsed.device != "cpu":
        options.error("only --device cpu is there")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        if parsed.ranks == 1:
            rank_main(0, parsed, 1, store)
        else:
            parsed.seconds = float("inf")  # all ranks must run equally many rounds
            mp.spawn(rank_main, args=(parsed, parsed.ranks, store), nprocs=parsed.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
