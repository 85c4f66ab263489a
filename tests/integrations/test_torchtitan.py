"""Hooks in the Trainer of torchtitan, against a plain loop and against the gradient of all data."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched_ranks import launched
from nested_values import different_paths
from on_ranks import of_all_ranks
from repository import ROOT, SUPPORT
from torch import Tensor, nn
from train_processes import finished

from torch_commhook import attach, hooks
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.integrations.torchtitan import attach_to

pytest.importorskip("torchtitan")

EXAMPLE = ROOT / "examples" / "torchtitan_training.py"
HOOK = "error_feedback(blockwise(bits=4))"
STEPS = 3
SECONDS = 400  # torchtitan alone takes long to be imported
MESHES = {"fsdp": (2, 1), "replicate": (2, 2), "hsdp": (4, 2)}


def _example() -> Any:
    """The example, which is configured as a user would."""
    import titan_on_cpu  # noqa: F401

    spec = importlib.util.spec_from_file_location("torchtitan_training", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Run:
    """Training of the example's model by torchtitan, and what came of it.

    Attributes:
        chunks: of the loss; 1 for a loss of the whole.
        folder: of checkpoints, of every second step; None without any.
        loaded: the step to go on from; -1 for none.
        gradients: those of each step, whole, as the optimizer got them.
    """

    replicas: int
    chunks: int = 1
    folder: str | None = None
    loaded: int = -1
    steps: int = STEPS
    gradients: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = _example().configured(self.replicas, self.steps, self.folder or ".")
        from torchtitan.components.loss import CrossEntropyLoss

        config.model_spec.model.layers = config.model_spec.model.layers[:1]
        config.checkpoint.enable = self.folder is not None
        config.checkpoint.interval = 2
        config.checkpoint.load_step = self.loaded
        config.training.max_norm = 1e9
        config.training.mixed_precision_param = "float32"
        if self.chunks == 1:
            config.loss = CrossEntropyLoss.Config(global_vocab_size=2048)
        else:
            config.loss.num_chunks = self.chunks
        self.trainer = config.build()
        self.model = self.trainer.model_parts[0]
        self.start = [whole(parameter) for parameter in self.model.parameters()]
        step = self.trainer.optimizers.step

        def noting_step(*args: Any) -> None:
            self.gradients.append([whole(each.grad) for each in self.model.parameters()])
            step(*args)

        self.trainer.optimizers.step = noting_step

    @property
    def parameters(self) -> list[Tensor]:
        return [whole(parameter) for parameter in self.model.parameters()]

    def whole_model(self) -> nn.Module:
        """The model as it was before training, on each rank."""
        model = self.trainer.model_config.build()
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights()  # buffers too
            for parameter, value in zip(model.parameters(), self.start, strict=True):
                parameter.copy_(value)
        return model

    def batches(self, ranks: int) -> Iterator[list[tuple[dict[str, Tensor], Tensor]]]:
        """Those of all ranks, as each step of theirs had."""
        loaders = []
        for rank in range(ranks):
            loader = self.trainer.config.dataloader.build(
                dp_rank=rank, dp_world_size=ranks, seq_len=64, local_batch_size=2
            )
            loaders.append(iter(loader))
        for _ in range(self.steps):
            yield [next(loader) for loader in loaders]


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor().detach().clone()


def loss_of(model: nn.Module, batch: tuple[dict[str, Tensor], Tensor], tokens: int) -> Tensor:
    inputs, labels = batch
    output = model(inputs["input"], positions=inputs["positions"]).flatten(0, 1).float()
    return nn.functional.cross_entropy(output, labels.flatten(0, 1), reduction="sum") / tokens


def loop(rank: int, run: Run, hook: str) -> tuple[list[list[Tensor]], list[Tensor], int]:
    """Gradients, parameters and bytes of the same steps, with PyTorch's own functions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = run.whole_model()
    ranks, replicas = dist.get_world_size(), run.replicas
    if replicas > 1:
        mesh = init_device_mesh(
            "cpu", (replicas, ranks // replicas), mesh_dim_names=("replicas", "shards")
        )
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(model.tok_embeddings, mesh=mesh)
    fully_shard([model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
    handle = attach(model, parse_hook(hook))
    config = run.trainer.config
    optimizers = config.optimizer.build(model_parts=[model])
    schedulers = config.lr_scheduler.build(optimizers=optimizers, training_steps=run.steps)
    gradients = []
    for batches in run.batches(ranks):
        tokens = sum(labels.numel() for _, labels in batches)
        loss_of(model, batches[rank], tokens).backward()
        gradients.append([whole(parameter.grad) for parameter in model.parameters()])
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
    parameters = [whole(parameter) for parameter in model.parameters()]
    sent = handle.stats().bytes_sent
    handle.remove()
    return gradients, parameters, sent


def gradient_of_all(run: Run) -> list[Tensor]:
    """The first step's gradient of the loss of all ranks' data, in one process."""
    model = run.whole_model()
    batches = next(run.batches(dist.get_world_size()))
    tokens = sum(labels.numel() for _, labels in batches)
    for batch in batches:
        loss_of(model, batch, tokens).backward()
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Of two gradients, in lengths of the second."""
    pairs = list(zip(found, expected, strict=True))
    apart = sum((one - two).double().square().sum() for one, two in pairs)
    return float((apart / sum(two.double().square().sum() for _, two in pairs)) ** 0.5)


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def _assert_as_a_loop(replicas: int, rank: int) -> None:
    run = Run(replicas)
    handle = attach_to(run.trainer, HOOK)
    run.trainer.train()
    gradients, parameters, sent = loop(rank, run, HOOK)
    handle.remove()
    assert handle.stats().steps == len(run.gradients) == STEPS
    assert all(map(same, run.gradients, gradients))
    assert same(run.parameters, parameters)
    assert handle.stats().bytes_sent == sent > 0
    assert 0.01 < distance(run.gradients[0], gradient_of_all(run)) < 0.3  # 4 bits were sent


def _assert_sums_in_chunks(replicas: int) -> None:
    """The loss in chunks is torchtitan's default; a module's gradients are in two parts there."""
    for hook, least, most in (("allreduce()", 0.0, 1e-5), ("blockwise(bits=8)", 1e-4, 0.02)):
        run = Run(replicas, chunks=4, steps=1)
        handle = attach_to(run.trainer, hook)
        run.trainer.train()
        handle.remove()
        assert least <= distance(run.gradients[0], gradient_of_all(run)) < most, hook


def _assert_goes_on(replicas: int, chunks: int, folder: str) -> None:
    """From the checkpoint of the second step of three."""
    found = []
    for loaded in (-1, 2):
        run = Run(replicas, chunks, folder, loaded)
        handle = attach_to(run.trainer, HOOK)
        run.trainer.train()
        found.append((run, handle.state_dict()))
        handle.remove()
        run.trainer.close()
        dist.barrier()
    (straight, state), (resumed, resumed_state) = found
    assert len(resumed.gradients) == 1
    assert same(resumed.gradients[0], straight.gradients[2])
    assert same(resumed.parameters, straight.parameters)
    assert different_paths(resumed_state, state) == []


def _assert_comes_together(replicas: int, chunks: int) -> None:
    """Replicas exchange after the second of three steps, and at the end; without us they do not."""
    for attaches in (attach_to, lambda trainer, hook: attach(trainer.model_parts[0], hook)):
        run = Run(replicas, chunks)
        handle = attaches(run.trainer, hooks.local_sgd(2))
        run.trainer.train()
        mine = torch.cat([each.to_local().flatten() for each in run.model.parameters()])
        are_equal = all(torch.equal(mine, other) for other in of_all_ranks(mine))
        stats = handle.stats()
        rounds = stats.bytes_sent // stats.bytes_sent_last_step
        expected = (True, 2) if attaches is attach_to else (False, 1)
        assert (are_equal, rounds) == expected, chunks
        if attaches is not attach_to:
            handle.synchronize()
        handle.remove()


def _check(rank: int, mesh: str, folder: str) -> None:
    _, replicas = MESHES[mesh]
    _assert_as_a_loop(replicas, rank)
    _assert_sums_in_chunks(replicas)
    if mesh == "fsdp":
        _assert_goes_on(replicas, 4, folder)
    elif mesh == "replicate":  # in chunks the buckets across replicas are others after a load
        _assert_goes_on(replicas, 1, folder)
        for chunks in (1, 4):
            _assert_comes_together(replicas, chunks)
    dist.barrier()


@pytest.mark.parametrize("mesh", MESHES)
def test_a_trainer(mesh: str, tmp_path: Path) -> None:
    """All checks of a mesh in one start."""
    ranks, _ = MESHES[mesh]
    launched(_check, mesh, str(tmp_path), world_size=ranks, seconds=SECONDS)


def test_the_example(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    program = ("--nproc-per-node", "2", SUPPORT / "titan_on_cpu.py", EXAMPLE)
    arguments = ("--steps", "3", "--replicas", "2", "--folder", tmp_path)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = finished(*torchrun, *program, *arguments, environment=environment, seconds=SECONDS)
    sent = re.search(r"^step 3: (\d+) bytes of gradients were sent$", done.stdout, re.MULTILINE)
    assert sent is not None and int(sent[1]) > 0
    assert (tmp_path / "checkpoint" / "step-3").is_dir()


def test_what_is_refused() -> None:
    def trainer(*, graphs: bool = False, stages: bool = False) -> Any:
        training = SimpleNamespace(disable_cuda_graphs=not graphs)
        return SimpleNamespace(
            config=SimpleNamespace(training=training),
            parallel_dims=SimpleNamespace(pp_enabled=stages),
            model_parts=[nn.Linear(2, 2)],
        )

    with pytest.raises(ValueError, match=r"set training.disable_cuda_graphs"):
        attach_to(trainer(graphs=True), HOOK)
    with pytest.raises(RuntimeError, match="pipeline_parallel_degree to 1"):
        attach_to(trainer(stages=True), HOOK)
    with pytest.raises(RuntimeError, match=r"got Linear in training on 1 ranks. Call it after"):
        attach_to(trainer(), HOOK)
