"""Measures autograd hooks, and a reducer that uses them: PyTorch's and this library's.

``python benchmarks/bench_dispatch.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from bench_hook import ALONE
from bench_modes import backward_job, ddp, make, reducer
from harness import Against, Job, Report, parse, parser
from torch import Tensor, nn

from torch_commhook import attach, autograd, hooks

NODES = 500  # nodes of one backward, each with one hook
BARE = "no hooks"
PYTHON_AT_MOST, OPERATOR_AT_MOST, REDUCER_AT_MOST = 1.0, 0.5, 0.9
VECTORS = "1000x64"

Register = Callable[[Any, Callable[..., Any]], object]


def unchanged(*values: Any) -> None:
    """A hook that costs nothing but the call."""


def changed(grad: Tensor) -> Tensor:
    return grad.detach()


def changed_tuple(*values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(None if value is None else value.detach() for value in values[0])


operator = torch.ops.aten.detach.default

#: For each stage: the object with the hooks, for a node's output; PyTorch's registration and ours.
STAGES: dict[str, tuple[Callable[[Tensor], Any], Register, Register]] = {
    "tensor": (lambda out: out, Tensor.register_hook, autograd.register_hook),
    "pre": (
        lambda out: out.grad_fn,
        lambda node, fn: node.register_prehook(fn),
        autograd.register_prehook,
    ),
    "post": (
        lambda out: out.grad_fn,
        lambda node, fn: node.register_hook(fn),
        autograd.register_posthook,
    ),
    "post accumulate": (
        lambda out: out.grad_fn.next_functions[0][0].variable,
        Tensor.register_post_accumulate_grad_hook,
        autograd.register_post_accumulate_grad_hook,
    ),
}

#: Kinds of hook: their stage, the hook, and the target.
KINDS: dict[str, tuple[str, Callable[..., Any], float]] = {
    "tensor": ("tensor", unchanged, PYTHON_AT_MOST),
    "tensor, changes": ("tensor", changed, PYTHON_AT_MOST),
    "pre": ("pre", unchanged, PYTHON_AT_MOST),
    "pre, changes": ("pre", changed_tuple, PYTHON_AT_MOST),
    "post": ("post", unchanged, PYTHON_AT_MOST),
    "post accumulate": ("post accumulate", unchanged, PYTHON_AT_MOST),
    "operator": ("tensor", operator, OPERATOR_AT_MOST),
}


def no_hook(on: Any, hook: Callable[..., Any]) -> None:
    pass


def job(name: str, kind: str, register: Register, against: Against | None = None) -> Job:
    stage, hook, _ = KINDS[kind]
    on = STAGES[stage][0]
    leaves = [torch.ones(4, requires_grad=True) for _ in range(NODES)]
    outputs = [leaf * 1 for leaf in leaves]
    for out in outputs:
        register(on(out), hook)
    loss = torch.stack(outputs).sum()

    def zero() -> None:
        for leaf in leaves:
            leaf.grad = None

    return Job(name, lambda: loss.backward(retain_graph=True), against=against, prepare=zero)


def with_hook(model: nn.Module, hook: hooks.Hook) -> nn.Module:
    attach(model, hook)
    return model


def reducer_jobs() -> list[Job]:
    """Jobs of a backward on many small parameters, in one process."""

    def at_most(ratio: float) -> Against:
        return Against("DDP", at_most=ratio)

    cpp = "reducer, cpp('allreduce')"
    return [
        backward_job(ALONE, make(VECTORS)),
        backward_job("DDP", ddp(make(VECTORS))),
        backward_job(
            cpp, with_hook(make(VECTORS), hooks.cpp("allreduce")), at_most(REDUCER_AT_MOST)
        ),
        backward_job("reducer, allreduce()", reducer(make(VECTORS)), at_most(1.0)),
        backward_job(
            "DDP, cpp('allreduce')",
            with_hook(ddp(make(VECTORS)), hooks.cpp("allreduce")),
            at_most(1.0),
        ),
        backward_job(
            "DDP, allreduce()", with_hook(ddp(make(VECTORS)), hooks.allreduce()), at_most(1.0)
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    parsed = parse(options, arguments)
    if parsed.device != "cpu":
        options.error("only --device cpu is there")
    report = Report("bench_dispatch", parsed)
    for threads in parsed.threads[:1]:  # the CPU's backward has one
        torch.set_num_threads(threads)
        for kind, (stage, _, at_most) in KINDS.items():
            _, pytorchs, ours = STAGES[stage]
            baseline = f"{kind}, PyTorch"
            limit = Against(baseline, at_most=at_most, beyond=BARE)
            report.run(
                kind,
                [
                    job(BARE, kind, no_hook),
                    job(baseline, kind, pytorchs),
                    job(f"{kind}, ours", kind, ours, limit),
                ],
                f"backward with {NODES} hooks: {kind}; ratios count the time beyond '{BARE}'",
            )
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
            report.run(VECTORS, reducer_jobs(), f"backward on {VECTORS}, one process")
            dist.destroy_process_group()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
