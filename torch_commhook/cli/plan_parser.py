"""The command line of ``plan``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.option_types import at_most, number_of, path, positive_int, type_of
from torch_commhook.cli.plan_model import parse_input
from torch_commhook.cli.plan_numbers import parse_count, parse_rate
from torch_commhook.cli.train_config import MOST, MOST_RANKS, PARALLEL, is_no_hook
from torch_commhook.planning import BUCKET_CAPS_MB, LinkFile
from torch_commhook.planning.computing import OPTIMIZERS

_MOST_DELAY_MS = 3_600_000  # an hour: light takes minutes over the longest links
_MOST_COMPUTE_MS = 1_000_000_000  # 11 days
_MOST_CONNECTIONS = 16  # as attach takes

_ranks = at_most(MOST_RANKS, positive_int)


@dataclass(frozen=True)
class LinkOption:
    """The value of ``--link``: a rate, or a file of ``bench``.

    Attributes:
        bits_per_second: rate of each rank's link, each way.
        delay_seconds: delay of a message, one way.
        path: path of the file; None for a rate.
        file: contents of the file; None for a rate.
    """

    bits_per_second: float
    delay_seconds: float = 0.0
    path: str | None = None
    file: LinkFile | None = None

    @property
    def ranks(self) -> int | None:
        """The number of ranks in the file; None for a rate."""
        return None if self.file is None else self.file.ranks


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of ``plan``. ``--bucket-cap-mb`` and the model are None by default."""
    parser = OneLineParser(
        prog="commhook plan",
        description=(
            "Recommend a hook for a link, and predict the time of a step with each hook. plan "
            "measures the hooks' computation on this machine, and counts their bytes. Without a "
            "model it takes the model of train."
        ),
    )
    _add_model(parser)
    parser.add_argument(
        "--link",
        type=_link,
        default=_link("1gbit"),
        metavar="RATE|FILE",
        help=(
            "rate of each rank's link, each way, such as 200mbit or 100G; or a file of commhook "
            "bench --out, which gives the rate, the delay, and the hooks' computation if it has "
            "all --hooks (1gbit)"
        ),
    )
    parser.add_argument(
        "--delay",
        type=number_of("milliseconds", 0, _MOST_DELAY_MS),
        metavar="MS",
        help=(
            "with ddp: delay of each message, one way, in ms; a round trip takes two delays (that "
            "of the file, else 0)"
        ),
    )
    parser.add_argument(
        "--world", type=_ranks, help="number of ranks, at least two (that of the file, else 2)"
    )
    parser.add_argument(
        "--nodes",
        type=_ranks,
        help=(
            "with ddp: number of nodes, each with as many consecutive ranks; adds columns for a "
            "rank's messages, connections and round trips, and for the bytes that a node sends to "
            "others"
        ),
    )
    parser.add_argument(
        "--connections",
        type=at_most(_MOST_CONNECTIONS, positive_int),
        default=1,
        metavar="N",
        help=(
            "with ddp: connections= of attach; plan counts them, but predicts the same times, "
            "because it assumes that one connection fills the link (1)"
        ),
    )
    parser.add_argument(
        "--compute-ms",
        type=number_of("milliseconds", 0, _MOST_COMPUTE_MS),
        metavar="MS",
        help=(
            "time of a step without communication; by default plan measures it on this machine, "
            "for the model of train or for --model with its inputs"
        ),
    )
    parser.add_argument(
        "--bucket-cap-mb",
        type=number_of("MiB", 1e-3, 1e5),
        nargs="+",
        metavar="MIB",
        help=(
            "with ddp: sizes of the buckets, in the order in which the backward fills them; the "
            f"last size is for all later buckets ({' '.join(f'{cap:g}' for cap in BUCKET_CAPS_MB)})"
        ),
    )
    parser.add_argument(
        "--threads",
        type=at_most(MOST["threads"], positive_int),
        default=1,
        help="threads of a rank (1)",
    )
    parser.add_argument(
        "--hooks",
        nargs="+",
        metavar="HOOK",
        help="hooks to compare, as train takes them; plan adds the plain all-reduce",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default=OPTIMIZERS[0],
        help="optimizer of the training: error feedback on gradients of fewer than four bits hurts "
        "under AdamW (adamw)",
    )
    _add_sharded_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot",
        type=path,
        metavar="FILE.png",
        help="draw the time of a step over links of 10 Mbit/s to 100 Gbit/s",
    )
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--model-size",
        type=type_of(parse_count),
        metavar="N",
        help="number of parameters, such as 124M or 7B",
    )
    group.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help=(
            "function without arguments that makes the model, or FILE.py:FACTORY; plan builds the "
            "model on the meta device, where it takes no memory"
        ),
    )
    group.add_argument(
        "--shapes",
        type=path,
        metavar="FILE",
        help="file of the parameters' shapes: one on each line, after an optional name; or JSON",
    )
    parser.add_argument(
        "--input",
        type=type_of(parse_input),
        nargs="+",
        metavar="SHAPE",
        help=(
            "with --model: shapes of its inputs, such as 8x3x224x224 or 4x128:int64, to measure a "
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
            "in its reduce-scatters; hsdp: sharded replicas, and hooks average across replicas "
            "(ddp)"
        ),
    )
    parser.add_argument(
        "--shards", type=_ranks, help="with hsdp: ranks of a replica (half of the ranks)"
    )
    parser.add_argument(
        "--shard-hook",
        type=_unless_none,
        metavar="HOOK",
        help="with hsdp: hook for the reduce-scatters within a replica",
    )
    parser.add_argument(
        "--weights",
        type=_unless_none,
        metavar="CODEC",
        help="with fsdp and hsdp: codec such as blockwise() for the all-gathers of parameters",
    )
    parser.add_argument(
        "--reshard-after-forward",
        type=_resharding,
        default="yes",
        metavar="yes|no|RANKS",
        help=(
            "with fsdp and hsdp: whether the forward frees the parameters, so that the backward "
            "gathers them again; or over how many ranks they stay sharded in between (yes)"
        ),
    )
    parser.add_argument(
        "--inner-link",
        type=type_of(parse_rate),
        help=(
            "rate of the links within a replica of hsdp, and among the RANKS of "
            "--reshard-after-forward (that of --link)"
        ),
    )


def _unless_none(text: str) -> str | None:
    return None if is_no_hook(text) else text


def _resharding(text: str) -> str:
    if text not in ("yes", "no") and not (text.isdecimal() and 2 <= int(text) <= MOST_RANKS):
        raise argparse.ArgumentTypeError(f"must be yes, no or a number from 2, got {text!r}")
    return text


def _link(text: str) -> LinkOption:
    """Read a rate, or a file of ``commhook bench``."""
    try:
        return LinkOption(parse_rate(text))
    except ValueError as error:
        if not Path(text).exists() or Path(text).is_dir():
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
