"""The options of ``train``: its command line, completed from a checkpoint and checked."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torch_commhook.cli import outputs
from torch_commhook.cli.checkpoint import Checkpoint, CheckpointError, check_fits, read_checkpoint
from torch_commhook.cli.launch_environment import LaunchEnvironment, checks_outputs
from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.option_types import (
    OptionError,
    WorldOptions,
    add_options,
    given_fields,
    of_option,
    option,
    option_of,
    path,
    positive_int,
)
from torch_commhook.cli.outputs import EVENTS, LOGS, METRICS, PLAIN_METRICS, PLOT, SUMMARY
from torch_commhook.cli.text_model import ByteTransformer, read_text
from torch_commhook.cli.train_config import (
    MEMORY_FIELDS,
    MODEL_FIELDS,
    MOST_RANKS,
    TrainConfig,
    check_hooks,
    is_no_hook,
    resolve_sharded,
)
from torch_commhook.hooks.expressions import NO_HOOK, is_file_reference
from torch_commhook.wording import pluralize

_result = partial(option, group="results")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(WorldOptions):
    """The configuration of a run, and the options that do not change its numbers.

    Attributes:
        config: the configuration of the first run.
        others: the configurations of the further runs.
    """

    config: TrainConfig = TrainConfig()
    others: tuple[TrainConfig, ...] = ()
    stop_after: int | None = option(
        positive_int,
        "end after this step; the learning rate's schedule still spans --steps",
        group="training",
        metavar="STEP",
    )
    compare: tuple[str, ...] | None = _result(
        str,
        "train again with each HOOK, and without a hook; print a table, and draw all curves into "
        "one picture. Without --hook, the first run takes the first HOOK",
        nargs="*",
        metavar="HOOK",
    )
    out: Path = _result(
        path, f"folder for {METRICS}, {SUMMARY} and {PLOT}", shown="runs/DATE-TIME", metavar="DIR"
    )
    log: tuple[str, ...] = _result(
        str,
        f"logs for the numbers of each step: jsonl is {METRICS}, which train always writes; "
        f"tensorboard and wandb need the packages of these names. Event files go to {EVENTS} in "
        "the folder of --out",
        ("jsonl",),
        choices=LOGS,
        nargs="+",
    )
    save: Path | None = _result(
        path,
        "write a checkpoint at the end; {step} in the path stands for the step",
        metavar="PATH",
    )
    save_every: int | None = _result(
        positive_int, "also write one after every N steps", metavar="N"
    )
    resume: Path | None = _result(path, "continue from a checkpoint", metavar="PATH")
    log_every: int = _result(
        positive_int,
        "steps between printed lines if stdout is no terminal",
        shown="a line for each 5 %%",
        metavar="N",
    )

    @property
    def last_step(self) -> int:
        """The last step of this run; the learning rate's schedule spans ``config.steps``."""
        return self.config.steps if self.stop_after is None else self.stop_after

    @property
    def result_names(self) -> tuple[str, ...]:
        """The files that the runs write into :attr:`out`, without the ranks' logs."""
        others = [
            outputs.metrics_name(number, is_plain=config.is_plain)
            for number, config in enumerate(self.others, start=1)
        ]
        return tuple(dict.fromkeys((METRICS, PLAIN_METRICS, *others, SUMMARY, PLOT)))

    def saves_at(self, step: int) -> bool:
        """Whether the run writes a checkpoint after ``step``."""
        if self.save is None or not 0 < step <= self.last_step:
            return False
        return step == self.last_step or (
            self.save_every is not None and step % self.save_every == 0
        )


def build_parser() -> OneLineParser:
    """Build the parser of ``train``."""
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
    add_options(parser, TrainConfig, WorldOptions, TrainOptions)
    return parser


def parse_options(argv: Sequence[str], place: LaunchEnvironment | None = None) -> TrainOptions:
    """Read and check the options; ends the process with one line and exit code 2 on an error.

    ``place`` is this rank's place, or None if the process launches the ranks.
    """
    parser = build_parser()
    given = vars(parser.parse_args(list(argv)))
    given.setdefault("out", Path(time.strftime("runs/%Y%m%d-%H%M%S")))
    options = TrainOptions(**given_fields(given, TrainOptions))
    try:
        if checks_outputs(place):  # before checks that take longer
            _check_results(options, (METRICS, SUMMARY, PLOT))
        options = _resolve(options, given_fields(given, TrainConfig), place)
        if checks_outputs(place):
            _check_outputs(options)
    except OptionError as error:
        parser.error(str(error))
    return options


