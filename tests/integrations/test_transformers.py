"""Hooks in the Trainer of transformers, against a plain loop."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_training import (
    BATCH,
    HOOK,
    STEPS,
    WAYS,
    Data,
    Net,
    Trained,
    loop,
    shard_on_cpu,
    sharded,
)
from launched_ranks import LaunchedRanks

pytest.importorskip("transformers")


def _trainer(
    way: str, hook: str | None, folder: str, rank: int, *, find_unused: bool = False
) -> Any:
    from transformers import Trainer, TrainingArguments

    from torch_commhook.integrations.transformers import CommHookTrainerCallback

    class Ordered(Trainer):
        """Takes each rank's own examples, in their order."""

        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=BATCH)

    how = WAYS[way]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=how.accumulate,
        bf16=how.bf16,
        max_grad_norm=how.clip or 0.0,
        save_steps=3,
        logging_steps=2,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_find_unused_parameters=find_unused,  # else True for models that are not its own
    )
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Ordered(
        model,
        arguments,
        train_dataset=Data(rank, STEPS * how.accumulate),
        callbacks=[] if hook is None else [CommHookTrainerCallback(hook)],
        optimizers=(optimizer, None),
    )


def _trained(trainer: Any, **fit: Any) -> Trained:
    from torch_commhook.integrations.transformers import CommHookTrainerCallback

    trainer.train(**fit)
    callbacks = trainer.callback_handler.callbacks
    own = [each for each in callbacks if isinstance(each, CommHookTrainerCallback)]
    return Trained.of(trainer.model, own[0].handle if own else None)


def _as_a_loop(rank: int, way: str, folder: str) -> list[bool]:
    trained = _trained(_trainer(way, HOOK, folder, rank))
    expected = loop(rank, WAYS[way])
    without = _trained(_trainer(way, None, folder, rank))
    return [
        trained.is_same(expected),
        trained.bytes_sent == expected.bytes_sent != 0,
        not without.is_same(trained),
    ]


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer(launched: LaunchedRanks, way: str, tmp_path: Path) -> None:
    assert launched.run(_as_a_loop, way, str(tmp_path)) == [[True] * 3] * 2


def _in_shards(rank: int, folder: str) -> list[bool]:
    trainer = _trainer("plain", HOOK, folder, rank)
    shard_on_cpu()
    trainer.is_fsdp_enabled = True
    trainer.args.save_strategy = "no"
    trained = _trained(trainer)
    expected = loop(rank, WAYS["plain"], wrap=sharded)
    return [trained.is_same(expected), trained.bytes_sent == expected.bytes_sent != 0]


def test_shards(launched: LaunchedRanks, tmp_path: Path) -> None:
    assert launched.run(_in_shards, str(tmp_path)) == [[True] * 2] * 2


def _resumed(rank: int, hook: str, folder: str) -> list[bool]:
    """DDP keeps its first buckets where some parameters may be unused."""
    first = _trainer("plain", hook, folder, rank, find_unused=True)
    straight = _trained(first)
    checkpoint = f"{folder}/checkpoint-3"
    second = _trainer("plain", hook, folder, rank, find_unused=True)
    resumed = _trained(second, resume_from_checkpoint=checkpoint)
    state = torch.load(f"{checkpoint}/commhook.pt", weights_only=True)
    logged = [entry for entry in first.state.log_history if "commhook/bytes_sent" in entry]
    return [resumed.is_same(straight), {"rank0", "rank1"} <= state.keys(), len(logged) >= 3]


@pytest.mark.parametrize("hook", [HOOK, "error_feedback(topk(0.1))"])
def test_a_checkpoint(launched: LaunchedRanks, hook: str, tmp_path: Path) -> None:
    assert launched.run(_resumed, hook, str(tmp_path)) == [[True] * 3] * 2


def _without_state(rank: int, folder: str) -> str:
    _trained(_trainer("plain", None, folder, rank))
    try:
        _trained(_trainer("plain", HOOK, folder, rank), resume_from_checkpoint=True)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_checkpoint_without_a_state(launched: LaunchedRanks, tmp_path: Path) -> None:
    for error in launched.run(_without_state, str(tmp_path)):
        assert "has no commhook.pt to go on from; give resume_from=" in error


def _in_two(rank: int, folder: str) -> str:
    trainer = _trainer("plain", HOOK, folder, rank)
    other = torch.nn.parallel.DistributedDataParallel(trainer.model)
    try:
        _trained(trainer)
    except RuntimeError as error:
        return str(error)
    return f"no error, {type(other)}"


def test_a_model_in_two_ddps(launched: LaunchedRanks, tmp_path: Path) -> None:
    for error in launched.run(_in_two, str(tmp_path)):
        assert "the model is in several DistributedDataParallel" in error


def _alone(rank: int, folder: str) -> list[str]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # as without torchrun
        del os.environ[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trained(_trainer("plain", HOOK, folder, rank))
    return [str(each.message) for each in caught]


def test_one_process(one_launched: LaunchedRanks, tmp_path: Path) -> None:
    (said,) = one_launched.run(_alone, str(tmp_path))
    assert any("training runs in one process" in each for each in said)
