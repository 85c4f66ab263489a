"""``commhook plan``: what each hook would cost over a link, and whether it pays.

What a hook computes is measured here, on a bucket of random gradients; what it sends is counted,
with ranks that are threads. A step is taken for computation and communication one after the other:
what backward hides of the communication is left out, for all hooks alike.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
#: Elements of the bucket that is measured: DDP's 25 MiB.
_MOST_MEASURED = 25 * (1 << 20) // 4
#: Elements that are sent between threads to count the bytes, for each rank.
_MOST_COUNTED = 1 << 18
_RUNS = 5
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}


@dataclass(frozen=True)
class Cost:
    """What a hook costs in one step.

    Attributes:
        hook: as it is written.
        bytes_sent: by each rank.
        wire_seconds: that these take on the link.
        compute_seconds: encoding, adding up and decoding, beyond what a plain all-reduce does.
        step_seconds: with what the step computes anyway.
        ratio: of that to the step of a plain all-reduce.
    """

    hook: str
    bytes_sent: float
    wire_seconds: float
    compute_seconds: float
    step_seconds: float
    ratio: float


def plan(
    hooks: Sequence[str],
    *,
    elements: int,
    bits_per_second: float,
    world_size: int,
    compute_seconds: float = 0.0,
) -> list[Cost]:
    """What each hook would cost; the first is what the others are compared with.

    Args:
        hooks: as ``train`` takes them.
        elements: of the model.
        bits_per_second: of each rank's link, each way.
        world_size: ranks.
        compute_seconds: of a step without communication.
    """
    plain = _compute_seconds(parse_hook("allreduce()"), elements)
    costs: list[Cost] = []
    for text in hooks:
        hook = parse_hook(text)
        sent = _bytes_per_element(hook, elements, world_size) * elements
        computed = max(0.0, _compute_seconds(hook, elements) - plain)
        wire = sent * 8 / bits_per_second
        step = compute_seconds + computed + wire
        first = costs[0].step_seconds if costs else step
        costs.append(Cost(text, sent, wire, computed, step, step / first if first else 1.0))
    return costs


def _gradients(elements: int, ranks: int) -> list[list[Any]]:
    """A matrix for each rank, as most gradients are."""
    import torch

    rows = max(1, math.isqrt(elements))
    return [[torch.randn(rows, max(1, elements // rows))] for _ in range(ranks)]


def _bytes_per_element(hook: Any, elements: int, world_size: int) -> float:
    from torch_commhook.testing import simulate

    # What low-rank factors send is no share of the elements: count it on a matrix of the model's
    # own size, as far as memory goes.
    counted = _gradients(min(elements, max(_MOST_COUNTED, (1 << 24) // world_size)), world_size)
    sent = simulate(hook, counted, steps=2, timeout=600).wire_bytes
    return sent / counted[0][0].numel()


def _compute_seconds(hook: Any, elements: int) -> float:
    """Of a step on this machine, with nothing to wait for."""
    from torch_commhook import GradBucket
    from torch_commhook.testing import run_ranks

    gradient = _gradients(min(elements, _MOST_MEASURED), 1)[0][0]

    def measure(rank: int) -> float:
        import torch

        parameter = torch.zeros_like(gradient, requires_grad=True)
        times = []
        for _ in range(_RUNS + 2):
            bucket = GradBucket([parameter], [gradient])
            begun = time.perf_counter()
            hook(None, bucket).wait()
            times.append(time.perf_counter() - begun)
        return statistics.median(times[2:])  # after buffers have been made

    return run_ranks(measure, 1, timeout=600)[0] * elements / gradient.numel()


# ---- the command ---------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run the subcommand; see :func:`torch_commhook.cli.main.main`."""
    options = _parser().parse_args(argv)
    import torch

    torch.set_num_threads(options.threads)
    try:
        costs = plan(
            options.hooks,
            elements=options.model_size,
            bits_per_second=options.link,
            world_size=options.world,
            compute_seconds=options.compute_ms / 1e3,
        )
    except HookExpressionError as error:
        print(f"commhook plan: error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:  # of a hook that does nothing by itself
        print(f"commhook plan: error: {' '.join(str(error).split())}", file=sys.stderr)
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
        f"communication, {options.threads} thread{'s' if options.threads > 1 else ''}"
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
