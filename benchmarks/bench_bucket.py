"""Compares the bucket operators with a plain copy and with PyTorch's own ways, on real shapes.

``python benchmarks/bench_bucket.py --help`` shows the options; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import plain
import torch
from harness import COPY, Against, Job, Report, copies_of, parse, parser, rotated
from machine import memory
from model_shapes import CACHED, MANY_SMALL, ONE_BUCKET, SHAPES, leading, read_shapes
from plain import compiled_or_none
from torch import Tensor
from torch._utils import _flatten_dense_tensors

import torch_commhook.native.bucket_ops as ops

#: The shapes that have targets.
TARGETED = ("resnet50", "gpt2", ONE_BUCKET, CACHED, MANY_SMALL)

SCALE = 1 / 8  # the mean over eight ranks
#: On CUDA, the least gain of one launch over several, for many small tensors.
FEW_LAUNCHES = 2.0
#: The memory of one shape, in bytes per element: tensors, two float32 and two 16-bit buffers, and
#: the allocations of the baselines.
BYTES_PER_ELEMENT = 4 + 2 * 4 + 2 * 2 + 6


class Bucket:
    """float32 tensors of the given shapes, each allocated separately, and persistent buffers."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self.device = device
        self.tensors = [torch.randn(shape, device=device) for shape in shapes]
        self.numel = sum(tensor.numel() for tensor in self.tensors)
        self.flat = torch.zeros(self.numel, device=device)
        self.other = torch.randn(self.numel, device=device)
        self.views = self.views_of(self.flat)
        self.narrow: dict[torch.dtype, Tensor] = {}
        self.narrow_views: dict[torch.dtype, list[Tensor]] = {}
        for dtype in (torch.bfloat16, torch.float16):
            self.narrow[dtype] = torch.empty(self.numel, dtype=dtype, device=device)
            self.narrow[dtype].copy_(self.other)
            self.narrow_views[dtype] = self.views_of(self.narrow[dtype])

    def views_of(self, buffer: Tensor) -> list[Tensor]:
        pieces = buffer.split([tensor.numel() for tensor in self.tensors])
        return [piece.view_as(tensor) for piece, tensor in zip(pieces, self.tensors, strict=True)]


def jobs_of(name: str, bucket: Bucket, at_least: float | None) -> list[Job]:
    """All jobs of one shape.

    Bytes: the fewest that must move, for each element 8 from float32 to float32, and 6 for float32
    to or from 16 bits.
    """
    tensors, flat, views = bucket.tensors, bucket.flat, bucket.views
    wide = 8 * bucket.numel

    def against(each: str, target: bool = True) -> Against:
        """The plain copy; for many small tensors, the equivalent _foreach_copy_."""
        baseline = each if name == MANY_SMALL else COPY
        return Against(baseline, at_least=at_least if target else None)

    into, out_of = "_foreach_copy_ into views", "_foreach_copy_ out of views"
    jobs = [
        Job(COPY, lambda: flat.copy_(bucket.other), wide),
        Job(into, lambda: torch._foreach_copy_(views, tensors), wide, Against(COPY)),
        Job(out_of, lambda: torch._foreach_copy_(tensors, views), wide, Against(COPY)),
        Job("torch.cat", lambda: torch.cat([t.view(-1) for t in tensors]), wide, Against(COPY)),
        Job("_flatten_dense_tensors", lambda: _flatten_dense_tensors(tensors), wide, Against(COPY)),
        Job("flatten", lambda: ops.flatten(tensors, out=flat), wide, against(into)),
        Job(
            "flatten, scale",
            lambda: ops.flatten(tensors, scale=SCALE, out=flat),
            wide,
            against(into, target=False),
        ),
        # Does not accept a caller's buffer, so its time includes a fresh buffer.
        Job(
            "flatten_stats (allocates)",
            lambda: ops.flatten_stats(tensors, scale=SCALE),
            wide,
            against(into, target=False),
        ),
        Job("unflatten", lambda: ops.unflatten_into(flat, tensors), wide, against(out_of)),
    ]
    for dtype in (torch.bfloat16, torch.float16):
        jobs += narrow_jobs(bucket, dtype, against)
    return jobs


