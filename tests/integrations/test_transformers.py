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
    assert_as_a_loop,
    loop,
    shard_on_cpu,
    sharded,
)
from on_ranks import on_pool

pytest.importorskip("transformers")

on_launched = on_pool("launched")


def _trainer(
    rank: int,
    folder: Path,
    hook: str | None = HOOK,
    way: str = "plain",
    *,
    find_unused: bool = False,
    best: bool = False,
    **options: Any,
) -> Any:
    from transformers import Trainer, TrainingArguments

    from torch_commhook.integrations.transformers import CommHookTrainerCallback

    class Ordered(Trainer):
        """Takes each rank's own examples, in their order."""

        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=BATCH)

    how = WAYS[way]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=how.accumulate,
        bf16=how.bf16,
        max_grad_norm=how.clip or 0.0,
        save_steps=2 if best else 3,
        load_best_model_at_end=best,
        eval_strategy="steps" if best else "no",
        eval_steps=2,
        greater_is_better=False if best else None,
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
        eval_dataset=Data(0, 1),
        callbacks=[] if hook is None else [CommHookTrainerCallback(hook, **options)],
        optimizers=(optimizer, None),
    )


def _callback(trainer: Any) -> Any:
    """The callback with the hook; None without one."""
    from torch_commhook.integrations.transformers import CommHookTrainerCallback

    callbacks = trainer.callback_handler.callbacks
    return next((each for each in callbacks if isinstance(each, CommHookTrainerCallback)), None)


def _trained(trainer: Any, **fit: Any) -> Trained:
    trainer.train(**fit)
    callback = _callback(trainer)
    return Trained.of(trainer.model, None if callback is None else callback.handle)


@pytest.mark.parametrize("way", WAYS)
@on_launched
def test_a_trainer(rank: int, way: str, tmp_path: Path) -> None:
    assert_as_a_loop(rank, lambda hook: _trained(_trainer(rank, tmp_path, hook, way)), way)


@on_launched
def test_shards(rank: int, tmp_path: Path) -> None:
    def train(hook: str | None) -> Trained:
        trainer = _trainer(rank, tmp_path, hook)
        shard_on_cpu()
        trainer.is_fsdp_enabled = True
        trainer.args.save_strategy = "no"
        return _trained(trainer)

    assert_as_a_loop(rank, train, wrap=sharded)


@pytest.mark.parametrize("hook", [HOOK, "error_feedback(topk(0.1))"])
@on_launched
def test_a_checkpoint(rank: int, hook: str, tmp_path: Path) -> None:
    """DDP keeps its first buckets where some parameters may be unused."""
    first = _trainer(rank, tmp_path, hook, find_unused=True)
    straight = _trained(first)
    checkpoint = tmp_path / "checkpoint-3"
    second = _trainer(rank, tmp_path, hook, find_unused=True)
    assert _trained(second, resume_from_checkpoint=str(checkpoint)).is_same(straight)
    state = torch.load(checkpoint / "commhook.pt", weights_only=True)
    assert {"rank0", "rank1"} <= state.keys()
    logged = [entry for entry in first.state.log_history if "commhook/bytes_sent" in entry]
    assert len(logged) >= 3


@on_launched
def test_a_checkpoint_without_a_state(rank: int, tmp_path: Path) -> None:
    _trained(_trainer(rank, tmp_path, None))
    trainer = _trainer(rank, tmp_path)
    with pytest.raises(RuntimeError, match=r"has no commhook\.pt; give resume_from="):
        _trained(trainer, resume_from_checkpoint=True)


@on_launched
def test_a_state_that_one_rank_lacks(rank: int, tmp_path: Path) -> None:
    _trained(_trainer(rank, tmp_path))
    options = {"resume_from": tmp_path / "lost"} if rank == 1 else {}
    trainer = _trainer(rank, tmp_path, **options)
    said = r"has no commhook\.pt" if rank == 1 else "it failed on rank 1"
    with pytest.raises(RuntimeError, match=said):
        _trained(trainer, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@on_launched
def test_a_hook_that_begins_anew(rank: int, tmp_path: Path) -> None:
    """From a checkpoint of no hook, and from one where ``output_dir`` has that of another."""
    _trained(_trainer(rank, tmp_path / "plain", None))
    checkpoint = str(tmp_path / "plain" / "checkpoint-3")
    trainer = _trainer(rank, tmp_path / "anew", begin_anew=True)
    _trained(trainer, resume_from_checkpoint=checkpoint)
    assert _callback(trainer).handle.state_dict()["steps"] == 3
    again = _trainer(rank, tmp_path / "anew")
    with pytest.raises(RuntimeError, match=r"has no commhook\.pt.*begin_anew=True"):
        _trained(again, resume_from_checkpoint=checkpoint)


@on_launched
def test_a_checkpoint_of_another_training(rank: int, tmp_path: Path) -> None:
    _trained(_trainer(rank, tmp_path / "one"))
    _trained(_trainer(rank, tmp_path / "two", way="clipping"))  # which logs other numbers
    trainer = _trainer(rank, tmp_path / "one")
    said = "checkpoint-3 belongs to another training; give resume_from="
    with pytest.raises(RuntimeError, match=said):
        _trained(trainer, resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-3"))


@on_launched
def test_ranks_that_are_apart_and_the_best_model(rank: int, tmp_path: Path) -> None:
    """Training gives the best model, which is that of the middle of a round."""
    from safetensors.torch import load_file

    trainer = _trainer(rank, tmp_path, "local_sgd(4, hook=blockwise(bits=4))", best=True)
    _trained(trainer)
    best = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    now = trainer.model.state_dict()
    assert best and all(torch.equal(now[name], value) for name, value in best.items())


@on_launched
def test_the_scaler(rank: int, tmp_path: Path) -> None:
    trainer = _trainer(rank, tmp_path)
    scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _trained(trainer)
    assert _callback(trainer).handle._attached.memory.scaler is scaler


def test_a_mistake_in_the_expression() -> None:
    from torch_commhook.integrations.transformers import CommHookTrainerCallback

    with pytest.raises(ValueError, match="did you mean 'blockwise'"):
        CommHookTrainerCallback("blokwise()")


@on_launched
def test_a_model_in_two_ddps(rank: int, tmp_path: Path) -> None:
    """An earlier Trainer has wrapped the model, too, and is still there."""
    trainer = _trainer(rank, tmp_path)
    other = torch.nn.parallel.DistributedDataParallel(trainer.model)
    assert _trained(trainer).is_same(loop(rank, WAYS["plain"]))
    assert other.module is trainer.model


@on_pool("one_launched")
def test_one_process(rank: int, tmp_path: Path) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # as without torchrun
        del os.environ[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trained(_trainer(rank, tmp_path))
    assert any("training runs in one process" in str(each.message) for each in caught)
