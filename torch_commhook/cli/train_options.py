"""The options of ``train``: their defaults, what a checkpoint decides, and every check."""

from __future__ import annotations

import argparse
import os
import reprlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch_commhook.cli.hook_expression import NO_HOOK, HookExpressionError, check_hook
from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.outputs import (
    METRICS,
    PLOT,
    SUMMARY,
    OutputError,
    check_apart,
    check_checkpoint,
    check_results,
    checkpoint_path,
)
from torch_commhook.cli.place import Place
from torch_commhook.cli.text_data import DataError, read_text

if TYPE_CHECKING:  # it imports torch, which only --resume needs
    from torch_commhook.cli.checkpoint import Checkpoint

_Number = TypeVar("_Number", int, float)
#: More ranks than this on one machine are a slip of the keyboard.
MOST_RANKS = 1024
#: The most that other options take. What is far beyond would fail only inside the ranks.
_MOST = {
    "timeout": 30 * 24 * 3600,  # 30 days
    "threads": 1024,
    "bucket_cap_mb": 10**6,
    "data_cap_mb": 10**6,
}


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
        """The inverse of :meth:`to_plain`; unknown keys are ignored, missing ones get defaults.

        Raises:
            ValueError: a value is not one that the field can have.
        """
        known = {f.name: f.default for f in fields(TrainConfig)}
        values = {name: value for name, value in plain.items() if name in known}
        for name, value in values.items():
            if not _can_be(name, value, known[name]):
                raise ValueError(f"its {name} can't be {reprlib.repr(value)}")
        if values.get("data") is not None:
            values["data"] = tuple(values["data"])
        return TrainConfig(**values)


def _can_be(name: str, value: Any, default: Any) -> bool:
    """Whether ``value`` is one that the field ``name`` of TrainConfig can have."""
    if name == "data":
        return value is None or (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        )
    if isinstance(default, str):
        return isinstance(value, str)
    if isinstance(default, int):
        return type(value) is int and (0 if name == "seed" else 1) <= value < 2**63
    if value is None:
        return default is None
    return type(value) in (int, float) and 0 < value <= _MOST.get(name, sys.float_info.max)


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

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is written after ``step``."""
        if self.save is None or not 0 < step <= self.last_step:
            return False
        return step == self.last_step or (
            self.save_every is not None and step % self.save_every == 0
        )


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``train``. An option of TrainConfig that isn't given is None."""
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
    for title, options in _option_groups().items():
        group = parser.add_argument_group(title)
        for name, settings in options.items():
            group.add_argument(name, **settings)
    return parser


def _option_groups() -> dict[str, dict[str, dict[str, Any]]]:
    """For each title in the help: the options, and what ``add_argument`` takes for each."""
    default = TrainConfig()
    return {
        "model": {
            "--layers": _option(_positive_int, f"blocks ({default.layers})"),
            "--dim": _option(_positive_int, f"width ({default.dim})"),
            "--heads": _option(_positive_int, f"attention heads ({default.heads})"),
            "--seq": _option(_positive_int, f"bytes a sequence ({default.seq})"),
        },
        "training": {
            "--batch": _option(_positive_int, f"sequences a step and rank ({default.batch})"),
            "--steps": _option(_positive_int, f"steps in all ({default.steps})"),
            "--lr": _option(_positive_float, f"highest learning rate of AdamW ({default.lr:g})"),
            "--seed": _option(_seed, f"of the weights and the batches ({default.seed})"),
            "--stop-after": _option(
                _positive_int,
                "end after this step; the learning rate's schedule still spans --steps",
                metavar="STEP",
            ),
        },
        "communication": {
            "--hook": _option(
                str,
                f"a hook of the library such as {default.hook}, {NO_HOOK} for plain DDP, "
                f"or FILE.py:NAME ({default.hook})",
            ),
            "--bucket-cap-mb": _option(
                _at_most(_MOST["bucket_cap_mb"], _positive_float),
                f"DDP's buckets ({default.bucket_cap_mb:g})",
            ),
            "--ranks": _option(
                _positive_int, f"ranks to launch, at most {MOST_RANKS} ({default.ranks})"
            ),
            "--timeout": _option(
                _at_most(_MOST["timeout"], _positive_float),
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
                _at_most(_MOST["threads"], _positive_int),
                "threads a rank on the CPU (cores // ranks)",
            ),
        },
        "data": {
            "--data": _option(
                str,
                "text to train on (the sources of Python's standard library)",
                nargs="+",
                metavar="FILE",
            ),
            "--data-cap-mb": _option(
                _at_most(_MOST["data_cap_mb"], _positive_float),
                "the most text to use (16 of the standard library, all of --data)",
                metavar="MB",
            ),
        },
        "results": {
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
            "--save-every": _option(_positive_int, "and after every N steps", metavar="N"),
            "--resume": _option(Path, "go on from a checkpoint", metavar="PATH"),
            "--log-every": _option(
                _positive_int,
                "steps between lines where stdout is no terminal (a line for each 5 %%)",
                metavar="N",
            ),
        },
    }


def _option(kind: Callable[[str], Any], text: str, **more: Any) -> dict[str, Any]:
    """What ``add_argument`` takes for an option with a value of ``kind``."""
    return {"type": kind, "help": text, **more}


def parse_options(argv: Sequence[str], place: Place | None = None) -> TrainOptions:
    """Read and check the options; ends the process with one line and exit code 2 on an error.

    Args:
        argv: the arguments after ``train``.
        place: of this process in the world that is there, None where it is to launch one.
    """
    parser = build_parser()
    args = parser.parse_args(list(argv))
    try:
        options = _resolve(args, place)
        if place is None or (place.rank == 0 and place.launcher_pid is None):
            _check_outputs(options)  # once, where it will be written
        return options
    except (OptionError, HookExpressionError, DataError) as error:
        parser.error(str(error))


