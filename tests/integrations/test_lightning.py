"""Hooks in Lightning's Trainer and Fabric, against a plain loop."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
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
    loss_of,
    sharded,
)
from launched_ranks import LaunchedRanks

pytest.importorskip("lightning")


def _package(name: str) -> ModuleType:
    if name == "lightning":
        import lightning.pytorch as package
    else:
        import pytorch_lightning as package
    return package


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
        default_root_dir=folder,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    module = Module()
    trainer.fit(module, _Loader(Data(rank, STEPS * how.accumulate)), ckpt_path=ckpt_path)
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
def test_a_trainer(launched: LaunchedRanks, way: str, tmp_path: Path) -> None:
    assert launched.run(_as_a_loop, "lightning", way, str(tmp_path)) == [[True] * 4] * 2


def test_the_other_package(launched: LaunchedRanks, tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    assert launched.run(_as_a_loop, "pytorch_lightning", "all", str(tmp_path)) == [[True] * 4] * 2


def _saving(folder: str) -> Any:
    """Saves a checkpoint each third step."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)


def _resumed(rank: int, hook: str, folder: str) -> list[bool]:
    """From a checkpoint in the middle; DDP keeps its first buckets where some may be unused."""
    options = {"strategy": "ddp_find_unused_parameters_true", "enable_checkpointing": True}
    straight = _trained(
        rank, "lightning", "plain", hook, folder, callbacks=[_saving(folder)], **options
    )
    path = f"{folder}/step=3.ckpt"
    resumed = _trained(rank, "lightning", "plain", hook, folder, ckpt_path=path, **options)
    state = torch.load(path, weights_only=False)["callbacks"]["CommHookCallback"]
    return [resumed.is_same(straight), {"rank0", "rank1"} <= state.keys()]


@pytest.mark.parametrize("hook", [HOOK, "error_feedback(topk(0.1))"])
def test_a_checkpoint(launched: LaunchedRanks, hook: str, tmp_path: Path) -> None:
    assert launched.run(_resumed, hook, str(tmp_path)) == [[True] * 2] * 2


