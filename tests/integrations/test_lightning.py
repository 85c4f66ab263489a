"""Hooks in Lightning's Trainer and Fabric, against a plain loop."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import warnings
from collections.abc import Iterator
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
    ended,
    loss_of,
    sharded,
)
from on_ranks import of_all_ranks, on_pool
from torch.distributed.fsdp import fully_shard

pytest.importorskip("lightning")

on_launched = on_pool("launched")
LIGHTNING = "lightning.pytorch"


class _Loader(torch.utils.data.DataLoader):
    """Gives a rank's batches in their order, and goes on where a checkpoint was saved."""

    def __init__(self, data: Data) -> None:
        super().__init__(data, batch_size=BATCH)
        self._given = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in itertools.islice(super().__iter__(), self._given, None):
            self._given += 1
            yield batch
        self._given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._given = state["given"]


def _trained(
    rank: int,
    folder: Path,
    hook: str | None = HOOK,
    way: str = "plain",
    package: str = LIGHTNING,
    shards: bool = False,
    **options: Any,
) -> Trained:
    """What a Trainer comes to; ``ckpt_path`` is given to ``fit``, other options to the Trainer."""
    from torch_commhook.integrations.lightning import CommHookCallback

    pl, how = importlib.import_module(package), WAYS[way]

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def configure_model(self) -> None:
            if shards:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: dict[str, Any], index: int) -> Any:
            return loss_of(self.net(batch["x"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    callback = None if hook is None else CommHookCallback(hook)
    callbacks = [*options.pop("callbacks", []), *([] if callback is None else [callback])]
    ckpt_path = options.pop("ckpt_path", None)
    settings = {
        "strategy": "ddp",
        "devices": 2,
        "max_steps": STEPS,
        "logger": False,
        "enable_checkpointing": False,
        "log_every_n_steps": 2,
        **options,
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        precision="bf16-mixed" if how.bf16 else "32-true",
        accumulate_grad_batches=how.accumulate,
        gradient_clip_val=how.clip,
        callbacks=callbacks,
        default_root_dir=str(folder),
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    module = Module()
    trainer.fit(module, _Loader(Data(rank, STEPS * how.accumulate)), ckpt_path=ckpt_path)
    return Trained.of(module, None if callback is None else callback.handle)


@pytest.mark.parametrize("way", WAYS)
@on_launched
def test_a_trainer(rank: int, way: str, tmp_path: Path) -> None:
    assert_as_a_loop(rank, lambda hook: _trained(rank, tmp_path, hook, way), way)


@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="needs it")
@on_launched
def test_the_other_package(rank: int, tmp_path: Path) -> None:
    assert_as_a_loop(
        rank, lambda hook: _trained(rank, tmp_path, hook, "all", "pytorch_lightning"), "all"
    )


@on_launched
def test_a_sharded_model(rank: int, tmp_path: Path) -> None:
    """``configure_model()`` makes the shards."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    def train(hook: str | None) -> Trained:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        return _trained(rank, tmp_path, hook, shards=True, strategy=strategy)

    assert_as_a_loop(rank, train, wrap=sharded)


def _saving(folder: Path) -> Any:
    """Saves a checkpoint each third step."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(str(folder), filename="{step}", every_n_train_steps=3, save_top_k=-1)


@pytest.mark.parametrize("hook", [HOOK, "error_feedback(topk(0.1))"])
@on_launched
def test_a_checkpoint(rank: int, hook: str, tmp_path: Path) -> None:
    """From the middle; DDP keeps its first buckets where some parameters may be unused."""
    options = {"strategy": "ddp_find_unused_parameters_true", "enable_checkpointing": True}
    straight = _trained(rank, tmp_path, hook, callbacks=[_saving(tmp_path)], **options)
    path = tmp_path / "step=3.ckpt"
    assert _trained(rank, tmp_path, hook, ckpt_path=path, **options).is_same(straight)
    state = torch.load(path, weights_only=False)["callbacks"]["CommHookCallback"]
    assert {"rank0", "rank1"} <= state.keys()


@on_launched
def test_training_that_raised(rank: int, tmp_path: Path) -> None:
    """The same callback then resumes another training."""
    import lightning.pytorch as pl

    from torch_commhook.integrations.lightning import CommHookCallback

    class Raising(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                raise RuntimeError("on purpose")

    callback = CommHookCallback(HOOK)
    options = {"enable_checkpointing": True, "callbacks": [callback, _saving(tmp_path), Raising()]}
    with pytest.raises(RuntimeError, match="on purpose"):
        _trained(rank, tmp_path, None, **options)
    assert not callback.handle.is_attached
    _trained(rank, tmp_path, None, ckpt_path=tmp_path / "step=3.ckpt", callbacks=[callback])
    assert callback.handle.stats().steps == 3 and callback.state_dict()["steps"] == 6


def test_a_mistake_in_the_expression() -> None:
    from torch_commhook.integrations.lightning import CommHookCallback

    for arguments in ({"hook": "blokwise()"}, {"hook": "cast()", "shard_hook": "blokwise()"}):
        with pytest.raises(ValueError, match="did you mean 'blockwise'"):
            CommHookCallback(**arguments)


@on_launched
def test_a_checkpoint_without_a_hook(rank: int, tmp_path: Path) -> None:
    options = {"enable_checkpointing": True}
    _trained(rank, tmp_path, None, callbacks=[_saving(tmp_path)], **options)
    for hook, warns in ((HOOK, True), ("allreduce()", False)):  # which has nothing to remember
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _trained(rank, tmp_path, hook, ckpt_path=tmp_path / "step=3.ckpt", **options)
        said = [str(each.message) for each in caught]
        assert any("was made without this callback" in each for each in said) == warns


def _logger(folder: Path, name: str) -> Any:
    from lightning.pytorch.loggers import CSVLogger

    return CSVLogger(str(folder), name=name, version=0)


def _logged(folder: Path, name: str) -> str:
    return (folder / name / "version_0" / "metrics.csv").read_text()


@on_launched
def test_what_a_logger_gets(rank: int, tmp_path: Path) -> None:
    _trained(rank, tmp_path, logger=_logger(tmp_path, "logs"))
    if rank == 0:
        header, *rows = _logged(tmp_path, "logs").splitlines()
        names = header.split(",")
        assert {"commhook/bytes_sent_last_step", "commhook/relative_error"} <= set(names)
        assert [row.split(",")[names.index("step")] for row in rows] == ["1", "3", "5"]


@on_launched
def test_what_two_loggers_get(rank: int, tmp_path: Path) -> None:
    loggers = [_logger(tmp_path, name) for name in ("one", "two")]
    _trained(rank, tmp_path, logger=loggers)
    _trained(rank, tmp_path, logger=loggers[0], log_every_n_steps=0)
    if rank == 0:
        assert _logged(tmp_path, "one") == _logged(tmp_path, "two")
        assert "commhook/wire_seconds" in _logged(tmp_path, "one")


@on_launched
def test_ranks_that_are_apart_come_together(rank: int, tmp_path: Path) -> None:
    """Training ends in the middle of a round."""
    trained = _trained(rank, tmp_path, "local_sgd(4)")
    values = [parameter.flatten().tolist() for parameter in trained.parameters]
    first, second = of_all_ranks((trained.bytes_sent, values))
    assert first == second and first[0] > 0


class _InFabric:
    """A model in Fabric, with a hook."""

    def __init__(self, hook: str | None, strategy: Any, way: str = "plain") -> None:
        from lightning.fabric import Fabric

        from torch_commhook.integrations.lightning import setup

        self.how = WAYS[way]
        precision = "bf16-mixed" if self.how.bf16 else "32-true"
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
        self.fabric.launch()
        self.model = self.fabric.setup(Net())
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        self.handle = None if hook is None else setup(self.fabric, self.model, hook)

    def steps(self, rank: int, count: int = STEPS) -> None:
        data = Data(rank, count * self.how.accumulate)
        for number, (x, labels) in enumerate(data.batches(), 1):
            steps = number % self.how.accumulate == 0
            with self.fabric.no_backward_sync(self.model, enabled=not steps):
                loss = loss_of(self.model(x), labels) / self.how.accumulate
                self.fabric.backward(loss)
            if steps:
                if self.how.clip is not None:
                    self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.how.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()


def _trained_in_fabric(rank: int, *arguments: Any) -> Trained:
    run = _InFabric(*arguments)
    run.steps(rank)
    return ended(run.model, run.handle)


@pytest.mark.parametrize("way", WAYS)
@on_launched
def test_fabric(rank: int, way: str) -> None:
    assert_as_a_loop(rank, lambda hook: _trained_in_fabric(rank, hook, "ddp", way), way)


@on_launched
def test_shards_in_fabric(rank: int) -> None:
    from lightning.fabric.strategies import ModelParallelStrategy

    def parallelize(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    def train(hook: str | None) -> Trained:
        strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
        return _trained_in_fabric(rank, hook, strategy)

    assert_as_a_loop(rank, train, wrap=sharded)


@pytest.mark.parametrize("hook", [HOOK, "error_feedback(topk(0.1))"])
@on_launched
def test_a_checkpoint_of_fabric(rank: int, hook: str, tmp_path: Path) -> None:
    """DDP keeps its first buckets where some parameters may be unused."""
    from lightning.fabric.strategies import DDPStrategy

    first = _InFabric(hook, DDPStrategy(find_unused_parameters=True))
    first.steps(rank, 3)
    state = {
        "model": first.model,
        "optimizer": first.optimizer,
        "hook": first.handle.state_dict(gather=True),
    }
    first.fabric.save(tmp_path / "last.ckpt", state)
    first.steps(rank)
    straight = ended(first.model, first.handle)
    second = _InFabric(hook, DDPStrategy(find_unused_parameters=True))
    places = {"model": second.model, "optimizer": second.optimizer}
    rest = second.fabric.load(tmp_path / "last.ckpt", places)
    second.handle.load_state_dict(rest["hook"])
    second.steps(rank)
    assert ended(second.model, second.handle).is_same(straight)


@on_launched
def test_a_hook_that_lightning_ignores(rank: int, tmp_path: Path) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    from torch_commhook import hooks

    strategy = DDPStrategy(ddp_comm_hook=hooks.cast())
    with pytest.raises(
        ValueError, match=r"^CommHookCallback: the strategy has a ddp_comm_hook, wh"
    ):
        _trained(rank, tmp_path, strategy=strategy)


@on_pool("one_launched")
def test_one_process(rank: int, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trained(rank, tmp_path, strategy="auto", devices=1)
    said = [str(each.message) for each in caught]
    assert any(each.startswith("CommHookCallback: training runs in one process") for each in said)
