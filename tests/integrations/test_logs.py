"""What writers get that people watch training with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched_ranks import LaunchedRanks


def _train_and_log(writer: object) -> None:
    from torch_commhook import attach, hooks

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 64)
    handle = attach(model, hooks.blockwise())
    for step in range(3):
        model(torch.arange(64.0)).sum().backward()
        handle.log_to(writer, step)


def _on_tensorboard(rank: int, folder: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        _train_and_log(writer)


def test_tensorboard(one_launched: LaunchedRanks, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    one_launched.run(_on_tensorboard, str(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("commhook/steps")] == [
        (0, 1.0),
        (1, 2.0),
        (2, 3.0),
    ]
    assert "commhook/relative_error" in events.Tags()["scalars"]


def _in_a_run(rank: int, folder: str) -> dict[str, float]:
    import wandb

    run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(console="off"))
    _train_and_log(run)
    run.log({"ended": 1}, step=3)  # which sends the step before
    summary = json.loads(json.dumps(dict(run.summary), default=float))
    run.finish()
    return summary


def test_weights_and_biases(one_launched: LaunchedRanks, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (summary,) = one_launched.run(_in_a_run, str(tmp_path))
    assert summary["commhook/steps"] == 3
    assert 0 < summary["commhook/relative_error"] < 0.01
