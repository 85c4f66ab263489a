"""The command line of ``train``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.option_types import at_most, number, path, positive_float, positive_int
from torch_commhook.cli.outputs import EVENTS, METRICS, PLOT, SUMMARY
from torch_commhook.cli.step_log import LOGS
from torch_commhook.cli.train_config import MOST, MOST_RANKS, PARALLEL, TrainConfig
from torch_commhook.hooks.expressions import NO_HOOK


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of ``train``. Options of TrainConfig are None by default."""
    parser = OneLineParser(
        prog="commhook train",
        description=(
            "Train a byte-level transformer with DistributedDataParallel or fully_shard, and a "
            "communication hook. Started alone, train launches its own ranks on this machine. "
            "Under torchrun, or as one of several tasks of Slurm's srun, it joins that world."
        ),
        epilog=(
            "Ctrl-C and SIGTERM end the run after the current step, and write the checkpoint of "
            "--save, the picture and the summary. A second signal ends the run at once; under "
            "torchrun Ctrl-C does so, and SIGTERM after 25 s. Exit codes: 0 done, 1 a rank "
            "failed, 2 wrong arguments, 130 Ctrl-C, 143 SIGTERM. With --resume, the checkpoint "
            "gives the options of the model, the training and the data that are not on the "
            "command line."
        ),
    )
    for title, options in _option_groups().items():
        group = parser.add_argument_group(title)
        for name, settings in options.items():
            group.add_argument(name, **settings)
    return parser


#: Name of each option: keyword arguments of ``add_argument``.
Options = dict[str, dict[str, Any]]


def _option_groups() -> dict[str, Options]:
    """The options by their title in the help."""
    default = TrainConfig()
    return {
        "model": _model_options(default),
        "training": _training_options(default),
        "communication": _communication_options(default),
        "data": _data_options(),
        "results": _results_options(),
    }


def _model_options(default: TrainConfig) -> Options:
    return {
        "--layers": _option(_positive("layers"), f"transformer blocks ({default.layers})"),
        "--dim": _option(_positive("dim"), f"width ({default.dim})"),
        "--heads": _option(_positive("heads"), f"attention heads ({default.heads})"),
        "--seq": _option(_positive("seq"), f"bytes of a sequence ({default.seq})"),
    }


def _positive(name: str) -> Callable[[str], int]:
    """The type of a field of TrainConfig that is a whole number of at least 1."""
    return at_most(MOST[name], positive_int)


def _training_options(default: TrainConfig) -> Options:
    return {
        "--batch": _option(_positive("batch"), f"sequences of a rank in a step ({default.batch})"),
        "--steps": _option(_positive("steps"), f"steps in all ({default.steps})"),
        "--lr": _option(positive_float, f"highest learning rate of AdamW ({default.lr:g})"),
        "--seed": _option(_seed, f"seed of the weights and the batches ({default.seed})"),
        "--stop-after": _option(
            positive_int,
            "end after this step; the learning rate's schedule still spans --steps",
            metavar="STEP",
        ),
    }


def _communication_options(default: TrainConfig) -> Options:
    return {
        "--hook": _option(
            str,
            f"hook of the library such as {default.hook}, {NO_HOOK} for plain DDP or "
            f"fully_shard, or FILE.py:NAME ({default.hook})",
        ),
        "--parallel": _option(
            str,
            "ddp: each rank has the model; fsdp: fully_shard over all ranks, and the hook takes "
            "part in its reduce-scatters; hsdp: sharded replicas, and the hook averages across "
            f"replicas ({default.parallel})",
            choices=PARALLEL,
        ),
        "--shards": _option(positive_int, "with hsdp: ranks of a replica (half of the ranks)"),
        "--shard-hook": _option(
            str,
            f"with hsdp: hook for the reduce-scatters within a replica, or {NO_HOOK} ({NO_HOOK})",
            metavar="HOOK",
        ),
        "--weights": _option(
            str,
            "with fsdp and hsdp: codec such as blockwise() for the all-gathers of parameters, or "
            f"{NO_HOOK} ({NO_HOOK})",
            metavar="CODEC",
        ),
        "--bucket-cap-mb": _option(
            at_most(MOST["bucket_cap_mb"], positive_float),
            "with ddp: sizes of the buckets, in the order in which the backward fills them; the "
            "last size is for all later buckets "
            f"({' '.join(f'{cap:g}' for cap in default.bucket_cap_mb)})",
            metavar="MIB",
            nargs="+",
        ),
        "--ranks": _option(
            positive_int, f"ranks to launch, at most {MOST_RANKS} ({default.ranks})"
        ),
        **world_options(),
    }


def world_options() -> Options:
    """The options of :class:`torch_commhook.cli.world.WorldOptions`, for ``bench``, too."""
    return {
        "--timeout": _option(
            at_most(MOST["timeout"], positive_float),
            "timeout of a collective, in seconds (300)",
            default=300.0,
        ),
        "--device": _option(
            str,
            "auto: CUDA if each rank of this machine has a GPU of its own, else the CPU (auto)",
            choices=("auto", "cpu", "cuda"),
            default="auto",
        ),
        "--backend": _option(
            str,
            "auto: NCCL on CUDA, Gloo on the CPU (auto)",
            choices=("auto", "gloo", "nccl"),
            default="auto",
        ),
        "--threads": _option(
            at_most(MOST["threads"], positive_int),
            "threads of a rank on the CPU (cores // ranks)",
        ),
    }


def _data_options() -> Options:
    return {
        "--data": _option(
            str,
            "files of text to train on (the sources of Python's standard library)",
            nargs="+",
            metavar="FILE",
        ),
        "--data-cap-mb": _option(
            at_most(MOST["data_cap_mb"], positive_float),
            "most text to use (16 of the standard library, all of --data)",
            metavar="MB",
        ),
    }


def _results_options() -> Options:
    return {
        "--compare": _option(
            str,
            "train again with each HOOK, and without a hook; print a table, and draw all curves "
            "into one picture. Without --hook, the first run takes the first HOOK",
            nargs="*",
            metavar="HOOK",
        ),
        "--out": _option(
            path,
            f"folder for {METRICS}, {SUMMARY} and {PLOT} (runs/DATE-TIME)",
            metavar="DIR",
        ),
        "--log": _option(
            str,
            f"logs for the numbers of each step: jsonl is {METRICS}, which train always writes; "
            f"tensorboard and wandb need the packages of these names. Event files go to {EVENTS} "
            "in the folder of --out (jsonl)",
            choices=tuple(LOGS),
            nargs="+",
            default=["jsonl"],
        ),
        "--save": _option(
            path,
            "write a checkpoint at the end; {step} in the path stands for the step",
            metavar="PATH",
        ),
        "--save-every": _option(positive_int, "also write one after every N steps", metavar="N"),
        "--resume": _option(path, "continue from a checkpoint", metavar="PATH"),
        "--log-every": _option(
            positive_int,
            "steps between printed lines if stdout is no terminal (a line for each 5 %%)",
            metavar="N",
        ),
    }


def _option(kind: Callable[[str], Any], text: str, **more: Any) -> dict[str, Any]:
    """The keyword arguments of ``add_argument`` for an option of type ``kind``."""
    return {"type": kind, "help": text, **more}


# ---- types of single options ---------------------------------------------------------------------


def _seed(text: str) -> int:
    value = number(text, int, "a whole number")
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2**63 - 1, got {value}")
    return value
