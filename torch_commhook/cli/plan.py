"""``commhook plan``: what each hook would cost over a link, and whether it pays.

What a hook computes is measured here, on a bucket of random gradients in square matrices, as many
as models have; what it sends is counted, with ranks that are threads. From that a step is timed: a
third of its computing is the forward, the rest the backward, which fills the buckets one after the
other, and what hooks compute stands on the same processor. A bucket goes on the wire once it is
full and the one before is through.

A hook that changes after some steps is planned as it is then. One that keeps ranks apart for some
steps sends after the last of them, when there is nothing to hide that behind; what is said of a
step is the mean.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch_commhook.cli.hook_expression import HookExpressionError, parse_hook
from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.report import format_bytes

DEFAULT_HOOKS = (
    "allreduce()",
    "cast()",
    "blockwise()",
    "error_feedback(blockwise(bits=4))",
    "error_feedback(sign())",
    "error_feedback(topk(0.01))",
    "error_feedback(powersgd(rank=2))",
)
_BUCKET_CAPS_MB = (1.0, 25.0)  # DDP's
#: Elements of the largest bucket that is measured: 25 MiB.
_MOST_MEASURED = 25 * (1 << 20) // 4
_BUCKET_NUMBER_BYTES = 4  # gradients in float32
_MOST_BUCKETS = 10_000  # past which one more makes no difference
#: A backward computes the products of a forward twice over.
_FORWARD = 1 / 3
#: Of an Ethernet frame what is not headers, its own, IP's and TCP's.
_PAYLOAD = 1448 / 1514
#: Matrices of a model: a few in each of some layers. What low-rank factors send depends on it.
_MATRICES = 48
#: Elements that are sent between threads to count the bytes, for each rank.
_MOST_COUNTED = 1 << 18
_RUNS = 5
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}


class HookError(RuntimeError):
    """A hook that could not be run, in one sentence."""


@dataclass(frozen=True)
class Measured:
    """What a hook does in one step, whatever the link.

    Attributes:
        hook: as it is written.
        bytes_sent: by each rank.
        compute_seconds: gathering gradients, encoding, adding up, decoding and writing results.
        overlaps: whether it does so while a backward computes.
    """

    hook: str
    bytes_sent: float
    compute_seconds: float
    overlaps: bool = True


@dataclass(frozen=True, kw_only=True)
class Cost(Measured):
    """What a hook costs in one step.

    Attributes:
        wire_seconds: that the bytes take on the link, with the headers of their packets.
        step_seconds: with what the step computes anyway, as far as that does not hide the rest.
        ratio: of that to the step of the first hook.
    """

    wire_seconds: float
    step_seconds: float
    ratio: float


def measure(
    hooks: Sequence[str],
    *,
    elements: int,
    world_size: int,
    bucket_cap_mb: Sequence[float] = _BUCKET_CAPS_MB,
) -> list[Measured]:
    """What each hook computes and sends.

    Args:
        hooks: as ``train`` takes them.
        elements: of the model.
        world_size: ranks.
        bucket_cap_mb: of the buckets, as :func:`bucket_sizes` takes them.

    Raises:
        HookExpressionError: what is no hook.
        HookError: one that fails when it is run.
    """
    bucket = -(-elements // len(bucket_sizes(elements, bucket_cap_mb)))
    found = []
    for text in hooks:
        hook = parse_hook(text)
        if hook is None:
            raise HookExpressionError(f"the hook {text!r} is plain DDP: write allreduce()")
        try:
            inner, steps, around = _unwrap_hook(hook)
            sent = _bytes_sent(inner, elements, world_size)
            computed = _compute_seconds(inner, elements, bucket)
            computed += sum(_pass_seconds(one, elements, bucket) for one in around)
        except Exception as error:  # a hook may be a user's, and raise anything
            said = " ".join(f"{type(error).__name__}: {error}".split())
            if "attach(model, hook)" in said:
                said = "it asks for more of a model than its size"
            raise HookError(f"the hook {text!r} can't be planned: {said}") from error
        overlaps = not getattr(hook, "keeps_ranks_apart", False)
        found.append(Measured(text, sent / steps, computed / steps, overlaps))
    return found


def _unwrap_hook(hook: Any) -> tuple[Any, int, list[Callable[[Any], object]]]:
    """A hook as it is in the long run: what it does with a bucket, and in how many steps once.

    And what else goes over all gradients then: functions of a tensor.
    """
    import torch

    from torch_commhook import hooks

    steps, around = 1, []
    while True:
        if isinstance(hook, hooks.after):
            hook = hook.hook
        elif isinstance(hook, hooks.clip):
            around.append(torch.linalg.vector_norm)
            hook = hook.hook
        elif isinstance(hook, hooks.local_sgd):
            around.append(partial(_outer_step, hook.outer))
            steps, hook = steps * hook.H, hook.hook
        else:
            return hook, steps, around


def _outer_step(outer: Any, gradient: Any) -> None:
    """What :class:`local_sgd` does beside averaging: how far it is, the anchor's step, and back."""
    distance = (gradient - gradient).to(gradient.dtype)
    outer.step([gradient.clone()], [distance], [distance] if outer.momentum else [])
    gradient.copy_(distance)


