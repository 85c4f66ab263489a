"""``train``: trains a small transformer. The process launches the ranks, or is one of them.

A rank runs the training loop and writes the checkpoints; rank 0 also writes the report.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from torch_commhook.cli import launcher, outputs, report, text_model
from torch_commhook.cli.checkpoint import (
    Checkpoint,
    CheckpointError,
    read_checkpoint,
    to_cpu,
    write_checkpoint,
)
from torch_commhook.cli.launch_environment import LaunchEnvironment, run_ranked
from torch_commhook.cli.outputs import MATPLOTLIB_IS_MISSING, PLOT, SUMMARY
from torch_commhook.cli.text_model import ByteTransformer, TextData, Traffic, load_optimizer
from torch_commhook.cli.train_config import MEMORY_FIELDS, TrainConfig
from torch_commhook.cli.train_options import TrainOptions, parse_options
from torch_commhook.cli.world import World, join_world
from torch_commhook.collectives.agreement import agree, gather_values, packed, unpacked
from torch_commhook.wording import pluralize

_WARM_UP_STEPS = 20
_FINAL_STEPS = 20
_LOWEST_LR = 0.1
_WEIGHT_DECAY = 0.1
_GRADIENT_NORM = 1.0
_EVALUATION_BATCH = 8


class LossNotFiniteError(ArithmeticError):
    """The loss is infinite or NaN."""


def main(argv: Sequence[str]) -> int:
    """Run ``train argv``; returns the exit code. See :func:`run_ranked`."""
    return run_ranked("train", argv, parse_options, _launch, train_rank)


def _launch(argv: Sequence[str], options: TrainOptions) -> int:
    command = [sys.executable, "-m", "torch_commhook", "train", *argv, "--out", str(options.out)]
    return launcher.launch(
        command, options.config.ranks, options.out, options.threads, timeout=options.timeout
    )


def train_rank(options: TrainOptions, place: LaunchEnvironment) -> None:
    """Train as the rank at ``place``; rank 0 prints and writes the results.

    Raises:
        CheckpointError: the checkpoint of ``--resume`` is damaged, or the hook refuses its state.
        RuntimeError: another rank has ended, or does not answer within the timeout.
        LossNotFiniteError: the loss is infinite or NaN, on all ranks at the same step.
    """
    world = join_world(options, place)
    config = options.config
    text = text_model.read_text(config.data, config.cap_bytes, config.seq)
    data = text_model.split_text(text, config.seq)
    checkpoint = None if options.resume is None else read_checkpoint(options.resume)
    if world.rank == 0:
        _print_start(options, world, data, checkpoint)
    results: list[report.RunResult] = []
    for number, each in enumerate((config, *options.others)):
        own = replace(options, config=each)
        if number > 0:
            own = replace(own, save=None, save_every=None)
        results.append(_train_once(own, world, data, checkpoint, number))
        if world.rank == 0:  # after each run, in case the next one fails
            report.write_summary(options.out / SUMMARY, config.to_plain(), results)
        if results[-1].is_interrupted:
            break
    world.barrier()  # rank 0 may still write
    dist.destroy_process_group()
    if world.rank == 0:
        _print_end(options, results)


# ---- one run -------------------------------------------------------------------------------------


@dataclass
class Run:
    """The state of a run: the model, its optimizer, and the steps done with their time.

    Attributes:
        ddp: the module to call: the model in DDP, or the sharded model itself.
        handle: the hook's handle; None without a hook.
        sent_before: this rank's traffic in the runs that this run continues.
    """

    model: ByteTransformer
    ddp: nn.Module
    optimizer: torch.optim.Optimizer
    handle: Any
    step: int = 0
    seconds: float = 0.0
    sent_before: Traffic = field(default_factory=Traffic)


def _train_once(
    options: TrainOptions, world: World, data: TextData, checkpoint: Checkpoint | None, number: int
) -> report.RunResult:
    """Do run ``number``: 0 has the hook of ``--hook``, the others those of ``--compare``."""
    config = options.config
    run = prepare(config, world, checkpoint, main_run=number == 0)
    first_step, last_step, seconds_before = run.step, options.last_step, run.seconds
    plain = text_model.plain_traffic(run.model, config)
    fp32_bytes = plain.bytes_sent or 0
    records: list[report.StepRecord] = []
    saved: Path | None = None
    reporter = _start_report(options, number, run) if world.rank == 0 else None
    launcher.stop_in_order()
    try:
        while run.step < last_step:
            started = time.perf_counter()
            loss, lr, is_asked = train_step(run, config, world, data)
            run.seconds += time.perf_counter() - started
            if run.handle is None:
                sent = run.sent_before + plain.times(run.step - first_step)
            else:
                sent = run.sent_before + Traffic.of(run.handle.stats())
            record = report.StepRecord(
                step=run.step,
                loss=loss,
                lr=lr,
                seconds=round(run.seconds, 6),
                fp32_bytes=fp32_bytes * run.step,
                tokens=run.step * config.batch * config.seq * world.size,
                **vars(sent),
            )
            records.append(record)
            if reporter is not None:
                reporter.step(record)
                if len(records) == 1:
                    launcher.tell_first_step()
            if not math.isfinite(loss):
                raise LossNotFiniteError(
                    f"the loss is {loss} at step {run.step}: --lr {config.lr:g} may be too high"
                )
            if options.saves_at(run.step) or (is_asked and options.save is not None):
                saved = _save(run, options, world, data, sent) or saved
            if is_asked:
                break
    finally:
        if reporter is not None:
            reporter.close()
    is_interrupted = run.step < last_step
    on_held_out = None
    if not is_interrupted:
        if run.handle is not None:  # all ranks must evaluate the same model
            run.handle.synchronize()
        whole = text_model.whole_model(run.model, config)
        on_held_out = held_out_loss(whole, world, data, config.seq)
    steps, sent_before = run.step - first_step, run.sent_before
    final = [record.loss for record in records[-min(_FINAL_STEPS, max(1, steps // 5)) :]]
    bytes_per_step = None
    if record.bytes_sent is not None and sent_before.bytes_sent is not None:
        bytes_per_step = (record.bytes_sent - sent_before.bytes_sent) / steps
    stats = None if run.handle is None else run.handle.stats()
    if run.handle is not None and not is_interrupted:  # otherwise the ranks may be apart
        run.handle.remove()
    return report.RunResult(
        hook=config.communication,
        steps=steps,
        final_loss=sum(final) / len(final),
        final_steps=len(final),
        held_out_loss=on_held_out,
        steps_per_second=steps / (run.seconds - seconds_before),
        bytes_per_step=bytes_per_step,
        fp32_bytes_per_step=fp32_bytes,
        records=tuple(records),
        metrics=outputs.metrics_name(number, is_plain=config.is_plain),
        is_interrupted=is_interrupted,
        checkpoint=None if saved is None else str(saved),
        scattered_per_step=(record.bytes_scattered - sent_before.bytes_scattered) / steps,
        gathered_per_step=(record.bytes_gathered - sent_before.bytes_gathered) / steps,
        choice=f"{stats.choice}: {stats.reason}" if stats is not None and stats.choice else "",
    )


def _start_report(options: TrainOptions, number: int, run: Run) -> report.Reporter:
    config = options.config
    path = options.out / outputs.metrics_name(number, is_plain=config.is_plain)
    hook = config.communication
    logs = outputs.open_logs(options.log, options.out, path.stem, hook, config.to_plain(), run.step)
    line = report.make_live_line(hook, run.step, options.last_step, options.log_every)
    return report.Reporter(path, line, run.step, run.seconds, logs)


def prepare(
    config: TrainConfig, world: World, checkpoint: Checkpoint | None, main_run: bool
) -> Run:
    """Make the model and its optimizer, attach the hook, and load the checkpoint if there is one.

    Only the run of ``--hook``, the main run, also gets the checkpoint's state of the rank.
    """
    torch.manual_seed(config.seed)
    model = ByteTransformer(config.layers, config.dim, config.heads)
    if checkpoint is not None:
        model.load_state_dict(checkpoint.model)
    model.to(world.device)
    if config.parallel == "ddp":
        module: nn.Module = _in_ddp(model, config, world)
    else:
        module = model
        text_model.shard(model, config, world.device)
    run = Run(model, module, make_optimizer(model, config), text_model.attach_hook(module, config))
    if checkpoint is not None:
        _restore(run, config, world, checkpoint, main_run)
    return run


def _in_ddp(model: nn.Module, config: TrainConfig, world: World) -> DistributedDataParallel:
    """The model in DDP, after a tiny backward, by which DDP forms its last buckets.

    DDP rebuilds its buckets once, after the first step. A hook's result may depend on the buckets.
    So otherwise, the first step of a resumed run would differ from the same step of an
    uninterrupted run.
    """
    caps = list(config.bucket_cap_mb)
    sizes: dict[str, Any] = {"bucket_cap_mb": max(caps)}
    if len(caps) > 1 and "bucket_cap_mb_list" in signature(DistributedDataParallel).parameters:
        sizes = {"bucket_cap_mb_list": caps}  # before torch 2.13 all have the largest size
    ddp = DistributedDataParallel(
        model,
        device_ids=None if world.device.type == "cpu" else [world.device],
        **sizes,
        gradient_as_bucket_view=True,  # saves a copy of all gradients
    )
    byte = torch.zeros(1, 1, dtype=torch.int64, device=world.device)
    ddp(byte, byte).backward()
    ddp.zero_grad(set_to_none=True)
    return ddp


def _restore(
    run: Run, config: TrainConfig, world: World, checkpoint: Checkpoint, main_run: bool
) -> None:
    load_optimizer(run.optimizer, checkpoint.optimizer["state"])
    run.step, run.seconds = checkpoint.step, checkpoint.seconds
    if config.is_plain and not main_run:  # as if all earlier steps had been plain
        run.sent_before = text_model.plain_traffic(run.model, config).times(checkpoint.step)
        return
    run.sent_before = Traffic.of(checkpoint)
    if not main_run or world.rank >= len(checkpoint.rank_states):
        return
    saved = checkpoint.rank_states[world.rank]
    torch.set_rng_state(saved["rng"])
    was = TrainConfig.from_plain(checkpoint.config)
    same_hook = all(getattr(was, name) == getattr(config, name) for name in MEMORY_FIELDS)
    if same_hook and "optimizer" in saved:
        load_optimizer(run.optimizer, saved["optimizer"])
    if same_hook and saved["hook"] and hasattr(run.handle, "load_state_dict"):
        try:
            run.handle.load_state_dict(saved["hook"])
        except Exception as error:
            raise CheckpointError(
                f"the hook {config.hook} refuses its state in the checkpoint: {error}"
            ) from error


def make_optimizer(model: ByteTransformer, config: TrainConfig) -> torch.optim.Optimizer:
    """Make the optimizer of ``train``: AdamW, with weight decay for matrices."""
    matrices, vectors = model.parameter_groups()
    groups = [
        {"params": matrices, "weight_decay": _WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of ``step``, from 1: a linear warm-up, then a cosine down to a tenth."""
    warm_up = max(1, min(_WARM_UP_STEPS, config.steps // 10))
    progress = (step - 1) / max(1, config.steps - 1)
    cosine = _LOWEST_LR + (1 - _LOWEST_LR) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * cosine * min(1.0, step / warm_up)


def train_step(
    run: Run, config: TrainConfig, world: World, data: TextData
) -> tuple[float, float, bool]:
    """Do one step of training.

    Returns:
        The mean loss over the ranks, the learning rate, and whether a rank has been asked to stop.
        All ranks return the same.
    """
    run.step += 1
    lr = learning_rate(config, run.step)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    windows = text_model.training_batch(
        data, seed=config.seed, step=run.step, rank=world.rank, batch=config.batch, seq=config.seq
    ).to(world.device)
    loss: Tensor = run.ddp(windows[:, :-1], windows[:, 1:])
    # Started before the backward, so that the step does not wait for it.
    mean_loss = world.start_mean(loss, flag=launcher.is_asked_to_stop())
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), _GRADIENT_NORM)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    mean = mean_loss()
    return mean.value, lr, mean.flag


