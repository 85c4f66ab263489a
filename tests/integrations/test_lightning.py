"""Hooks in Lightning's Trainer and Fabric, against a plain loop."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from framework_training import BATCH, HOOK, STEPS, WAYS, Data, Net, Trained, loop, loss_of
from launched_ranks import launched

pytest.importorskip("lightning")


def _package(name: str) -> ModuleType:
    if name == "lightning":
        import lightning.pytorch as package
    else:
        import pytorch_lightning as package
    return package


def _trained(
    rank: int, name: str, way: str, hook: str | None, folder: str, **options: Any
) -> Trained:
    """What a Trainer comes to; ``ckpt_path`` is given to ``fit``, other options to the Trainer."""
    from torch_commhook.integrations.lightning import CommHookCallback

    pl, how = _package(name), WAYS[way]

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, Any], index: int) -> Any:
            return loss_of(self.net(batch["x"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    callback = None if hook is None else CommHookCallback(hook)
    callbacks = [*options.pop("callbacks", []), *([] if callback is None else [callback])]
    ckpt_path = options.pop("ckpt_path", None)
    settings = {
        "strategy": "ddp",
        "max_steps": STEPS,
        "logger": False,
        "enable_checkpointing": False,
        **options,
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        precision="bf16-mixed" if how.bf16 else "32-true",
        accumulate_grad_batches=how.accumulate,
        gradient_clip_val=how.clip,
        callbacks=callbacks,
        default_root_dir=folder,
        log_every_n_steps=2,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    module = Module()
    loader = torch.utils.data.DataLoader(Data(rank, STEPS * how.accumulate), batch_size=BATCH)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return Trained.of(module, None if callback is None else callback.handle)


def _as_a_loop(rank: int, name: str, way: str, folder: str) -> list[bool]:
    trained = _trained(rank, name, way, HOOK, folder)
    expected = loop(rank, WAYS[way])
    without = _trained(rank, name, way, None, folder)
    return [
        trained.is_same(expected),
        trained.bytes_sent == expected.bytes_sent != 0,
        without.is_same(loop(rank, WAYS[way], None)),
        not without.is_same(expected),
    ]


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer(way: str, tmp_path: Path) -> None:
    assert launched(_as_a_loop, "lightning", way, str(tmp_path)) == [[True] * 4] * 2


def test_the_other_package(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    assert launched(_as_a_loop, "pytorch_lightning", "all", str(tmp_path)) == [[True] * 4] * 2


def _resumed(rank: int, hook: str, folder: str) -> list[bool]:
    """From a checkpoint in the middle; DDP keeps its first buckets where some may be unused."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    options = {"strategy": "ddp_find_unused_parameters_true", "enable_checkpointing": True}
    straight = _trained(rank, "lightning", "plain", hook, folder, callbacks=[saving], **options)
    # The other examples are those of the second half.
    path = f"{folder}/step=3.ckpt"
    resumed = _trained(rank, "lightning", "plain", hook, folder, ckpt_path=path, **options)
    state = torch.load(path, weights_only=False)["callbacks"]["CommHookCallback"]
    return [resumed.is_same(straight), {"rank0", "rank1"} <= state.keys()]


@pytest.mark.parametrize("hook", [HOOK, "error_feedback(topk(0.1))"])
def test_a_checkpoint(hook: str, tmp_path: Path) -> None:
    assert launched(_resumed, hook, str(tmp_path)) == [[True] * 2] * 2


def _logged(rank: int, folder: str) -> str | None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(folder, name="logs", version=0)
    _trained(rank, "lightning", "plain", HOOK, folder, logger=logger)
    return None if rank else (Path(folder) / "logs" / "version_0" / "metrics.csv").read_text()


def test_what_a_logger_gets(tmp_path: Path) -> None:
    header, *rows = launched(_logged, str(tmp_path))[0].splitlines()
    names = header.split(",")
    assert {f"commhook/{name}" for name in ("bytes_sent_last_step", "relative_error")} <= set(names)
    assert [row.split(",")[names.index("step")] for row in rows] == ["1", "3", "5"]


def _apart(rank: int, folder: str) -> Trained:
    """Ranks that are apart when training ends in the middle of a round."""
    return _trained(rank, "lightning", "plain", "local_sgd(4)", folder)


def test_ranks_that_are_apart_come_together(tmp_path: Path) -> None:
    first, second = launched(_apart, str(tmp_path))
    assert first.is_same(second)


def _sharded(rank: int, folder: str) -> list[bool]:
    """The model in shards, as ``configure_model()`` makes it; the whole one in the loop."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from torch_commhook.integrations.lightning import CommHookCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def configure_model(self) -> None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: dict[str, Any], index: int) -> Any:
            return loss_of(self.net(batch["x"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    callback = CommHookCallback(HOOK)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=STEPS,
        callbacks=[callback],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    loader = torch.utils.data.DataLoader(Data(rank, STEPS), batch_size=BATCH)
    trainer.fit(module, loader)
    trained = Trained(
        [parameter.full_tensor().detach() for parameter in module.parameters()],
        callback.handle.stats().bytes_sent,
    )

    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        fully_shard(model)
        return model

    expected = loop(rank, WAYS["plain"], wrap=wrap)
    expected.parameters = [parameter.full_tensor() for parameter in expected.parameters]
    return [trained.is_same(expected), trained.bytes_sent == expected.bytes_sent != 0]


def test_a_sharded_model(tmp_path: Path) -> None:
    assert launched(_sharded, str(tmp_path)) == [[True] * 2] * 2


def _in_fabric(rank: int, way: str) -> list[bool]:
    from lightning.fabric import Fabric

    from torch_commhook.integrations.lightning import setup

    how = WAYS[way]
    precision = "bf16-mixed" if how.bf16 else "32-true"
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision=precision)
    fabric.launch()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped, optimizer = fabric.setup(model, optimizer)
    handle = setup(fabric, wrapped, HOOK)
    for number, (x, labels) in enumerate(Data(rank, STEPS * how.accumulate).batches(), 1):
        steps = number % how.accumulate == 0
        with fabric.no_backward_sync(wrapped, enabled=not steps):
            fabric.backward(loss_of(wrapped(x), labels) / how.accumulate)
        if steps:
            if how.clip is not None:
                fabric.clip_gradients(wrapped, optimizer, max_norm=how.clip)
            optimizer.step()
            optimizer.zero_grad()
    trained = Trained.of(model, handle)
    handle.remove()
    expected = loop(rank, how)
    return [trained.is_same(expected), trained.bytes_sent == expected.bytes_sent != 0]


@pytest.mark.parametrize("way", WAYS)
def test_fabric(way: str) -> None:
    assert launched(_in_fabric, way) == [[True] * 2] * 2