def _pass_seconds(call: Callable[[Any], object], elements: int, bucket_elements: int) -> float:
    """Of something that goes over all gradients."""
    import torch

    gradient = torch.randn(min(bucket_elements, _MOST_MEASURED), dtype=torch.float32, device="cpu")
    times = []
    for _ in range(_RUNS + 2):
        begun = time.perf_counter()
        call(gradient)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:]) * elements / gradient.numel()


def plan(
    measured: Sequence[Measured],
    *,
    bits_per_second: float,
    compute_seconds: float = 0.0,
    buckets: Sequence[int] = (1,),
) -> list[Cost]:
    """What each hook would cost; the first is what the others are compared with.

    Args:
        measured: what :func:`measure` gives.
        bits_per_second: of each rank's link, each way.
        compute_seconds: of a step without communication.
        buckets: their sizes, as :func:`bucket_sizes` says.
    """
    costs: list[Cost] = []
    for each in measured:
        wire = each.bytes_sent * 8 / bits_per_second / _PAYLOAD
        if each.overlaps:
            step = _step_seconds(compute_seconds, each.compute_seconds, wire, buckets)
        else:
            step = compute_seconds + each.compute_seconds + wire
        first = costs[0].step_seconds if costs else step
        ratio = step / first if first else 1.0
        costs.append(
            Cost(
                **asdict(each),
                wire_seconds=wire,
                step_seconds=step,
                ratio=ratio,
            )
        )
    return costs


