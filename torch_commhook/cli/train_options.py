"""The options of ``train``: its command line, completed from a checkpoint and checked."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.option_types import at_most, number, path, positive_float, positive_int
from torch_commhook.cli.outputs import (
    EVENTS,
    LOGS,
    METRICS,
    PLAIN_METRICS,
    PLOT,
    SUMMARY,
    LogError,
    OutputError,
    check_apart,
    check_file,
    check_logs,
    check_results,
    checkpoint_path,
    metrics_name,
)
from torch_commhook.cli.place import Place, checks_outputs
from torch_commhook.cli.text_model import DataError, read_text
from torch_commhook.cli.train_config import (
    MEMORY_FIELDS,
    MODEL_FIELDS,
    MOST,
    MOST_RANKS,
    PARALLEL,
    ShardedOptionError,
    TrainConfig,
    check_sharded,
    is_no_hook,
    option_of,
    resolve_sharded,
)
from torch_commhook.hooks.expressions import (
    NO_HOOK,
    HookExpressionError,
    check_hook,
    is_file_reference,
)
from torch_commhook.wording import pluralize

if TYPE_CHECKING:
    from torch_commhook.cli.checkpoint import Checkpoint


# ---- the options of train: completes them from a checkpoint, and checks them together ------------


@dataclass(frozen=True)
class TrainOptions:
    """The configuration of a run, and the options that do not change its numbers.

    Attributes:
        config: the configuration of the first run.
        out: the folder of the results.
        save: the path of checkpoints, in which ``{step}`` stands for the step; None for none.
        save_every: the steps between checkpoints; None for one at the end.
        resume: the checkpoint to continue from.
        stop_after: the last step of this run, if that is not the last of the schedule.
        compare: the configurations of the further runs.
        logs: the logs of the steps, as ``--log`` names them.
        log_every: the steps between lines on a stdout that is no terminal.
        timeout, device, backend, threads: as in :class:`torch_commhook.cli.world.WorldOptions`.
        notes: remarks to print before the run.
    """

    config: TrainConfig
    out: Path
    save: Path | None
    save_every: int | None
    resume: Path | None
    stop_after: int | None
    compare: tuple[TrainConfig, ...]
    logs: tuple[str, ...]
    log_every: int
    timeout: float
    device: str
    backend: str
    threads: int
    notes: tuple[str, ...] = field(default=())

    @property
    def last_step(self) -> int:
        """The last step of this run; the learning rate's schedule spans ``config.steps``."""
        return self.config.steps if self.stop_after is None else self.stop_after

    @property
    def result_names(self) -> tuple[str, ...]:
        """The files that the runs write into :attr:`out`, without the ranks' logs."""
        others = [
            metrics_name(number, is_plain=config.is_plain)
            for number, config in enumerate(self.compare, start=1)
        ]
        return tuple(dict.fromkeys((METRICS, PLAIN_METRICS, *others, SUMMARY, PLOT)))

    def saves_at(self, step: int) -> bool:
        """Whether the run writes a checkpoint after ``step``."""
        if self.save is None or not 0 < step <= self.last_step:
            return False
        return step == self.last_step or (
            self.save_every is not None and step % self.save_every == 0
        )


def parse_options(argv: Sequence[str], place: Place | None = None) -> TrainOptions:
    """Read and check the options; ends the process with one line and exit code 2 on an error.

    Args:
        argv: the arguments after ``train``.
        place: this rank's place; None if the process launches the ranks.
    """
    parser = build_parser()
    args = parser.parse_args(list(argv))
    try:
        out = Path(time.strftime("runs/%Y%m%d-%H%M%S")) if args.out is None else args.out
        if checks_outputs(place):  # before checks that take longer
            _check_results(out, (METRICS, SUMMARY, PLOT), args.log)
        options = _resolve(args, place, out)
        if checks_outputs(place):
            _check_outputs(options)
        return options
    except (OptionError, ShardedOptionError, HookExpressionError, DataError) as error:
        parser.error(str(error))


class OptionError(ValueError):
    """Options are wrong together. The message is one sentence that names one of them."""


