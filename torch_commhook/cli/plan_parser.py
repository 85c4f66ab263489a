"""The command line of ``plan``."""

from __future__ import annotations

import argparse
import math
import re

from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.train_config import PARALLEL
from torch_commhook.hooks.expressions import NO_HOOK
from torch_commhook.planning import BUCKET_CAPS_MB

#: An hour: the longest link is one of light minutes.
_MOST_DELAY_MS = 3_600_000
#: Some days.
_MOST_COMPUTE_MS = 1_000_000_000
_MOST_CONNECTIONS = 16  # attach's
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``plan``. ``--bucket-cap-mb`` that is not given is None."""
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
    parser.add_argument(
        "--delay",
        type=_delay,
        default=0.0,
        metavar="MS",
        help="of ddp: of each message, one way, in ms; a round trip takes two delays (0)",
    )
    parser.add_argument("--world", type=_ranks, default=2, help="ranks (2)")
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
        default=0.0,
        help="of a step without communication (0)",
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
    parser.add_argument("--hooks", nargs="+", metavar="HOOK", help="as train takes them")
    _add_sharded_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


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