class OptionError(ValueError):
    """Options that are wrong together, in one sentence."""


def _resolve(args: argparse.Namespace, place: Place | None) -> TrainOptions:
    given = {
        f.name: getattr(args, f.name)
        for f in fields(TrainConfig)
        if getattr(args, f.name) is not None
    }
    if "data" in given:
        given["data"] = tuple(given["data"])
    if place is not None:
        if given.get("ranks", place.size) != place.size:
            raise OptionError(
                f"argument --ranks: must be the {place.size} of the world that is there, "
                f"got {given['ranks']}"
            )
        given["ranks"] = place.size
    notes: tuple[str, ...] = ()
    base = TrainConfig()
    saved_step = 0
    if args.resume is not None:
        base, saved_step, notes = _base_from_checkpoint(args.resume, given)
    config = replace(base, **given)
    if place is None:
        notes += _check_ranks(config.ranks, chosen="ranks" in given, device=args.device)
    _check_config(config)
    _check_steps(args, config, saved_step)
    if config.hook.strip().lower() == NO_HOOK and args.compare:
        raise OptionError(f"argument --compare: compares --hook with {NO_HOOK}: give another hook")
    if args.save_every is not None and args.save is None:
        raise OptionError("argument --save-every: needs --save PATH")
    _check_device(args, config.ranks if place is None else place.local_size)
    last_step = config.steps if args.stop_after is None else args.stop_after
    out = Path(time.strftime("runs/%Y%m%d-%H%M%S")) if args.out is None else args.out
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
    from torch_commhook.cli.checkpoint import CheckpointError, read_checkpoint

    try:
        checkpoint = read_checkpoint(path)
        saved = _saved_config(path, checkpoint)
    except CheckpointError as error:
        raise OptionError(f"argument --resume: {error}") from error
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
        if name == "ranks" and checkpoint.has_hook_state:
            raise OptionError(
                f"argument {option}: the checkpoint {path} holds the hook's state of {was} ranks, "
                f"which is each rank's own; resume with {was} ranks, got {value}"
            )
        if name == "hook" and checkpoint.has_hook_state:
            notes.append(f"the state of the hook {was} in {path} is not used")
        notes.append(f"{option} is {value}, it was {was} in {path}: not the same run any more")
    return saved, checkpoint.step, tuple(notes)


def _saved_config(path: Path, checkpoint: Checkpoint) -> TrainConfig:
    """The configuration of ``checkpoint``, whose tensors suit it.

    Raises:
        CheckpointError: it is none, or the weights or the optimizer's state don't suit it.
    """
    from torch_commhook.cli.checkpoint import CheckpointError, check_fits
    from torch_commhook.cli.transformer import ByteTransformer

    try:
        saved = TrainConfig.from_plain(checkpoint.config)
        if saved.layers > len(checkpoint.model):  # no such model is made, it may be a huge one
            raise ValueError(f"it has no weights for {saved.layers} layers")
        embedding = checkpoint.model.get("embedding.weight")
        if embedding is None or embedding.shape[1:] != (saved.dim,):
            raise ValueError(f"it has no embedding of dim {saved.dim}")
        model = ByteTransformer(saved.layers, saved.dim, saved.heads)
        check_fits(checkpoint, model, model.parameter_groups())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return saved


def _check_ranks(ranks: int, chosen: bool, device: str) -> tuple[str, ...]:
    """A note where the ranks that a user chose have to share cores."""
    if ranks > MOST_RANKS:
        raise OptionError(f"argument --ranks: must be at most {MOST_RANKS}, got {ranks}")
    cores = available_cores()
    if ranks <= cores or not chosen or device == "cuda":
        return ()
    return (f"{ranks} ranks share {cores} core{'s' if cores > 1 else ''}",)


def _check_outputs(options: TrainOptions) -> None:
    try:
        check_results(options.out)
    except OutputError as error:
        raise OptionError(f"argument --out: {error}") from error
    if options.save is None:
        return
    try:
        check_checkpoint(checkpoint_path(options.save, options.last_step))
        ranks = options.config.ranks
        check_apart(options.save, options.last_step, options.saves_at, options.out, ranks)
    except OutputError as error:
        raise OptionError(f"argument --save: {error}") from error


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
    cap = config.cap_bytes
    if config.data_cap_mb is not None and cap is not None and cap <= config.seq:
        raise OptionError(
            f"argument --data-cap-mb: must be more than a sequence ({config.seq} bytes), "
            f"got {config.data_cap_mb:g} ({cap} bytes)"
        )
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


def _check_device(args: argparse.Namespace, local_ranks: int) -> None:
    if args.device == "cpu" and args.backend == "nccl":
        raise OptionError("argument --backend: nccl needs --device cuda, got cpu")
    if args.device != "cuda" and args.backend != "nccl":
        return
    import torch

    gpus = torch.cuda.device_count()
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
    value = _number(text, int, "a whole number")
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _positive_float(text: str) -> float:
    value = _number(text, float, "a number")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0 and finite, got {text}")
    return value


def _at_most(most: int, kind: Callable[[str], _Number]) -> Callable[[str], _Number]:
    def read(text: str) -> _Number:
        value = kind(text)
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {text}")
        return value

    return read


def _seed(text: str) -> int:
    value = _number(text, int, "a whole number")
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2**63 - 1, got {value}")
    return value


def _number(text: str, kind: Callable[[str], _Number], what: str) -> _Number:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}") from None
