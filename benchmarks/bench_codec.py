"""Encoding and decoding gradients against a plain copy, on real shapes.

``python benchmarks/bench_codec.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from bench_bucket import COPY, MANY_SMALL, SHAPES, leading, memory_for_jobs, read_shapes
from harness import Against, Job, Report, parse, parser
from torch import Tensor

import torch_commhook._ops as ops
from torch_commhook.codecs.blockwise import (
    blockwise_bytes,
    blockwise_decode,
    blockwise_encode,
    blockwise_reduce,
)

#: The shapes that the targets are set for.
TARGETED = ("resnet50", "gpt2")
AT_LEAST, AT_LEAST_WITH_ERROR = 0.9, 0.85
MESSAGES = 4  # that are reduced to one
#: Bytes per element of all that one shape needs.
BYTES_PER_ELEMENT = 4 * 5 + 4 * 2


def blockwise_jobs(tensors: list[Tensor], targeted: bool) -> list[Job]:
    """Bytes: the fewest that must move, each value in float32 and each message once."""
    numel = sum(tensor.numel() for tensor in tensors)
    device = tensors[0].device
    error = torch.zeros(numel, device=device)
    rounding = torch.tensor([1, 2], device=device)
    into = [torch.empty_like(tensor) for tensor in tensors]
    jobs: list[Job] = []

    def add(
        name: str, call: Callable[[], object], bytes_moved: int, at_least: float | None
    ) -> None:
        target = at_least if targeted else None
        jobs.append(Job(name, call, bytes_moved, Against(COPY, at_least=target)))

    for bits in (8, 4):
        for symmetric in (True, False):
            form: dict[str, Any] = {"bits": bits, "symmetric": symmetric}
            nbytes = blockwise_bytes(numel, **form)
            message = torch.empty(nbytes, dtype=torch.uint8, device=device)
            one_way = 4 * numel + nbytes
            name = f"int{bits}" + ("" if symmetric else ", min-max")

            def encode(form: dict[str, Any] = form, message: Tensor = message, **more: Any) -> None:
                blockwise_encode(tensors, message, **form, **more)

            def decode(form: dict[str, Any] = form, message: Tensor = message) -> None:
                blockwise_decode(message, into, **form)

            encode()
            add(f"encode {name}", encode, one_way, AT_LEAST)
            add(
                f"encode {name}, error feedback",
                lambda encode=encode: encode(error=error),  # type: ignore[misc]
                one_way + 8 * numel,
                AT_LEAST_WITH_ERROR,
            )
            add(
                f"encode {name}, random rounding",
                lambda encode=encode: encode(rounding=rounding),  # type: ignore[misc]
                one_way,
                None,
            )
            add(f"decode {name}", decode, one_way, AT_LEAST)
            stacked = torch.stack([message] * MESSAGES)

            def reduce(
                form: dict[str, Any] = form, message: Tensor = message, stacked: Tensor = stacked
            ) -> None:
                blockwise_reduce(stacked, message, numel, scale=1 / MESSAGES, **form)

            add(f"reduce {MESSAGES} {name}", reduce, (MESSAGES + 1) * nbytes, None)
    return jobs


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=None)
    options.add_argument("--memory-gib", type=float, metavar="N", help="that may be used")
    parsed = parse(options, arguments)
    if parsed.shapes is None:
        parsed.shapes = ["resnet50"] if parsed.quick else [*TARGETED, MANY_SMALL]
    report = Report("bench_codec" if parsed.device == "cpu" else "codec_cuda", parsed)
    report.environment["cpu_capability"] = ops.cpu_capability()
    for name in parsed.shapes:
        shapes = leading(read_shapes(name), memory_for_jobs(parsed) // BYTES_PER_ELEMENT)
        tensors = [torch.randn(shape, device=parsed.device) for shape in shapes]
        numel = sum(tensor.numel() for tensor in tensors)
        flat = torch.zeros(numel, device=parsed.device)
        other = torch.randn(numel, device=parsed.device)
        for threads in parsed.threads:
            torch.set_num_threads(threads)
            where = f"{threads} thread{'s' if threads > 1 else ''}"
            copy = Job(COPY, lambda flat=flat, other=other: flat.copy_(other), 8 * numel)  # type: ignore[misc]
            report.run(
                f"{name}, {where}",
                [copy, *blockwise_jobs(tensors, name in TARGETED)],
                f"{name}: {len(shapes)} tensors, {numel * 4 / 1e6:.1f} MB, {where}",
            )
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
