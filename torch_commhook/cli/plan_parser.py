"""The command line of ``plan``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.plan_model import parse_input
from torch_commhook.cli.plan_numbers import parse_count, parse_rate
from torch_commhook.cli.train_config import PARALLEL
from torch_commhook.hooks.expressions import NO_HOOK
from torch_commhook.planning import BUCKET_CAPS_MB, LinkFile
from torch_commhook.planning.computing import OPTIMIZERS

_Value = TypeVar("_Value")

#: An hour: the longest link is one of light minutes.
_MOST_DELAY_MS = 3_600_000
#: Some days.
_MOST_COMPUTE_MS = 1_000_000_000
_MOST_CONNECTIONS = 16  # attach's


@dataclass(frozen=True)
class LinkOption:
    """What ``--link`` gives.

    Attributes:
        bits_per_second: of each rank, each way.
        delay_seconds: of a message, one way.
        path: of the file that both are from; None of a rate.
        file: that file; None of a rate.
    """

    bits_per_second: float
    delay_seconds: float = 0.0
    path: str | None = None
    file: LinkFile | None = None

    @property
    def ranks(self) -> int | None:
        """Of the file."""
        return None if self.file is None else self.file.ranks


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``plan``. ``--bucket-cap-mb`` that is not given is None, as the model is."""
    parser = OneLineParser(
        prog="commhook plan",
        description=(
            "Which hook to take: what each would cost in a step over a link, its computation "
            "measured on this machine, its bytes counted. Without a model it plans for that of "
            "train."
        ),
    )
    _add_model(parser)
    parser.add_argument(
        "--link",
        type=_link,
        default=_link("1gbit"),
        metavar="RATE|FILE",
        help=(
            "of each rank, each way, such as 200mbit or 100G; or a file of commhook bench --out, "
            "with the delay that it measured, and the hooks' times if it has those of all --hooks "
            "(1gbit)"
        ),
    )
    parser.add_argument(
        "--delay",
        type=_delay,
        metavar="MS",
        help=(
            "of ddp: of each message, one way, in ms; a round trip takes two delays (that of the "
            "file, else 0)"
        ),
    )
    parser.add_argument(
        "--world", type=_ranks, help="ranks, two or more (those of the file, else 2)"
    )
    parser.add_argument(
        "--nodes",
        type=_ranks,
        help=(
            "of ddp: that the ranks are on, as many consecutive ones on each; shows messages, "
            "connections and round trips of a rank, and what a node sends to others"
        ),
    )
    parser.add_argument(
        "--connections",
        type=_connections,
        default=1,
        metavar="N",
        help=(
            "of ddp: as attach takes them; they are counted, and change no time, since the link "
            "is taken to be filled by one (1)"
        ),
    )
    parser.add_argument(
        "--compute-ms",
        type=_milliseconds,
        metavar="MS",
        help=(
            "of a step without communication; without it plan measures the model on this machine: "
            "that of train, or of --model with its inputs"
        ),
    )
    parser.add_argument(
        "--bucket-cap-mb",
        type=_mebibytes,
        nargs="+",
        metavar="MIB",
        help=(
            "of ddp: the buckets, from the first to be full on; the last is for all that follow "
            f"({' '.join(f'{cap:g}' for cap in BUCKET_CAPS_MB)})"
        ),
    )
    parser.add_argument("--threads", type=_ranks, default=1, help="that a rank computes with (1)")
    parser.add_argument(
        "--hooks",
        nargs="+",
        metavar="HOOK",
        help="as train takes them; the plain all-reduce is always compared with",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default=OPTIMIZERS[0],
        help="that trains the model: error feedback on gradients hurts under AdamW (adamw)",
    )
    _add_sharded_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw the steps over links of 10 Mbit/s to 100 Gbit/s",
    )
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--model-size", type=_of(parse_count), metavar="N", help="elements, such as 124M or 7B"
    )
    group.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help=(
            "a function without arguments that makes the model, or FILE.py:FACTORY; it is built on "
            "the meta device, and its parameters' shapes count"
        ),
    )
    group.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help="the parameters' shapes: one on each line, with a name before it or not, or JSON",
    )
    parser.add_argument(
        "--input",
        type=_of(parse_input),
        nargs="+",
        metavar="SHAPE",
        help=(
            "of --model: what it is called with, such as 8x3x224x224 or 4x128:int64, to measure a "
            "step (the factory's attribute example_inputs)"
        ),
    )


def _add_sharded_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parallel",
        choices=PARALLEL,
        default="ddp",
        help=(
            "ddp: each rank has the model; fsdp: fully_shard over all ranks, and hooks take part "
            "in its reduce-scatters; hsdp: replicas that are sharded each, and hooks average "
            "across these (ddp)"
        ),
    )
    parser.add_argument(
        "--shards", type=_ranks, help="of hsdp: ranks of a replica (half of the ranks)"
    )
    parser.add_argument(
        "--shard-hook",
        type=_unless_none,
        metavar="HOOK",
        help="of hsdp: a hook for the reduce-scatters of each replica",
    )
    parser.add_argument(
        "--weights",
        type=_unless_none,
        metavar="CODEC",
        help="of fsdp and hsdp: a codec such as blockwise() for the all-gathers of parameters",
    )
    parser.add_argument(
        "--reshard-after-forward",
        type=_resharding,
        default="yes",
        metavar="yes|no|RANKS",
        help=(
            "of fsdp and hsdp: whether parameters are freed after the forward and gathered again, "
            "or how many ranks keep a shard of them each (yes)"
        ),
    )
    parser.add_argument(
        "--inner-link",
        type=_rate,
        help=(
            "within a replica of hsdp, and among the RANKS of --reshard-after-forward "
            "(that of --link)"
        ),
    )


def _unless_none(text: str) -> str | None:
    return None if text.strip().lower() == NO_HOOK else text


def _resharding(text: str) -> str:
    if text not in ("yes", "no") and not (text.isdecimal() and 2 <= int(text) <= 1024):
        raise argparse.ArgumentTypeError(f"must be yes, no or a number from 2, got {text!r}")
    return text


def _of(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """A type of argparse from a function that raises a ValueError."""

    def read(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


_rate = _of(parse_rate)


def _link(text: str) -> LinkOption:
    """A rate, or a file of ``commhook bench``."""
    try:
        return LinkOption(parse_rate(text))
    except ValueError as error:
        if not Path(text).exists():
            raise argparse.ArgumentTypeError(
                f"{error}; or a file of commhook bench --out, and there is none of this name"
            ) from error
    try:
        file = LinkFile.read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if file.link is None:
        why = "one rank has none" if file.ranks == 1 else "bench measured other --parts"
        raise argparse.ArgumentTypeError(f"{text} has no link: {why}")
    return LinkOption(file.link.bits_per_second, file.link.delay_seconds, text, file)


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 1024, got {text!r}")
    return int(text)


def _connections(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_CONNECTIONS:
        raise argparse.ArgumentTypeError(
            f"must be a number from 1 to {_MOST_CONNECTIONS}, got {text!r}"
        )
    return int(text)


def _delay(text: str) -> float:
    return _milliseconds(text, _MOST_DELAY_MS)


def _milliseconds(text: str, most: float = _MOST_COMPUTE_MS) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise argparse.ArgumentTypeError(
            f"must be a number of milliseconds from 0 to {most:.0f}, got {text!r}"
        )
    return value


def _mebibytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1e-3 <= value <= 1e5:
        raise argparse.ArgumentTypeError(f"must be from 0.001 to 100000 MiB, got {text!r}")
    return value