# ---- checkpoints ---------------------------------------------------------------------------------


def _save(
    run: Run, options: TrainOptions, world: World, data: TextData, sent: Traffic
) -> Path | None:
    """Write a checkpoint of this step. Returns its path on rank 0, and None on other ranks."""
    state: dict[str, Any] = {"rng": torch.get_rng_state()}
    if getattr(getattr(run.handle, "hook", None), "keeps_ranks_apart", False):
        state["optimizer"] = to_cpu(text_model.whole_state(run.optimizer.state_dict()["state"]))
    error = None
    try:
        hook_state = run.handle.state_dict() if hasattr(run.handle, "state_dict") else None
        state["hook"] = to_cpu(hook_state)
        unpacked(packed(state["hook"]))  # as rank 0 does
    except Exception as caught:
        error = caught
    agree(distributed_c10d._get_default_group(), "the state of the hook", error, {})
    model = text_model.whole_state(run.model.state_dict())
    optimizer = text_model.whole_state(run.optimizer.state_dict())
    states = gather_values(state, only_first=True)
    if states is None or options.save is None:
        return None
    path = outputs.checkpoint_path(options.save, run.step)
    checkpoint = Checkpoint(
        config=options.config.to_plain(),
        step=run.step,
        model=model,
        optimizer=optimizer,
        rank_states=states,
        data_fingerprint=data.fingerprint,
        seconds=run.seconds,
        **vars(sent),
    )
    try:
        write_checkpoint(path, checkpoint)
    except (OSError, RuntimeError) as error:  # torch.save raises both if the disk is full
        if run.step == options.last_step:
            raise
        said = str(error).partition("\n")[0]
        kept = f"; {path} has an earlier one" if path.exists() else ""
        print(
            f"commhook train: warning: no checkpoint of step {run.step}: {said}{kept}",
            file=sys.stderr,
            flush=True,
        )
        return None
    return path