def _resolve(
    options: TrainOptions, given: dict[str, Any], place: LaunchEnvironment | None
) -> TrainOptions:
    """Complete the options by those of the configuration that are ``given``, and check all."""
    for name in ("shard_hook", "weights"):
        if name in given and is_no_hook(given[name]):
            given[name] = None
    others = [text.strip() for text in options.compare or () if not is_no_hook(text)]
    hook_option = "--hook"
    if others and "hook" not in given and options.resume is None:
        given["hook"], hook_option = others.pop(0), "--compare"
    if place is not None:
        check_world_size(given.get("ranks"), place)
        given["ranks"] = place.size
    notes: tuple[str, ...] = ()
    base = TrainConfig()
    saved_step = 0
    if options.resume is not None:
        base, saved_step, notes = _base_from_checkpoint(options.resume, given)
    config = resolve_sharded(replace(base, **given), given)
    compared = () if options.compare is None else _compared(config, others)
    if place is None and config.ranks > MOST_RANKS:
        raise OptionError(f"argument --ranks: must be at most {MOST_RANKS}, got {config.ranks}")
    cores = available_cores()
    if place is None and "ranks" in given and config.ranks > cores and options.device != "cuda":
        notes += (f"{config.ranks} ranks share {pluralize(cores, 'core')}",)
    _check_config(config, hook_option)
    for other in compared:
        check_hooks(other, "--compare")
    options = replace(
        options,
        config=config,
        others=compared,
        log=tuple(dict.fromkeys(options.log)),
        threads=options.threads or max(1, cores // config.ranks),
        notes=notes,
    )
    _check_steps(options, saved_step)
    check_device(options, config.ranks if place is None else place.local_size)
    every = options.log_every or max(1, (options.last_step - saved_step) // 20)
    return replace(options, log_every=every)


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
    with of_option("--resume"):
        checkpoint = read_checkpoint(path)
        saved = _saved_config(path, checkpoint)
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
    try:
        saved = TrainConfig.from_plain(checkpoint.config)
        if saved.layers > len(checkpoint.model):  # to build them would take long
            raise ValueError(f"it has no weights for {saved.layers} layers")
        with torch.device("meta"):  # the model that it names may be huge
            model = ByteTransformer(saved.layers, saved.dim, saved.heads)
        check_fits(checkpoint, model, model.parameter_groups())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return saved


def check_world_size(ranks: int | None, place: LaunchEnvironment) -> None:
    """Raise OptionError if ``--ranks`` is given and differs from the ranks of the launcher."""
    if ranks not in (None, place.size):
        raise OptionError(
            f"argument --ranks: must be {place.size}, the ranks of the launcher, got {ranks}"
        )


def _check_results(options: TrainOptions, names: Sequence[str]) -> None:
    with of_option("--out"):
        folders = [EVENTS] if "tensorboard" in options.log else []
        outputs.check_results(options.out, names, folders)
    for log in options.log:
        if log != "jsonl" and not outputs.is_installed(log):
            raise OptionError(f"argument --log: {log} needs the package {log}: pip install {log}")


def _check_outputs(options: TrainOptions) -> None:
    _check_results(options, options.result_names)
    if options.save is not None:
        with of_option("--save"):
            outputs.check_file(outputs.checkpoint_path(options.save, options.last_step))
            names, ranks = options.result_names, options.config.ranks
            outputs.check_apart(options.save, options.last_step, options.out, names, ranks)


def _check_config(config: TrainConfig, hook_option: str) -> None:
    if config.dim % config.heads != 0 or (config.dim // config.heads) % 2 != 0:
        raise OptionError(
            f"argument --dim: must be a multiple of 2 * heads = {2 * config.heads}, "
            f"got {config.dim}"
        )
    check_hooks(config, hook_option)
    cap = config.cap_bytes
    if config.data_cap_mb is not None and cap is not None and cap <= config.seq:
        raise OptionError(
            f"argument --data-cap-mb: must be more than a sequence ({config.seq} bytes), "
            f"got {config.data_cap_mb:g} ({cap} bytes)"
        )
    with of_option("--data"):
        read_text(config.data, config.cap_bytes, config.seq)


def _check_steps(options: TrainOptions, saved_step: int) -> None:
    most, last_step = options.config.steps, options.last_step
    if last_step > most:
        raise OptionError(f"argument --stop-after: must be at most --steps {most}, got {last_step}")
    name = "--steps" if options.stop_after is None else "--stop-after"
    if last_step <= saved_step:
        raise OptionError(
            f"argument {name}: must be more than the {saved_step} steps of the checkpoint "
            f"{options.resume}, got {last_step}"
        )
    if options.save_every is not None and options.save is None:
        raise OptionError("argument --save-every: needs --save PATH")


def check_device(options: WorldOptions, local_ranks: int) -> None:
    """Raise OptionError if this machine cannot run so many ranks on its devices."""
    if options.device == "cpu" and options.backend == "nccl":
        raise OptionError("argument --backend: nccl needs --device cuda, got cpu")
    if options.device != "cuda" and options.backend != "nccl":
        return
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise OptionError("argument --device: torch sees no CUDA GPU")
    if local_ranks > gpus and options.backend != "gloo":
        raise OptionError(
            f"argument --ranks: NCCL needs a GPU for each rank, got {local_ranks} ranks and "
            f"{gpus} GPU; give --ranks {gpus}, or --backend gloo to share it"
        )


def available_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))
