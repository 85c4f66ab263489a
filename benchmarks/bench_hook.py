"""Measures a communication hook's cost in backward: no DDP, DDP, PyTorch's hook, ours; one process.

A single process sends nothing, so only the hooks' own work remains: copies into and out of buckets,
scaling, casts. ``python benchmarks/bench_hook.py --help`` shows the options; see
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from harness import Against, Job, Report, parse, parser
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks

ALONE = "no DDP"
MODELS = {"200x65536": (200, 65536), "1000x64": (1000, 64)}
#: The most cost, as a ratio to PyTorch's hook; for 200x65536.
CAST_AT_MOST, ALLREDUCE_AT_MOST = 0.6, 1.0


class Vectors(nn.Module):
    """``count`` parameters of ``numel`` elements; their gradients cost next to nothing."""

    def __init__(self, count: int, numel: int, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vectors = nn.ParameterList(
            nn.Parameter(torch.randn(numel, device=device)) for _ in range(count)
        )
        self.input = torch.randn(numel, device=device)

    def forward(self) -> Tensor:
        return torch.stack([torch.dot(vector, self.input) for vector in self.vectors]).sum()


def torch_bf16(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses string annotations
    """PyTorch's bf16_compress_hook under a name that DDP accepts on the CPU."""
    return default_hooks.bf16_compress_hook(None, bucket)


def wrapped(model: nn.Module, hook: object, way: str, view: bool) -> nn.Module:
    ddp = DDP(model, gradient_as_bucket_view=view)
    if way == "attach":
        attach(ddp, hook)  # type: ignore[arg-type]
    elif way == "register":
        ddp.register_comm_hook(None, hook)
    return ddp


def backward_job(name: str, model: nn.Module, against: Against | None) -> Job:
    loss: list[Tensor] = []

    def forward() -> None:
        model.zero_grad(set_to_none=True)
        loss[:] = [model()]

    return Job(name, lambda: loss[0].backward(), against=against, prepare=forward)


def jobs_of(size: tuple[int, int], view: bool, device: torch.device, targets: bool) -> list[Job]:
    """Ways to run backward, each with its own model."""

    def against(baseline: str, at_most: float | None = None) -> Against:
        return Against(baseline, at_most=at_most if targets else None, beyond=ALONE)

    def make() -> Vectors:
        return Vectors(*size, device)

    fp16, bf16 = hooks.cast(torch.float16), hooks.cast(torch.bfloat16)
    ways: list[tuple[str, Callable[..., object] | None, str, Against | None]] = [
        ("DDP", None, "", None),
        ("PyTorch allreduce_hook", default_hooks.allreduce_hook, "register", None),
        ("PyTorch fp16_compress_hook", default_hooks.fp16_compress_hook, "register", None),
        ("PyTorch bf16_compress_hook", torch_bf16, "register", None),
        ("allreduce()", hooks.allreduce(), "attach",
         against("PyTorch allreduce_hook", ALLREDUCE_AT_MOST)),
        ("cast(float16)", fp16, "attach", against("PyTorch fp16_compress_hook")),
        ("cast(bfloat16)", bf16, "attach", against("PyTorch bf16_compress_hook", CAST_AT_MOST)),
        ("cast(bfloat16), registered with DDP", hooks.cast(torch.bfloat16), "register",
         against("PyTorch bf16_compress_hook")),
    ]  # fmt: skip
    jobs = [backward_job(ALONE, make(), None)]
    for name, hook, way, compared in ways:
        jobs.append(backward_job(name, wrapped(make(), hook, way, view), compared))
    return jobs


def run(options: argparse.Namespace) -> Report:
    report = Report("bench_hook", options)
    device = torch.device(options.device)
    names = options.models[:1] if options.quick else options.models
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name in names:
            for view in (False, True):
                # The targets hold for DDP's defaults.
                targets = name == "200x65536" and not view
                jobs = jobs_of(MODELS[name], view, device, targets)
                label = f"{name}{', gradient_as_bucket_view' if view else ''}"
                report.run(
                    label,
                    jobs,
                    f"backward, {label}, {threads} thread{'s' if threads > 1 else ''}; "
                    f"ratios count the time beyond '{ALONE}'",
                )
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parsed = parse(options, arguments)
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if parsed.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/s", rank=0, world_size=1)
        try:
            run(parsed).finish()
        finally:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