# ---- the end of a run ----------------------------------------------------------------------------


@torch.no_grad()
def held_out_loss(model: nn.Module, world: World, data: TextData, seq: int) -> float | None:
    """The loss on the held-out text. Each rank evaluates a part of the text.

    Returns:
        The mean over the text, in nats per byte; None if no text is held out, or a rank has been
        asked to stop.
    """
    windows = text_model.held_out_windows(data, rank=world.rank, world_size=world.size, seq=seq)
    # The sum of losses, the number of windows, and the number of ranks that were asked to stop.
    total = torch.zeros(3, dtype=torch.float64, device=world.device)
    for part in windows.split(_EVALUATION_BATCH):
        if launcher.is_asked_to_stop():
            total[2] = 1
            break
        if len(part) > 0:
            part = part.to(world.device)
            total[0] += model(part[:, :-1], part[:, 1:]).double() * len(part)
            total[1] += len(part)
    dist.all_reduce(total)
    return None if total[1] == 0 or total[2] > 0 else (total[0] / total[1]).item()


def _print_start(
    options: TrainOptions, world: World, data: TextData, checkpoint: Checkpoint | None
) -> None:
    config = options.config
    where = f"{world.backend} on {world.device.type}"
    if world.device.type == "cpu":
        where += f", {pluralize(options.threads, 'thread')} each"
    text = "the standard library" if config.data is None else ", ".join(config.data)
    ranks = pluralize(world.size, "rank")
    if config.parallel == "fsdp":
        ranks = f"in shards on {ranks}"
    elif config.parallel == "hsdp":
        ranks = f"in {config.replicas} replicas of {config.shard_ranks} shards on {ranks}"
    print(
        f"{_parameters(config)}, {ranks} ({where}), hook {config.communication}, "
        f"{report.format_bytes(len(data))} of {text}, results in {options.out}",
        flush=True,
    )
    if options.others:
        others = ", then ".join(each.communication for each in options.others)
        print(f"then, for comparison: {others}", flush=True)
    if checkpoint is not None:
        print(f"continuing from step {checkpoint.step} of {options.resume}", flush=True)
        if checkpoint.data_fingerprint != data.fingerprint:
            print("note: the text differs from that of the checkpoint", file=sys.stderr)


def _parameters(config: TrainConfig) -> str:
    with torch.device("meta"):
        count = ByteTransformer(config.layers, config.dim, config.heads).parameter_count()
    return f"{count / 1e6:.2f} M parameters"


def _print_end(options: TrainOptions, results: list[report.RunResult]) -> None:
    config, out = options.config, options.out
    print(f"\n{report.format_table(results)}\n")
    print(report.format_final_loss(results[0]), flush=True)
    for result in results:
        if result.choice:
            print(f"{result.hook} averaged with {result.choice}", flush=True)
    how = "" if config.parallel == "ddp" else f", {config.parallel}"
    ranks = pluralize(config.ranks, "rank")
    title = f"byte-level transformer, {_parameters(config)}, {ranks}{how}"
    if not report.draw_loss(out / PLOT, results, title):
        print(f"no {PLOT}: {MATPLOTLIB_IS_MISSING}")
    last = results[-1]
    if last.is_interrupted:
        which = f" of the run with hook {last.hook}" if len(results) > 1 else ""
        print(f"interrupted at step {last.records[-1].step} of {options.last_step}{which}")
    if results[0].checkpoint is not None:
        print(f"checkpoint: {results[0].checkpoint}")
    print(f"results: {out}", flush=True)