def narrow_jobs(bucket: Bucket, dtype: torch.dtype, against: Callable[[str], Against]) -> list[Job]:
    """The jobs with a 16-bit buffer."""
    short, mixed = str(dtype).removeprefix("torch."), 6 * bucket.numel
    tensors, flat, views = bucket.tensors, bucket.flat, bucket.views
    narrow, narrow_views = bucket.narrow[dtype], bucket.narrow_views[dtype]

    def pytorchs_way_there() -> Tensor:
        return _flatten_dense_tensors(tensors).to(dtype).div_(8)

    def pytorchs_way_back() -> None:
        flat.copy_(narrow)
        for tensor, view in zip(tensors, views, strict=True):
            tensor.copy_(view)

    def foreach_copy_and_cast() -> None:
        torch._foreach_copy_(views, tensors)
        narrow.copy_(flat)

    def foreach_chain() -> None:
        torch._foreach_copy_(narrow_views, torch._foreach_mul(tensors, SCALE))

    into, out_of = f"_foreach_copy_ into {short} views", f"_foreach_copy_ out of {short} views"
    copied = f"_foreach_copy_ into views, copy to {short}"
    chained = f"_foreach_mul, _foreach_copy_ into {short} views"
    there = against(into)
    if bucket.device.type == "cuda" and there.baseline == into:  # many small tensors
        there = Against(copied, at_least=None if there.at_least is None else FEW_LAUNCHES)
    jobs = [
        Job(f"plain copy to {short}", lambda: narrow.copy_(bucket.other), mixed, Against(COPY)),
        Job(into, lambda: torch._foreach_copy_(narrow_views, tensors), mixed, Against(COPY)),
        Job(out_of, lambda: torch._foreach_copy_(tensors, narrow_views), mixed, Against(COPY)),
        Job(f"flatten, to {short}, div_", pytorchs_way_there, mixed, Against(COPY)),
        Job(f"copy_ from {short}, split copies", pytorchs_way_back, mixed, Against(COPY)),
        Job(copied, foreach_copy_and_cast, mixed, Against(COPY)),
        Job(chained, foreach_chain, mixed, Against(COPY)),
        Job(
            f"flatten, scale, cast to {short}",
            lambda: ops.flatten(tensors, scale=SCALE, out=narrow),
            mixed,
            there,
        ),
        Job(
            f"unflatten, upcast from {short}",
            lambda: ops.unflatten_into(narrow, tensors, scale=SCALE),
            mixed,
            against(out_of),
        ),
    ]
    return jobs


def compiled_jobs(bucket: Bucket, report: Report) -> Callable[[Bucket], list[Job]]:
    """The jobs with Inductor's code for plain PyTorch, for buckets of these shapes."""
    narrow = bucket.narrow[torch.bfloat16]
    there = compiled_or_none(report, plain.flatten, bucket.tensors, SCALE, narrow)
    back = compiled_or_none(report, plain.unflatten, narrow, SCALE, bucket.tensors)

    def jobs_of_copy(copy: Bucket) -> list[Job]:
        moved = 6 * copy.numel
        narrow = copy.narrow[torch.bfloat16]
        jobs = []
        if there is not None:
            call = partial(there, copy.tensors, SCALE, narrow)
            jobs.append(
                Job("compiled: flatten, scale, cast to bfloat16", call, moved, Against(COPY))
            )
        if back is not None:
            call = partial(back, narrow, SCALE, copy.tensors)
            jobs.append(
                Job("compiled: unflatten, upcast from bfloat16", call, moved, Against(COPY))
            )
        return jobs

    return jobs_of_copy


def memory_for_jobs(options: argparse.Namespace) -> int:
    """The bytes that the jobs may use."""
    if options.memory_gib is not None:
        return int(options.memory_gib * 2**30)
    if options.device == "cuda":
        return int(0.8 * torch.cuda.mem_get_info()[0])
    return int(0.7 * memory("MemAvailable")) or 8 << 30


def fitting_shapes(name: str, bytes_per_element: int, report: Report) -> list[tuple[int, ...]]:
    """The first shapes of a list, as many as fit into memory; notes the others."""
    shapes = read_shapes(name)
    fitting = leading(shapes, memory_for_jobs(report.options) // bytes_per_element)
    if not fitting:
        report.note(f"{name}: skipped, not even its first tensor fits into memory.")
    elif len(fitting) < len(shapes):
        report.note(f"{name}: the first {len(fitting)} of {len(shapes)} tensors fit.")
    return fitting


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=None, help="default: all")
    options.add_argument(
        "--memory-gib",
        type=float,
        metavar="N",
        help="longer shape lists are cut to what fits (default: 70%% of the available memory)",
    )
    parsed = parse(options, arguments)
    if parsed.shapes is None:
        parsed.shapes = ["resnet50", MANY_SMALL] if parsed.quick else list(SHAPES)
        if parsed.device == "cpu" and not parsed.quick:
            parsed.shapes.remove(ONE_BUCKET)
        elif not parsed.quick:
            parsed.shapes.remove(CACHED)
        parsed.shapes.sort(key=lambda name: name not in TARGETED)  # time may run out
    report = Report("bench_bucket" if parsed.device == "cpu" else "bucket_cuda", parsed)
    report.environment["cpu_capability"] = ops.cpu_capability()
    for name in parsed.shapes:
        fitting = fitting_shapes(name, BYTES_PER_ELEMENT, report)
        if not fitting:
            continue
        device = torch.device(parsed.device)
        numel = sum(torch.Size(shape).numel() for shape in fitting)
        count = copies_of(device, 8 * numel)
        buckets = [Bucket(fitting, device) for _ in range(count)]
        compiled = None
        if device.type == "cuda" and not parsed.quick and name == ONE_BUCKET:
            compiled = compiled_jobs(buckets[0], report)
        target = None
        if name in TARGETED:
            target = 1.0 if parsed.device == "cpu" and name != CACHED else 0.9
        for threads in parsed.threads:
            torch.set_num_threads(threads)
            plural = "s" if threads > 1 else ""
            where = f"{threads} thread{plural}" if parsed.device == "cpu" else "CUDA"
            report.run(
                f"{name}, {where}",
                rotated(
                    [
                        jobs_of(name, bucket, target) + (compiled(bucket) if compiled else [])
                        for bucket in buckets
                    ]
                ),
                f"{name}: {len(fitting)} tensors, {numel * 4 / 1e6:.1f} MB, {where}",
            )
        del buckets
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
