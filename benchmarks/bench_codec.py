"""Compares encoding and decoding of gradients by each codec with a plain copy, on real shapes.

``python benchmarks/bench_codec.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import plain
import torch
from bench_bucket import fitting_shapes
from harness import COPY, Against, Job, Report, copies_of, parse, parser, rotated, run_in_processes
from model_shapes import MANY_SMALL, ONE_BUCKET, SHAPES
from plain import compiled_or_none
from torch import Tensor

import torch_commhook.native.bucket_ops as ops
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.native.bucket_ops import check_finite

#: The shapes that have targets, for blocks with rounding to the nearest.
TARGETED = ("resnet50", "gpt2")
AT_LEAST, AT_LEAST_WITH_ERROR = 0.9, 0.85
MESSAGES = 4  # messages that are reduced to one
SHARDS = (1, 2, 8)  # shards of a message: one for each rank of an exchange
#: The memory's speed for a reader and for a writer. Encoding does little else than read, and
#: decoding little else than write, so neither can be faster.
READ, WRITE = "plain read", "plain write"
EXAMPLES = [codec for cls in CODECS.values() for codec in cls.examples()]


def bytes_per_element(codecs: Sequence[Codec], shards: int) -> int:
    """The memory for one shape: five times its values, and each codec's messages.

    Args:
        codecs: the measured ones.
        shards: the number of different numbers of shards.
    """
    numel = 1 << 20
    messages = sum((MESSAGES + 1 + shards) * codec.nbytes(numel) for codec in codecs)
    return 4 * 5 + -(-messages // numel)


def is_targeted(codec: Codec, shapes: str) -> bool:
    return (
        shapes in (*TARGETED, ONE_BUCKET)
        and isinstance(codec, (CODECS["blockwise"], CODECS["fp8"]))
        and not codec.is_random
    )


def jobs_of(
    codec: Codec,
    tensors: list[Tensor],
    into: list[Tensor],
    error: Tensor,
    shapes: str,
    shards: Sequence[int],
) -> list[Job]:
    """The jobs of a codec.

    Bytes: the fewest that must move, each value in float32 and each message once.
    """
    device, numel = error.device, error.numel()
    rounding = torch.tensor([1, 2], device=device) if codec.is_random else None
    jobs: list[Job] = []

    def add(
        name: str, call: Callable[[], object], bytes_moved: int, at_least: float | None
    ) -> None:
        target = at_least if is_targeted(codec, shapes) else None
        jobs.append(Job(f"{codec}: {name}", call, bytes_moved, Against(COPY, at_least=target)))

    def add_passes(count: int) -> None:
        """Adds jobs that encode and decode a message in ``count`` shards."""
        message = torch.empty(codec.nbytes(numel, count), dtype=torch.uint8, device=device)
        given: dict[str, Any] = {"rounding": rounding, "segments": count}
        codec.encode(tensors, message, **given)
        one_way = 4 * numel + len(message)
        where = "" if count == 1 else f", {count} shards"
        add(f"encode{where}", partial(codec.encode, tensors, message, **given), one_way, AT_LEAST)
        if codec.takes_error:
            add(
                f"encode, error feedback{where}",
                partial(codec.encode, tensors, message, error=error, **given),
                one_way + 8 * numel,
                AT_LEAST_WITH_ERROR,
            )
        add(f"decode{where}", partial(codec.decode, message, into, **given), one_way, AT_LEAST)

    for count in shards if codec.exchange == "all_to_all" else [1]:
        add_passes(count)
    nbytes = codec.nbytes(numel)
    message = torch.empty(nbytes, dtype=torch.uint8, device=device)
    codec.encode(tensors, message, rounding=rounding)
    stacked = torch.stack([message] * MESSAGES)
    scale = 1 / MESSAGES
    if codec.exchange == "all_to_all":
        add(
            f"reduce {MESSAGES}",
            lambda: codec.reduce(stacked, message, numel, scale=scale, rounding=rounding),
            (MESSAGES + 1) * nbytes,
            None,
        )
    if codec.exchange == "all_gather":
        add(
            f"decode the sum of {MESSAGES}",
            lambda: codec.decode_sum(stacked, into, scale=scale, rounding=rounding),
            MESSAGES * nbytes + 4 * numel,
            None,
        )
    return jobs


class PlainQuantizer:
    """8 bits and one scale for each block, in plain PyTorch and compiled by Inductor."""

    def __init__(self, tensors: list[Tensor], into: list[Tensor], report: Report) -> None:
        codes, steps = self.codes_of(tensors)
        self.encode = compiled_or_none(report, plain.quantize, tensors, codes, steps)
        self.decode = compiled_or_none(report, plain.dequantize, codes, steps, into)

    @staticmethod
    def codes_of(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        numel, device = sum(tensor.numel() for tensor in tensors), tensors[0].device
        blocks = -(-numel // plain.BLOCK)
        codes = torch.zeros(blocks, plain.BLOCK, dtype=torch.int8, device=device)
        return codes, torch.zeros(blocks, device=device)

    def jobs(self, tensors: list[Tensor], into: list[Tensor]) -> list[Job]:
        codes, steps = self.codes_of(tensors)
        moved = 4 * sum(tensor.numel() for tensor in tensors) + codes.nbytes + steps.nbytes
        calls = {
            "plain PyTorch: encode": partial(plain.quantize, tensors, codes, steps),
            "plain PyTorch: decode": partial(plain.dequantize, codes, steps, into),
        }
        if self.encode is not None:
            calls["compiled: encode"] = partial(self.encode, tensors, codes, steps)
        if self.decode is not None:
            calls["compiled: decode"] = partial(self.decode, codes, steps, into)
        return [Job(name, call, moved, Against(COPY)) for name, call in calls.items()]


def all_jobs(
    codecs: Sequence[Codec],
    tensors: list[Tensor],
    into: list[Tensor],
    name: str,
    shards: Sequence[int],
    quantizer: PlainQuantizer | None,
) -> list[Job]:
    """The jobs of codecs on these tensors, after those that measure memory."""
    device = tensors[0].device
    numel = sum(tensor.numel() for tensor in tensors)
    error = torch.zeros(numel, device=device)
    flat = torch.zeros(numel, device=device)
    bad = torch.zeros(1, dtype=torch.int64, device=device)
    other = torch.randn(numel, device=device)
    return [
        Job(COPY, partial(flat.copy_, other), 8 * numel),
        Job(READ, partial(check_finite, [other], bad), 4 * numel),
        Job(WRITE, flat.zero_, 4 * numel),
        *(job for codec in codecs for job in jobs_of(codec, tensors, into, error, name, shards)),
        *([] if quantizer is None else quantizer.jobs(tensors, into)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=None)
    options.add_argument(
        "--shards",
        type=int,
        nargs="+",
        default=list(SHARDS),
        metavar="N",
        help="numbers of shards of a message, for codecs with shards (default: 1 2 8)",
    )
    options.add_argument(
        "--codecs", nargs="+", choices=CODECS, default=list(CODECS), help="default: all"
    )
    options.add_argument(
        "--memory-gib", type=float, metavar="N", help="the memory that the jobs may use"
    )
    options.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes that measure everything, one after another; results are their medians",
    )
    parsed = parse(options, arguments)
    if parsed.shapes is None:
        parsed.shapes = ["resnet50"] if parsed.quick else [*TARGETED, MANY_SMALL]
        if parsed.device == "cuda" and not parsed.quick:
            parsed.shapes.insert(0, ONE_BUCKET)
    report = Report("bench_codec" if parsed.device == "cpu" else "codec_cuda", parsed)
    report.environment["cpu_capability"] = ops.cpu_capability()
    if parsed.processes > 1:
        run_in_processes(report, arguments, parsed.processes)
        report.finish()
        return 0
    codecs = [codec for codec in EXAMPLES if type(codec).__name__ in parsed.codecs]
    for name in parsed.shapes:
        shapes = fitting_shapes(name, bytes_per_element(codecs, len(parsed.shards)), report)
        if not shapes:
            continue
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        count = copies_of(torch.device(parsed.device), 8 * numel)
        copies = [
            [[torch.randn(shape, device=parsed.device) for shape in shapes] for _ in range(2)]
            for _ in range(count)
        ]
        quantizer = None
        if parsed.device == "cuda" and not parsed.quick and name == ONE_BUCKET:
            quantizer = PlainQuantizer(*copies[0], report)
        jobs = rotated([all_jobs(codecs, *copy, name, parsed.shards, quantizer) for copy in copies])
        for threads in parsed.threads:
            torch.set_num_threads(threads)
            plural = "s" if threads > 1 else ""
            where = f"{threads} thread{plural}" if parsed.device == "cpu" else "CUDA"
            report.run(
                f"{name}, {where}",
                jobs,
                f"{name}: {len(shapes)} tensors, {numel * 4 / 1e6:.1f} MB, {where}",
            )
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
