"""The command line of ``train``: its options, each by itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.option_types import at_most, number, positive_float, positive_int
from torch_commhook.cli.outputs import METRICS, PLOT, SUMMARY
from torch_commhook.cli.train_config import MOST, MOST_RANKS, PARALLEL, TrainConfig
from torch_commhook.hooks.expressions import NO_HOOK


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``train``. An option of TrainConfig that isn't given is None."""
    parser = OneLineParser(
        prog="commhook train",
        description=(
            "Train a byte-level transformer with DistributedDataParallel or fully_shard, and a "
            "communication hook. "
            "Started alone it launches its own ranks on this machine; under torchrun, or as one of "
            "several tasks of Slurm's srun, it joins the world that is there."
        ),
        epilog=(
            "Ctrl-C and SIGTERM end the run after the step that it is in, with the checkpoint of "
            "--save, the picture and the summary; a second one ends it at once. Under torchrun "
            "the first does. "
            "Exit codes: 0 done, 1 a rank failed, 2 wrong arguments, 130 Ctrl-C, 143 SIGTERM. "
            "An option of the model, the training or the data that isn't given with --resume is "
            "taken from the checkpoint."
        ),
    )
    for title, options in _option_groups().items():
        group = parser.add_argument_group(title)
        for name, settings in options.items():
            group.add_argument(name, **settings)
    return parser


#: For each option what ``add_argument`` takes.
_Options = dict[str, dict[str, Any]]


def _option_groups() -> dict[str, _Options]:
    """The options under each title in the help."""
    default = TrainConfig()
    return {
        "model": _model_options(default),
        "training": _training_options(default),
        "communication": _communication_options(default),
        "data": _data_options(),
        "results": _results_options(),
    }


def _model_options(default: TrainConfig) -> _Options:
    return {
        "--layers": _option(positive_int, f"blocks ({default.layers})"),
        "--dim": _option(positive_int, f"width ({default.dim})"),
        "--heads": _option(positive_int, f"attention heads ({default.heads})"),
        "--seq": _option(positive_int, f"bytes a sequence ({default.seq})"),
    }


def _training_options(default: TrainConfig) -> _Options:
    return {
        "--batch": _option(positive_int, f"sequences a step and rank ({default.batch})"),
        "--steps": _option(positive_int, f"steps in all ({default.steps})"),
        "--lr": _option(positive_float, f"highest learning rate of AdamW ({default.lr:g})"),
        "--seed": _option(_seed, f"of the weights and the batches ({default.seed})"),
        "--stop-after": _option(
            positive_int,
            "end after this step; the learning rate's schedule still spans --steps",
            metavar="STEP",
        ),
    }


def _communication_options(default: TrainConfig) -> _Options:
    return {
        "--hook": _option(
            str,
            f"a hook of the library such as {default.hook}, {NO_HOOK} for plain DDP or "
            f"fully_shard, or FILE.py:NAME ({default.hook})",
        ),
        "--parallel": _option(
            str,
            "ddp: each rank has the model; fsdp: fully_shard over all ranks, and the hook takes "
            "part in its reduce-scatters; hsdp: replicas that are sharded each, and the hook "
            f"averages across these ({default.parallel})",
            choices=PARALLEL,
        ),
        "--shards": _option(positive_int, "of hsdp: ranks of a replica (half of the ranks)"),
        "--shard-hook": _option(
            str,
            f"of hsdp: a hook for the reduce-scatters of each replica, or {NO_HOOK} ({NO_HOOK})",
            metavar="HOOK",
        ),
        "--weights": _option(
            str,
            "of fsdp and hsdp: a codec such as blockwise() for the all-gathers of parameters, or "
            f"{NO_HOOK} ({NO_HOOK})",
            metavar="CODEC",
        ),
        "--bucket-cap-mb": _option(
            at_most(MOST["bucket_cap_mb"], positive_float),
            "of ddp: the buckets, from the first to be full on; the last is for all that follow "
            f"({' '.join(f'{cap:g}' for cap in default.bucket_cap_mb)})",
            metavar="MIB",
            nargs="+",
        ),
        "--ranks": _option(
            positive_int, f"ranks to launch, at most {MOST_RANKS} ({default.ranks})"
        ),
        "--timeout": _option(
            at_most(MOST["timeout"], positive_float),
            "of a collective, seconds (300)",
            default=300.0,
        ),
        "--device": _option(
            str,
            "auto: CUDA where every rank of this machine gets a GPU of its own, else the CPU",
            choices=("auto", "cpu", "cuda"),
            default="auto",
        ),
        "--backend": _option(
            str,
            "auto: NCCL on CUDA, Gloo on the CPU",
            choices=("auto", "gloo", "nccl"),
            default="auto",
        ),
        "--threads": _option(
            at_most(MOST["threads"], positive_int),
            "threads a rank on the CPU (cores // ranks)",
        ),
    }


def _data_options() -> _Options:
    return {
        "--data": _option(
            str,
            "text to train on (the sources of Python's standard library)",
            nargs="+",
            metavar="FILE",
        ),
        "--data-cap-mb": _option(
            at_most(MOST["data_cap_mb"], positive_float),
            "the most text to use (16 of the standard library, all of --data)",
            metavar="MB",
        ),
    }


def _results_options() -> _Options:
    return {
        "--compare": {
            "action": "store_true",
            "help": "train again without a hook and print a table",
        },
        "--out": _option(
            Path,
            f"where {METRICS}, {SUMMARY} and {PLOT} go (runs/DATE-TIME)",
            metavar="DIR",
        ),
        "--save": _option(
            Path,
            "write a checkpoint at the end; {step} in the path is the step",
            metavar="PATH",
        ),
        "--save-every": _option(positive_int, "and after every N steps", metavar="N"),
        "--resume": _option(Path, "go on from a checkpoint", metavar="PATH"),
        "--log-every": _option(
            positive_int,
            "steps between lines where stdout is no terminal (a line for each 5 %%)",
            metavar="N",
        ),
    }


def _option(kind: Callable[[str], Any], text: str, **more: Any) -> dict[str, Any]:
    """What ``add_argument`` takes for an option with a value of ``kind``."""
    return {"type": kind, "help": text, **more}


# ---- types of single options ---------------------------------------------------------------------


def _seed(text: str) -> int:
    value = number(text, int, "a whole number")
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2**63 - 1, got {value}")
    return value
