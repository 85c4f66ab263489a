"""What writers get that people watch training with."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_pool


def _train_and_log(writer: object) -> None:
    from torch_commhook import attach, hooks

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 64)
    handle = attach(model, hooks.blockwise())
    for step in range(3):
        model(torch.arange(64.0)).sum().backward()
        handle.log_to(writer, step)


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
@on_pool("one_launched")
def test_tensorboard(rank: int, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        _train_and_log(writer)
    events = EventAccumulator(str(tmp_path)).Reload()
    found = [(event.step, event.value) for event in events.Scalars("commhook/steps")]
    assert found == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert "commhook/relative_error" in events.Tags()["scalars"]


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
@on_pool("one_launched")
def test_weights_and_biases(rank: int, tmp_path: Path) -> None:
    import wandb

    run = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(console="off"))
    _train_and_log(run)
    run.log({"ended": 1}, step=3)  # which sends the step before
    summary = dict(run.summary)
    run.finish()
    assert summary["commhook/steps"] == 3
    assert 0 < summary["commhook/relative_error"] < 0.01
