"""The options of ``train``: their defaults, what a checkpoint decides, and every check."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch_commhook.cli.hook_expression import NO_HOOK, HookExpressionError, check_hook
from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.text_data import DataError, read_text


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the numbers of a run; a checkpoint holds it."""

    layers: int = 6
    dim: int = 384
    heads: int = 6
    seq: int = 128
    batch: int = 4
    steps: int = 200
    lr: float = 1e-3
    seed: int = 0
    ranks: int = 2
    hook: str = "cast(bfloat16)"
    bucket_cap_mb: float = 25.0
    data: tuple[str, ...] | None = None
    data_cap_mb: float | None = None

    @property
    def cap_bytes(self) -> int | None:
        """The most bytes of text to use: 16 MB of the standard library, all of given files."""
        cap = self.data_cap_mb
        if cap is None and self.data is None:
            cap = 16.0
        return None if cap is None else int(cap * 1e6)

    def to_plain(self) -> dict[str, Any]:
        """The configuration as plain values, for JSON and for a checkpoint."""
        plain = asdict(self)
        plain["data"] = None if self.data is None else list(self.data)
        return plain

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> TrainConfig:
        """The inverse of :meth:`to_plain`; unknown keys are ignored, missing ones get defaults."""
        known = {f.name for f in fields(TrainConfig)}
        values = {name: value for name, value in plain.items() if name in known}
        if values.get("data") is not None:
            values["data"] = tuple(values["data"])
        return TrainConfig(**values)


#: The fields that fix the shapes of the model: a checkpoint fits no others.
MODEL_FIELDS = ("layers", "dim", "heads", "seq")


@dataclass(frozen=True)
class TrainOptions:
    """The configuration of a run, and what doesn't change its numbers."""

    config: TrainConfig
    out: Path
    save: Path | None
    save_every: int | None
    resume: Path | None
    stop_after: int | None
    compare: bool
    log_every: int
    timeout: float
    device: str
    backend: str
    threads: int
    notes: tuple[str, ...] = field(default=())

    @property
    def last_step(self) -> int:
        """The step after which this run ends; the schedule spans ``config.steps`` anyway."""
        return self.config.steps if self.stop_after is None else self.stop_after


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``train``. An option of TrainConfig that isn't given is None."""
    default = TrainConfig()
    parser = OneLineParser(
        prog="commhook train",
        description=(
            "Train a byte-level transformer with DistributedDataParallel and a communication hook. "
            "Started alone it launches its own ranks on this machine; under torchrun it joins "
            "the world that is there."
        ),
        epilog=(
            "Exit codes: 0 done, 1 a rank failed, 2 wrong arguments, 130 Ctrl-C, 143 SIGTERM. "
            "An option of the model, the training or the data that isn't given with --resume is "
            "taken from the checkpoint."
        ),
    )

    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=_positive_int, help=f"blocks ({default.layers})")
    model.add_argument("--dim", type=_positive_int, help=f"width ({default.dim})")
    model.add_argument("--heads", type=_positive_int, help=f"attention heads ({default.heads})")
    model.add_argument("--seq", type=_positive_int, help=f"bytes a sequence ({default.seq})")

    training = parser.add_argument_group("training")
    training.add_argument(
        "--batch", type=_positive_int, help=f"sequences a step and rank ({default.batch})"
    )
    training.add_argument("--steps", type=_positive_int, help=f"steps in all ({default.steps})")
    training.add_argument(
        "--lr", type=_positive_float, help=f"highest learning rate of AdamW ({default.lr:g})"
    )
    training.add_argument(
        "--seed", type=_seed, help=f"of the weights and the batches ({default.seed})"
    )
    training.add_argument(
        "--stop-after",
        type=_positive_int,
        metavar="STEP",
        help="end after this step; the learning rate's schedule still spans --steps",
    )

    communication = parser.add_argument_group("communication")
    communication.add_argument(
        "--hook",
        help=f"a hook of the library such as {default.hook}, {NO_HOOK} for plain DDP, "
        f"or FILE.py:NAME ({default.hook})",
    )
    communication.add_argument(
        "--bucket-cap-mb", type=_positive_float, help=f"DDP's buckets ({default.bucket_cap_mb:g})"
    )
    communication.add_argument(
        "--ranks", type=_positive_int, help=f"ranks to launch ({default.ranks})"
    )
    communication.add_argument(
        "--timeout", type=_positive_float, default=300.0, help="of a collective, seconds (300)"
    )
    communication.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: CUDA where every rank of this machine gets a GPU of its own, else the CPU",
    )
    communication.add_argument(
        "--backend",
        choices=("auto", "gloo", "nccl"),
        default="auto",
        help="auto: NCCL on CUDA, Gloo on the CPU",
    )
    communication.add_argument(
        "--threads", type=_positive_int, help="threads a rank on the CPU (cores // ranks)"
    )

    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        nargs="+",
        metavar="FILE",
        help="text to train on (the sources of Python's standard library)",
    )
    data.add_argument(
        "--data-cap-mb",
        type=_positive_float,
        metavar="MB",
        help="the most text to use (16 of the standard library, all of --data)",
    )

    results = parser.add_argument_group("results")
    results.add_argument(
        "--compare", action="store_true", help="train again without a hook and print a table"
    )
    results.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where metrics.jsonl, summary.json and loss.png go (runs/DATE-TIME)",
    )
    results.add_argument(
        "--save",
        type=Path,
        metavar="PATH",
        help="write a checkpoint at the end; {step} in the path is the step",
    )
    results.add_argument(
        "--save-every", type=_positive_int, metavar="N", help="and after every N steps"
    )
    results.add_argument("--resume", type=Path, metavar="PATH", help="go on from a checkpoint")
    results.add_argument(
        "--log-every",
        type=_positive_int,
        metavar="N",
        help="steps between lines where stdout is no terminal (a line for each 5 %%)",
    )
    return parser