def bucket_sizes(elements: int, bucket_cap_mb: Sequence[float]) -> list[int]:
    """Elements of each bucket of a model whose gradients are float32, in the order of a backward.

    Args:
        elements: of the model.
        bucket_cap_mb: of each bucket, in MiB; the last is for all that follow.
    """
    caps = [max(1, int(cap * (1 << 20)) // _BUCKET_NUMBER_BYTES) for cap in bucket_cap_mb]
    sizes: list[int] = []
    left = elements
    while left > 0:
        size = min(left, caps[min(len(sizes), len(caps) - 1)])
        if len(sizes) >= _MOST_BUCKETS:
            size = left
        sizes.append(size)
        left -= size
    return sizes


def _step_seconds(compute: float, hook: float, wire: float, buckets: Sequence[int]) -> float:
    """A step, in which buckets travel while the next ones are computed."""
    computed = compute * _FORWARD
    through = 0.0  # when the wire has nothing more to send
    elements = sum(buckets)
    for size in buckets:
        share = size / elements
        computed += (compute * (1 - _FORWARD) + hook) * share
        through = max(through, computed) + wire * share
    return max(computed, through)


def _gradients(elements: int, model_elements: int) -> list[Any]:
    """Random gradients, mostly square matrices, of so many elements of a model."""
    import torch

    side = max(1, math.isqrt(min(elements, model_elements // _MATRICES)))
    rows, rest = divmod(elements, side)
    heights = [side] * (rows // side) + [rows % side] * (rows % side > 0)
    shapes = [(height, side) for height in heights] + [(rest,)] * (rest > 0)
    return [torch.randn(shape, dtype=torch.float32, device="cpu") for shape in shapes]


def _bytes_sent(hook: Callable[..., Any], elements: int, world_size: int) -> float:
    """By each rank in a step."""
    from torch_commhook.testing import simulate

    # What low-rank factors send is no share of the elements: count it on matrices of the model's
    # own size, as far as memory goes.
    counted = min(elements, max(_MOST_COUNTED, (1 << 24) // world_size))
    gradients = [_gradients(counted, elements) for _ in range(world_size)]
    return simulate(hook, gradients, steps=2, timeout=600).wire_bytes * elements / counted


def _compute_seconds(hook: Callable[..., Any], elements: int, bucket_elements: int) -> float:
    """Of a step on this machine, with nothing to wait for."""
    from torch_commhook import GradBucket, run_hook
    from torch_commhook.testing import run_ranks

    measured = min(bucket_elements, _MOST_MEASURED)
    gradients = _gradients(measured, elements)

    def of_bucket(rank: int) -> float:
        import torch

        parameters = [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients]
        times = []
        for _ in range(_RUNS + 2):
            bucket = GradBucket(parameters, gradients)
            begun = time.perf_counter()
            result = run_hook(hook, None, bucket).wait()
            for gradient, piece in zip(gradients, bucket.layout().views(result), strict=True):
                gradient.copy_(piece)
            times.append(time.perf_counter() - begun)
        return statistics.median(times[2:])  # after buffers have been made

    return run_ranks(of_bucket, 1, timeout=600)[0] * elements / measured


# ---- the command ---------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run the subcommand; see :func:`torch_commhook.cli.main.main`."""
    options = _parser().parse_args(argv)
    import torch

    torch.set_num_threads(options.threads)
    try:
        costs = plan(
            measure(
                options.hooks,
                elements=options.model_size,
                world_size=options.world,
                bucket_cap_mb=options.bucket_cap_mb,
            ),
            bits_per_second=options.link,
            compute_seconds=options.compute_ms / 1e3,
            buckets=bucket_sizes(options.model_size, options.bucket_cap_mb),
        )
    except (HookExpressionError, HookError) as error:
        print(f"commhook plan: error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
    else:
        print(_table(costs, options))
    return 0


def _table(costs: Sequence[Cost], options: argparse.Namespace) -> str:
    header = ("hook", "sent per step", "wire", "computing", "step", f"x {costs[0].hook}", "pays")
    rows = [
        (
            cost.hook,
            format_bytes(cost.bytes_sent),
            _seconds(cost.wire_seconds),
            _seconds(cost.compute_seconds),
            _seconds(cost.step_seconds),
            f"{cost.ratio:.2f}",
            "" if cost is costs[0] else "yes" if cost.ratio < 0.95 else "no",
        )
        for cost in costs
    ]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(line))
        for line in (list(zip(row, widths, strict=True)) for row in (header, *rows))
    ]
    what = (
        f"{options.model_size / 1e6:g} M elements, {options.world} ranks, "
        f"{options.link / 1e6:g} Mbit/s each way, a step of {options.compute_ms:g} ms without "
        f"communication, buckets of {' '.join(f'{cap:g}' for cap in options.bucket_cap_mb)} MiB, "
        f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    )
    return "\n".join([what, *lines])


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="commhook plan",
        description=(
            "What each hook would cost in a step over a link: its computation measured on this "
            "machine, its bytes counted."
        ),
    )
    parser.add_argument(
        "--model-size", type=_count, default=10_830_000, help="elements, such as 124M (10.83M)"
    )
    parser.add_argument(
        "--link", type=_rate, default=_rate("1gbit"), help="of each rank, each way (1gbit)"
    )
    parser.add_argument("--world", type=_ranks, default=2, help="ranks (2)")
    parser.add_argument(
        "--compute-ms",
        type=_milliseconds,
        default=0.0,
        help="of a step without communication (0)",
    )
    parser.add_argument(
        "--bucket-cap-mb",
        type=_mebibytes,
        nargs="+",
        default=_BUCKET_CAPS_MB,
        metavar="MIB",
        help=(
            "DDP's buckets, from the first to be full on; the last is for all that follow "
            f"({' '.join(f'{cap:g}' for cap in _BUCKET_CAPS_MB)})"
        ),
    )
    parser.add_argument("--threads", type=_ranks, default=1, help="that a rank computes with (1)")
    parser.add_argument(
        "--hooks", nargs="+", default=DEFAULT_HOOKS, metavar="HOOK", help="as train takes them"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _count(text: str) -> int:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([kmgbt]?)", text.strip().lower())
    count = round(float(match[1]) * _SUFFIXES[match[2]]) if match else 0
    if not 1 <= count <= 10**13:
        raise argparse.ArgumentTypeError(f"must be a number such as 124M or 7B, got {text!r}")
    return count


def _rate(text: str) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) *([a-z]+)(?:/s)?", text.strip().lower())
    rate = float(match[1]) * _BITS.get(match[2], 0) if match else 0.0
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"must be a rate such as 200mbit or 10gbit, got {text!r}")
    return rate


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 1024, got {text!r}")
    return int(text)


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of milliseconds, got {text!r}")
    return value


def _mebibytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1e-3 <= value <= 1e5:
        raise argparse.ArgumentTypeError(f"must be from 0.001 to 100000 MiB, got {text!r}")
    return value