def _resolve(args: argparse.Namespace, place: Place | None, out: Path) -> TrainOptions:
    given = {
        f.name: getattr(args, f.name)
        for f in fields(TrainConfig)
        if getattr(args, f.name) is not None
    }
    for name in ("data", "bucket_cap_mb"):
        if name in given:
            given[name] = tuple(given[name])
    for name in ("shard_hook", "weights"):
        if name in given and is_no_hook(given[name]):
            given[name] = None
    others = [text.strip() for text in args.compare or () if not is_no_hook(text)]
    hook_option = "--hook"
    if others and "hook" not in given and args.resume is None:
        given["hook"], hook_option = others.pop(0), "--compare"
    if place is not None:
        check_world_size(given.get("ranks"), place)
        given["ranks"] = place.size
    notes: tuple[str, ...] = ()
    base = TrainConfig()
    saved_step = 0
    if args.resume is not None:
        base, saved_step, notes = _base_from_checkpoint(args.resume, given)
    config = resolve_sharded(replace(base, **given), given)
    compare = () if args.compare is None else _compared(config, others)
    if place is None:
        notes += _check_ranks(config.ranks, chosen="ranks" in given, device=args.device)
    _check_config(config, hook_option)
    for other in compare:
        _check_hooks(other, "--compare")
    last_step = config.steps if args.stop_after is None else args.stop_after
    _check_steps(args, config, last_step, saved_step)
    if args.save_every is not None and args.save is None:
        raise OptionError("argument --save-every: needs --save PATH")
    check_device(args, config.ranks if place is None else place.local_size)
    return TrainOptions(
        config=config,
        out=out,
        save=args.save,
        save_every=args.save_every,
        resume=args.resume,
        stop_after=args.stop_after,
        compare=compare,
        logs=tuple(dict.fromkeys(args.log)),
        log_every=args.log_every or max(1, (last_step - saved_step) // 20),
        timeout=args.timeout,
        device=args.device,
        backend=args.backend,
        threads=args.threads or max(1, available_cores() // config.ranks),
        notes=notes,
    )


def _compared(config: TrainConfig, others: Sequence[str]) -> tuple[TrainConfig, ...]:
    """The configurations of the further runs: with each other hook, and without a hook.

    Raises:
        OptionError: there is no other run, or a hook occurs twice.
    """
    named = [*others, config.hook.strip()]
    twice = next((hook for hook in others if named.count(hook) > 1), None)
    if twice is not None:
        raise OptionError(f"argument --compare: the hook {twice} is there twice")
    if config.is_plain and not others:
        raise OptionError(f"argument --compare: compares --hook with {NO_HOOK}: give another hook")
    found = [replace(config, hook=hook) for hook in others]
    if not config.is_plain:
        found.append(replace(config, hook=NO_HOOK, shard_hook=None, weights=None))
    return tuple(found)


def _base_from_checkpoint(
    path: Path, given: Mapping[str, Any]
) -> tuple[TrainConfig, int, tuple[str, ...]]:
    from torch_commhook.cli.checkpoint import CheckpointError, read_checkpoint

    try:
        checkpoint = read_checkpoint(path)
        saved = _saved_config(path, checkpoint)
    except CheckpointError as error:
        raise OptionError(f"argument --resume: {error}") from error
    for name in ("hook", "shard_hook"):
        hook = getattr(saved, name)
        if name not in given and hook is not None and is_file_reference(hook):
            raise OptionError(
                f"argument --resume: {path} names the hook {hook}, and a checkpoint must not "
                f"choose a file to run; if you trust that file, give it: {option_of(name)} {hook}"
            )
    notes: list[str] = []
    is_noted = False
    for name, value in given.items():
        was = getattr(saved, name)
        if value == was:
            continue
        option = option_of(name)
        if name in MODEL_FIELDS:
            raise OptionError(
                f"argument {option}: must be {was} as in the checkpoint {path}, got {value}"
            )
        if name == "ranks" and checkpoint.has_hook_state:
            raise OptionError(
                f"argument {option}: the checkpoint {path} holds the hook's state of {was} ranks, "
                f"one for each; resume with {was} ranks, got {value}"
            )
        if name in MEMORY_FIELDS and checkpoint.has_hook_state and not is_noted:
            is_noted = True
            notes.append(f"this run does not use the state of the hook {saved.hook} in {path}")
        notes.append(f"{option} is {value}, but was {was} in {path}: the runs differ")
    return saved, checkpoint.step, tuple(notes)


def _saved_config(path: Path, checkpoint: Checkpoint) -> TrainConfig:
    """The configuration in ``checkpoint``, after a check that the tensors fit it.

    Raises:
        CheckpointError: the configuration is wrong, or the weights or the optimizer's state do not
            fit it.
    """
    from torch_commhook.cli.checkpoint import CheckpointError, check_fits
    from torch_commhook.cli.text_model import ByteTransformer

    try:
        saved = TrainConfig.from_plain(checkpoint.config)
        if saved.layers > len(checkpoint.model):  # the model that it names may be huge
            raise ValueError(f"it has no weights for {saved.layers} layers")
        embedding = checkpoint.model.get("embedding.weight")
        if embedding is None or embedding.shape[1:] != (saved.dim,):
            raise ValueError(f"it has no embedding of dim {saved.dim}")
        model = ByteTransformer(saved.layers, saved.dim, saved.heads)
        check_fits(checkpoint, model, model.parameter_groups())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return saved


def check_world_size(ranks: int | None, place: Place) -> None:
    """Raise OptionError if ``--ranks`` is given and differs from the ranks of the launcher."""
    if ranks not in (None, place.size):
        raise OptionError(
            f"argument --ranks: must be {place.size}, the ranks of the launcher, got {ranks}"
        )


def _check_ranks(ranks: int, chosen: bool, device: str) -> tuple[str, ...]:
    """Check the ranks to launch; returns a note if the user chose more ranks than cores."""
    if ranks > MOST_RANKS:
        raise OptionError(f"argument --ranks: must be at most {MOST_RANKS}, got {ranks}")
    cores = available_cores()
    if ranks <= cores or not chosen or device == "cuda":
        return ()
    return (f"{ranks} ranks share {pluralize(cores, 'core')}",)


def _check_results(out: Path, names: Sequence[str], logs: Sequence[str]) -> None:
    try:
        check_results(out, names, [EVENTS] if "tensorboard" in logs else [])
    except OutputError as error:
        raise OptionError(f"argument --out: {error}") from error
    try:
        check_logs(logs)
    except LogError as error:
        raise OptionError(f"argument --log: {error}") from error


def _check_outputs(options: TrainOptions) -> None:
    _check_results(options.out, options.result_names, options.logs)
    if options.save is None:
        return
    try:
        check_file(checkpoint_path(options.save, options.last_step))
        check_apart(
            options.save,
            options.last_step,
            options.saves_at,
            options.out,
            options.result_names,
            options.config.ranks,
        )
    except OutputError as error:
        raise OptionError(f"argument --save: {error}") from error


def _check_config(config: TrainConfig, hook_option: str) -> None:
    if config.dim % config.heads != 0 or (config.dim // config.heads) % 2 != 0:
        raise OptionError(
            f"argument --dim: must be a multiple of 2 * heads = {2 * config.heads}, "
            f"got {config.dim}"
        )
    _check_hooks(config, hook_option)
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


def _check_hooks(config: TrainConfig, option: str) -> None:
    """Check the hook, the shard hook and the codec of the weights.

    Args:
        config: the configuration of the run.
        option: the option that gives the hook, for errors.
    """
    try:
        check_hook(config.hook)
    except HookExpressionError as error:
        raise OptionError(f"argument {option}: {error}") from error
    check_sharded(config, option)


def _check_steps(
    args: argparse.Namespace, config: TrainConfig, last_step: int, saved_step: int
) -> None:
    if args.stop_after is not None and args.stop_after > config.steps:
        raise OptionError(
            f"argument --stop-after: must be at most --steps {config.steps}, got {args.stop_after}"
        )
    name = "--steps" if args.stop_after is None else "--stop-after"
    if last_step <= saved_step:
        raise OptionError(
            f"argument {name}: must be more than the {saved_step} steps of the checkpoint "
            f"{args.resume}, got {last_step}"
        )


def check_device(args: argparse.Namespace, local_ranks: int) -> None:
    """Raise OptionError if this machine cannot run the ranks on ``--device`` and ``--backend``.

    Args:
        args: with ``device`` and ``backend``.
        local_ranks: the number of ranks on this machine.
    """
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
    """The number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- the command line of train -------------------------------------------------------------------


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
        **distribution_options(default),
        "--ranks": _option(
            positive_int, f"ranks to launch, at most {MOST_RANKS} ({default.ranks})"
        ),
        **world_options(),
    }


def distribution_options(default: TrainConfig) -> Options:
    """The options of a model's distribution over the ranks, for ``plan``, too."""
    return {
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
