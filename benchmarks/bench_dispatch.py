"""What autograd's hooks cost: PyTorch's registration and ours, per kind of hook.

``python benchmarks/bench_dispatch.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import Against, Job, Report, parse, parser
from torch import Tensor

from torch_commhook import autograd

NODES = 500  # in one backward, each with one hook
BARE = "no hooks"
PYTHON_AT_MOST, OPERATOR_AT_MOST = 1.0, 0.5

Register = Callable[[Tensor, Tensor], object]


def unchanged(*values: Any) -> None:
    """What costs nothing but the call."""


def changed(grad: Tensor) -> Tensor:
    return grad.detach()


def changed_tuple(*values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(None if value is None else value.detach() for value in values[0])


operator = torch.ops.aten.detach.default

#: Of each kind of hook, how to register it with PyTorch and with us, given a leaf and a node's
#: output.
KINDS: dict[str, tuple[Register, Register, float]] = {
    "tensor": (
        lambda leaf, out: out.register_hook(unchanged),
        lambda leaf, out: autograd.register_hook(out, unchanged),
        PYTHON_AT_MOST,
    ),
    "tensor, changes": (
        lambda leaf, out: out.register_hook(changed),
        lambda leaf, out: autograd.register_hook(out, changed),
        PYTHON_AT_MOST,
    ),
    "pre": (
        lambda leaf, out: out.grad_fn.register_prehook(unchanged),
        lambda leaf, out: autograd.register_prehook(out.grad_fn, unchanged),
        PYTHON_AT_MOST,
    ),
    "pre, changes": (
        lambda leaf, out: out.grad_fn.register_prehook(changed_tuple),
        lambda leaf, out: autograd.register_prehook(out.grad_fn, changed_tuple),
        PYTHON_AT_MOST,
    ),
    "post": (
        lambda leaf, out: out.grad_fn.register_hook(unchanged),
        lambda leaf, out: autograd.register_posthook(out.grad_fn, unchanged),
        PYTHON_AT_MOST,
    ),
    "post accumulate": (
        lambda leaf, out: leaf.register_post_accumulate_grad_hook(unchanged),
        lambda leaf, out: autograd.register_post_accumulate_grad_hook(leaf, unchanged),
        PYTHON_AT_MOST,
    ),
    "operator": (
        lambda leaf, out: out.register_hook(operator),
        lambda leaf, out: autograd.register_hook(out, operator),
        OPERATOR_AT_MOST,
    ),
}


def job(name: str, register: Register | None, against: Against | None = None) -> Job:
    leaves = [torch.ones(4, requires_grad=True) for _ in range(NODES)]
    outputs = [leaf * 1 for leaf in leaves]
    if register is not None:
        for leaf, out in zip(leaves, outputs, strict=True):
            register(leaf, out)
    loss = torch.stack(outputs).sum()

    def zero() -> None:
        for leaf in leaves:
            leaf.grad = None

    return Job(name, lambda: loss.backward(retain_graph=True), against=against, prepare=zero)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    parsed = parse(options, arguments)
    if parsed.device != "cpu":
        options.error("only --device cpu is there")
    report = Report("bench_dispatch", parsed)
    for threads in parsed.threads[:1]:  # backward on the CPU has one
        torch.set_num_threads(threads)
        for kind, (pytorchs, ours, at_most) in KINDS.items():
            baseline = f"{kind}, PyTorch"
            report.run(
                kind,
                [
                    job(BARE, None),
                    job(baseline, pytorchs),
                    job(f"{kind}, ours", ours, Against(baseline, at_most=at_most, beyond=BARE)),
                ],
                f"backward with {NODES} hooks: {kind}; ratios count the time beyond '{BARE}'",
            )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