def _raised_and_resumed(rank: int, folder: str) -> list[Any]:
    """One callback in training that raises, and in another that resumes: attached, steps."""
    import lightning.pytorch as pl

    from torch_commhook.integrations.lightning import CommHookCallback

    class Raising(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                raise RuntimeError("on purpose")

    callback = CommHookCallback(HOOK)
    options = {"enable_checkpointing": True, "callbacks": [callback, _saving(folder), Raising()]}
    with pytest.raises(RuntimeError, match="on purpose"):
        _trained(rank, "lightning", "plain", None, folder, **options)
    found: list[Any] = [callback.handle.is_attached]
    options = {"ckpt_path": f"{folder}/step=3.ckpt", "callbacks": [callback]}
    _trained(rank, "lightning", "plain", None, folder, **options)
    return [*found, callback.handle.stats().steps, callback.state_dict()["steps"]]


def test_training_that_raised(launched: LaunchedRanks, tmp_path: Path) -> None:
    assert launched.run(_raised_and_resumed, str(tmp_path)) == [[False, 3, 6]] * 2


def test_a_mistake_in_the_expression() -> None:
    from torch_commhook.integrations.lightning import CommHookCallback

    for arguments in ({"hook": "blokwise()"}, {"hook": "cast()", "shard_hook": "blokwise()"}):
        with pytest.raises(ValueError, match="did you mean 'blockwise'"):
            CommHookCallback(**arguments)


def _from_a_checkpoint_without_a_hook(rank: int, folder: str) -> list[bool]:
    options = {"enable_checkpointing": True}
    _trained(rank, "lightning", "plain", None, folder, callbacks=[_saving(folder)], **options)
    found = []
    for hook in (HOOK, "allreduce()"):  # which has nothing to remember
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            path = f"{folder}/step=3.ckpt"
            _trained(rank, "lightning", "plain", hook, folder, ckpt_path=path, **options)
        found.append(any("was made without this callback" in str(each.message) for each in caught))
    return found


def test_a_checkpoint_without_a_hook(launched: LaunchedRanks, tmp_path: Path) -> None:
    found = launched.run(_from_a_checkpoint_without_a_hook, str(tmp_path))
    assert found == [[True, False]] * 2


def _logged(rank: int, folder: str) -> str | None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(folder, name="logs", version=0)
    _trained(rank, "lightning", "plain", HOOK, folder, logger=logger)
    return None if rank else (Path(folder) / "logs" / "version_0" / "metrics.csv").read_text()


def test_what_a_logger_gets(launched: LaunchedRanks, tmp_path: Path) -> None:
    header, *rows = launched.run(_logged, str(tmp_path))[0].splitlines()
    names = header.split(",")
    assert {f"commhook/{name}" for name in ("bytes_sent_last_step", "relative_error")} <= set(names)
    assert [row.split(",")[names.index("step")] for row in rows] == ["1", "3", "5"]


def _logged_by_two(rank: int, folder: str) -> list[str]:
    from lightning.pytorch.loggers import CSVLogger

    loggers = [CSVLogger(folder, name=name, version=0) for name in ("one", "two")]
    _trained(rank, "lightning", "plain", HOOK, folder, logger=loggers)
    _trained(rank, "lightning", "plain", HOOK, folder, logger=loggers[0], log_every_n_steps=0)
    paths = [Path(folder) / name / "version_0" / "metrics.csv" for name in ("one", "two")]
    return [] if rank else [path.read_text() for path in paths]


def test_what_two_loggers_get(launched: LaunchedRanks, tmp_path: Path) -> None:
    first, second = launched.run(_logged_by_two, str(tmp_path))[0]
    assert first == second and "commhook/wire_seconds" in first


def _apart(rank: int, folder: str) -> list[Any]:
    """Ranks that are apart when training ends in the middle of a round."""
    trained = _trained(rank, "lightning", "plain", "local_sgd(4)", folder)
    values = [parameter.flatten().tolist() for parameter in trained.parameters]
    return [trained.bytes_sent, *values]


def test_ranks_that_are_apart_come_together(launched: LaunchedRanks, tmp_path: Path) -> None:
    first, second = launched.run(_apart, str(tmp_path))
    assert first == second and first[0] > 0


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
    trained = Trained.of(module, callback.handle)
    expected = loop(rank, WAYS["plain"], wrap=sharded)
    return [trained.is_same(expected), trained.bytes_sent == expected.bytes_sent != 0]


def test_a_sharded_model(launched: LaunchedRanks, tmp_path: Path) -> None:
    assert launched.run(_sharded, str(tmp_path)) == [[True] * 2] * 2


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
def test_fabric(launched: LaunchedRanks, way: str) -> None:
    assert launched.run(_in_fabric, way) == [[True] * 2] * 2


def _shards_in_fabric(rank: int) -> list[bool]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from torch_commhook.integrations.lightning import setup

    def parallelize(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup(Net())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    handle = setup(fabric, model, HOOK)
    for x, labels in Data(rank, STEPS).batches():
        fabric.backward(loss_of(model(x), labels))
        optimizer.step()
        optimizer.zero_grad()
    trained = Trained.of(model, handle)
    handle.remove()
    expected = loop(rank, WAYS["plain"], wrap=sharded)
    return [trained.is_same(expected), trained.bytes_sent == expected.bytes_sent != 0]


def test_shards_in_fabric(launched: LaunchedRanks) -> None:
    assert launched.run(_shards_in_fabric) == [[True] * 2] * 2


class _InFabric:
    """A model in Fabric whose buckets stay."""

    def __init__(self, hook: str) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import DDPStrategy

        from torch_commhook.integrations.lightning import setup

        strategy = DDPStrategy(find_unused_parameters=True)
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        self.fabric.launch()
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.handle = setup(self.fabric, self.model, hook)

    def steps(self, data: Data) -> None:
        for x, labels in data.batches():
            self.fabric.backward(loss_of(self.model(x), labels))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def end(self) -> Trained:
        trained = Trained.of(self.model, self.handle)
        self.handle.remove()
        return trained


def _resumed_in_fabric(rank: int, hook: str, folder: str) -> bool:
    first = _InFabric(hook)
    first.steps(Data(rank, 3))
    state = {
        "model": first.model,
        "optimizer": first.optimizer,
        "hook": first.handle.state_dict(gather=True),
    }
    first.fabric.save(f"{folder}/last.ckpt", state)
    first.steps(Data(rank, STEPS))
    straight = first.end()
    second = _InFabric(hook)
    places = {"model": second.model, "optimizer": second.optimizer}
    rest = second.fabric.load(f"{folder}/last.ckpt", places)
    second.handle.load_state_dict(rest["hook"])
    second.steps(Data(rank, STEPS))
    return second.end().is_same(straight)


@pytest.mark.parametrize("hook", [HOOK, "error_feedback(topk(0.1))"])
def test_a_checkpoint_of_fabric(launched: LaunchedRanks, hook: str, tmp_path: Path) -> None:
    assert launched.run(_resumed_in_fabric, hook, str(tmp_path)) == [True] * 2


def _with_another_hook(rank: int, folder: str) -> str:
    from lightning.pytorch.strategies import DDPStrategy

    from torch_commhook import hooks

    strategy = DDPStrategy(ddp_comm_hook=hooks.cast())
    try:
        _trained(rank, "lightning", "plain", HOOK, folder, strategy=strategy)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_hook_that_lightning_ignores(launched: LaunchedRanks, tmp_path: Path) -> None:
    for error in launched.run(_with_another_hook, str(tmp_path)):
        assert error.startswith("CommHookCallback: the strategy has a ddp_comm_hook, which")


def _alone(rank: int, folder: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trained(rank, "lightning", "plain", HOOK, folder, strategy="auto", devices=1)
    return [str(each.message) for each in caught]


def test_one_process(one_launched: LaunchedRanks, tmp_path: Path) -> None:
    (said,) = one_launched.run(_alone, str(tmp_path))
    assert any(each.startswith("CommHookCallback: training runs in one process") for each in said)
