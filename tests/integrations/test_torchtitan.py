"""Hooks in the Trainer of torchtitan, against a plain loop and against the gradient of all data."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched_ranks import launched
from repository import ROOT
from torch import Tensor, nn

pytest.importorskip("torchtitan")

HOOK = "error_feedback(blockwise(bits=4))"
STEPS = 3
PORTION = "portion of the model's gradient that is lost"
MESHES = {"fsdp": (2, 1), "replicate": (2, 2), "hsdp": (4, 2)}


def _example() -> Any:
    """The example, which is configured as a user would."""
    import titan_on_cpu  # noqa: F401

    path = ROOT / "examples" / "torchtitan_training.py"
    spec = importlib.util.spec_from_file_location("torchtitan_training", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Run:
    """Training of the example's model by torchtitan, and what came of it.

    Attributes:
        chunks: of the loss; 1 for a loss of the whole.
        gradients: those of each step, whole, as the optimizer got them.
    """

    replicas: int
    chunks: int = 1
    folder: str = "."
    steps: int = STEPS
    saves: bool = False
    adjust: Callable[[Any], None] | None = None
    gradients: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = _example().configured(self.replicas, self.steps, self.folder)
        from torchtitan.components.loss import CrossEntropyLoss

        config.model_spec.model.layers = config.model_spec.model.layers[:1]
        config.checkpoint.enable = self.saves
        config.training.max_norm = 1e9
        config.training.mixed_precision_param = "float32"
        if self.chunks == 1:
            config.loss = CrossEntropyLoss.Config(global_vocab_size=2048)
        else:
            config.loss.num_chunks = self.chunks
        if self.adjust is not None:
            self.adjust(config)
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

    from torch_commhook import attach
    from torch_commhook.cli.hook_expression import parse_hook

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


def _as_a_loop(rank: int, replicas: int) -> dict[str, Any]:
    from torch_commhook.integrations.torchtitan import attach_to

    run = Run(replicas)
    handle = attach_to(run.trainer, HOOK)
    run.trainer.train()
    gradients, parameters, sent = loop(rank, run, HOOK)
    found = {
        "gradients": all(map(same, run.gradients, gradients)),
        "parameters": same(run.parameters, parameters),
        "bytes": handle.stats().bytes_sent == sent,
        "something is sent": sent > 0,
        "something is lost": distance(run.gradients[0], gradient_of_all(run)) > 0.01,
        "steps": handle.stats().steps == len(run.gradients) == STEPS,
    }
    handle.remove()
    dist.barrier()
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_a_trainer_does_as_a_loop_does(mesh: str) -> None:
    ranks, replicas = MESHES[mesh]
    for found in launched(_as_a_loop, replicas, world_size=ranks):
        assert found == dict.fromkeys(found, True)


def _sums(rank: int, replicas: int) -> list[float]:
    from torch_commhook.integrations.torchtitan import attach_to

    found = []
    for chunks in (1, 4):
        for hook in ("allreduce()", "blockwise(bits=8)"):
            run = Run(replicas, chunks, steps=1)
            handle = attach_to(run.trainer, hook)
            run.trainer.train()
            found.append(distance(run.gradients[0], gradient_of_all(run)))
            handle.remove()
    dist.barrier()
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_are_those_of_the_loss_of_all_tokens(mesh: str) -> None:
    """torchtitan has them summed, also where a loss in chunks reduces a module's in two parts."""
    ranks, replicas = MESHES[mesh]
    for exact, near, exact_in_chunks, near_in_chunks in launched(
        _sums, replicas, world_size=ranks
    ):
        assert exact < 1e-5 and exact_in_chunks < 1e-5
        assert 1e-4 < near < 0.02 and 1e-4 < near_in_chunks < 0.02