def parse_options(argv: Sequence[str], world_size: int | None = None) -> TrainOptions:
    """Read and check the options; ends the process with one line and exit code 2 on an error.

    Args:
        argv: the arguments after ``train``.
        world_size: ranks of the world that this process is part of, None where it is to launch one.
    """
    parser = build_parser()
    args = parser.parse_args(list(argv))
    try:
        return _resolve(args, world_size)
    except (OptionError, HookExpressionError, DataError) as error:
        parser.error(str(error))


class OptionError(ValueError):
    """Options that are wrong together, in one sentence."""


def _resolve(args: argparse.Namespace, world_size: int | None) -> TrainOptions:
    given = {
        f.name: getattr(args, f.name)
        for f in fields(TrainConfig)
        if getattr(args, f.name) is not None
    }
    if "data" in given:
        given["data"] = tuple(given["data"])
    if world_size is not None:
        if given.get("ranks", world_size) != world_size:
            raise OptionError(
                f"argument --ranks: must be the {world_size} of the world that is there, "
                f"got {given['ranks']}"
            )
        given["ranks"] = world_size
    notes: tuple[str, ...] = ()
    base = TrainConfig()
    saved_step = 0
    if args.resume is not None:
        base, saved_step, notes = _base_from_checkpoint(args.resume, given)
    config = replace(base, **given)
    _check_config(config)
    _check_steps(args, config, saved_step)
    if config.hook.strip().lower() == NO_HOOK and args.compare:
        raise OptionError(f"argument --compare: compares --hook with {NO_HOOK}: give another hook")
    if args.save_every is not None and args.save is None:
        raise OptionError("argument --save-every: needs --save PATH")
    _check_device(args, config.ranks)
    last_step = config.steps if args.stop_after is None else args.stop_after
    out = Path(time.strftime("runs/%Y%m%d-%H%M%S")) if args.out is None else args.out
    if not out.is_dir() and out.exists():
        raise OptionError(f"argument --out: {out} is not a directory")
    return TrainOptions(
        config=config,
        out=out,
        save=args.save,
        save_every=args.save_every,
        resume=args.resume,
        stop_after=args.stop_after,
        compare=args.compare,
        log_every=args.log_every or max(1, (last_step - saved_step) // 20),
        timeout=args.timeout,
        device=args.device,
        backend=args.backend,
        threads=args.threads or max(1, available_cores() // config.ranks),
        notes=notes,
    )


def _base_from_checkpoint(
    path: Path, given: Mapping[str, Any]
) -> tuple[TrainConfig, int, tuple[str, ...]]:
    from torch_commhook.cli.checkpoint import CheckpointError, read_header

    try:
        header = read_header(path)
    except CheckpointError as error:
        raise OptionError(f"argument --resume: {error}") from error
    saved = TrainConfig.from_plain(header.config)
    notes = []
    for name, value in given.items():
        was = getattr(saved, name)
        if value == was:
            continue
        option = "--" + name.replace("_", "-")
        if name in MODEL_FIELDS:
            raise OptionError(
                f"argument {option}: must be {was} as in the checkpoint {path}, got {value}"
            )
        if name == "ranks" and header.has_hook_state:
            raise OptionError(
                f"argument {option}: the checkpoint {path} holds the hook's state of {was} ranks, "
                f"which is each rank's own; resume with {was} ranks, got {value}"
            )
        if name == "hook" and header.has_hook_state:
            notes.append(f"the state of the hook {was} in {path} is not used")
        notes.append(f"{option} is {value}, it was {was} in {path}: not the same run any more")
    return saved, header.step, tuple(notes)


def _check_config(config: TrainConfig) -> None:
    if config.dim % config.heads != 0 or (config.dim // config.heads) % 2 != 0:
        raise OptionError(
            f"argument --dim: must be a multiple of 2 * heads = {2 * config.heads}, "
            f"got {config.dim}"
        )
    try:
        check_hook(config.hook)
    except HookExpressionError as error:
        raise OptionError(f"argument --hook: {error}") from error
    try:
        read_text(config.data, config.cap_bytes, config.seq)
    except DataError as error:
        raise OptionError(f"argument --data: {error}") from error


def _check_steps(args: argparse.Namespace, config: TrainConfig, saved_step: int) -> None:
    if args.stop_after is not None and args.stop_after > config.steps:
        raise OptionError(
            f"argument --stop-after: must be at most --steps {config.steps}, got {args.stop_after}"
        )
    name = "--steps" if args.stop_after is None else "--stop-after"
    last_step = config.steps if args.stop_after is None else args.stop_after
    if last_step <= saved_step:
        raise OptionError(
            f"argument {name}: must be more than the {saved_step} steps of the checkpoint "
            f"{args.resume}, got {last_step}"
        )


def _check_device(args: argparse.Namespace, ranks: int) -> None:
    if args.device == "cpu" and args.backend == "nccl":
        raise OptionError("argument --backend: nccl needs --device cuda, got cpu")
    if args.device != "cuda" and args.backend != "nccl":
        return
    import torch

    gpus = torch.cuda.device_count()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if gpus == 0:
        raise OptionError("argument --device: torch sees no CUDA GPU")
    if local_ranks > gpus and args.backend != "gloo":
        raise OptionError(
            f"argument --ranks: NCCL needs a GPU for each rank, got {local_ranks} ranks and "
            f"{gpus} GPU; give --ranks {gpus}, or --backend gloo to share it"
        )


def available_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- types of single options ---------------------------------------------------------------------


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0 and finite, got {text}")
    return value


def _seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2**63 - 1, got {value}")
    return value
