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
    way: str,
    hook: str | None,
    folder: str,
    rank: int,
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
        output_dir=folder,
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
        assert "has no commhook.pt; give resume_from=" in error


def _lost_on_a_rank(rank: int, folder: str) -> str:
    _trained(_trainer("plain", HOOK, folder, rank))
    lost = Path(folder) / "lost"
    options = {} if rank == 0 else {"resume_from": lost}
    try:
        trainer = _trainer("plain", HOOK, folder, rank, **options)
        _trained(trainer, resume_from_checkpoint=f"{folder}/checkpoint-3")
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_state_that_one_rank_lacks(launched: LaunchedRanks, tmp_path: Path) -> None:
    first, second = launched.run(_lost_on_a_rank, str(tmp_path), timeout=60)
    assert "it failed on rank 1" in first and "has no commhook.pt" in second


def _anew(rank: int, folder: str) -> list[Any]:
    """From a checkpoint of no hook, and from one where ``output_dir`` has that of another."""
    _trained(_trainer("plain", None, f"{folder}/plain", rank))
    checkpoint = f"{folder}/plain/checkpoint-3"
    trainer = _trainer("plain", HOOK, f"{folder}/anew", rank, begin_anew=True)
    _trained(trainer, resume_from_checkpoint=checkpoint)
    (callback,) = (each for each in trainer.callback_handler.callbacks if hasattr(each, "handle"))
    try:
        _trained(_trainer("plain", HOOK, f"{folder}/anew", rank), resume_from_checkpoint=checkpoint)
    except RuntimeError as error:
        return [callback.handle.state_dict()["steps"], str(error)]
    return ["no error"]


def test_a_hook_that_begins_anew(launched: LaunchedRanks, tmp_path: Path) -> None:
    for steps, error in launched.run(_anew, str(tmp_path)):
        assert steps == 3
        assert "has no commhook.pt" in error and "begin_anew=True" in error


def _of_another(rank: int, folder: str) -> str:
    for name in ("one", "two"):
        way = "plain" if name == "one" else "clipping"  # which logs other numbers
        _trained(_trainer(way, HOOK, f"{folder}/{name}", rank))
    trainer = _trainer("plain", HOOK, f"{folder}/one", rank)
    try:
        _trained(trainer, resume_from_checkpoint=f"{folder}/two/checkpoint-3")
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_checkpoint_of_another_training(launched: LaunchedRanks, tmp_path: Path) -> None:
    for error in launched.run(_of_another, str(tmp_path)):
        assert "checkpoint-3 belongs to another training; give resume_from=" in error


def _best(rank: int, folder: str) -> bool:
    """Whether the best model, in the middle of a round, is what training gives."""
    from safetensors.torch import load_file

    trainer = _trainer("plain", "local_sgd(4, hook=blockwise(bits=4))", folder, rank, best=True)
    _trained(trainer)
    best = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    now = trainer.model.state_dict()
    return all(torch.equal(now[name], value) for name, value in best.items())


def test_ranks_that_are_apart_and_the_best_model(launched: LaunchedRanks, tmp_path: Path) -> None:
    assert launched.run(_best, str(tmp_path)) == [True] * 2


def _scaled(rank: int, folder: str) -> bool:
    trainer = _trainer("plain", HOOK, folder, rank)
    scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _trained(trainer)
    (callback,) = (each for each in trainer.callback_handler.callbacks if hasattr(each, "handle"))
    return callback.handle._attached.memory.scaler is scaler


def test_the_scaler(launched: LaunchedRanks, tmp_path: Path) -> None:
    assert launched.run(_scaled, str(tmp_path)) == [True] * 2


def test_a_mistake_in_the_expression() -> None:
    from torch_commhook.integrations.transformers import CommHookTrainerCallback

    with pytest.raises(ValueError, match="did you mean 'blockwise'"):
        CommHookTrainerCallback("blokwise()")


def _in_two(rank: int, folder: str) -> list[bool]:
    """A model that an earlier Trainer has wrapped, too, and that is still there."""
    trainer = _trainer("plain", HOOK, folder, rank)
    other = torch.nn.parallel.DistributedDataParallel(trainer.model)
    trained = _trained(trainer)
    expected = loop(rank, WAYS["plain"])
    return [trained.is_same(expected), other.module is trainer.model]


def test_a_model_in_two_ddps(launched: LaunchedRanks, tmp_path: Path) -> None:
    assert launched.run(_in_two, str(tmp_path)) == [[True] * 2] * 2


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
