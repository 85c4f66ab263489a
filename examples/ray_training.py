"""Train on two workers of Ray with a hook.

    python examples/ray_training.py

A second run with the same ``--folder`` and more ``--steps`` resumes from the checkpoint of the
first run, including the hook's state.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch import Tensor, nn

from torch_commhook import attach, hooks

FILE = "training.pt"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))


def make_batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Random inputs, and for each the number of the quarter with the largest sum."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(32, 16, generator=generator)
    return inputs, inputs.view(32, 4, 4).sum(2).argmax(1)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def make_hook() -> hooks.Hook:
    return hooks.error_feedback(hooks.blockwise(bits=4))


def train(config: dict[str, Any]) -> None:
    """Train on one worker; each worker calls it."""
    model = ray.train.torch.prepare_model(make_model())  # wrapped in DistributedDataParallel
    optimizer = make_optimizer(model)
    handle = attach(model, make_hook())
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / FILE, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["hook"])
        start = saved["step"]
    rank = ray.train.get_context().get_world_rank()
    for step in range(start, config["steps"]):
        inputs, labels = make_batch(rank, step)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    saved = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "hook": handle.state_dict(gather=True),  # of all workers; all must call it
        "step": config["steps"],
    }
    stats = handle.stats()
    metrics = {"loss": loss.item(), "bytes_sent": stats.bytes_sent, "steps": stats.steps}
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            torch.save(saved, Path(folder) / FILE)
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
        else:
            ray.train.report(metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=Path("ray_results"))
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False)  # on a cluster: ray.init()
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"steps": options.steps},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name="commhook", storage_path=str(options.folder.resolve())),
    )
    result = trainer.fit()
    loss, sent, steps = (result.metrics[name] for name in ("loss", "bytes_sent", "steps"))
    print(f"loss {loss:.4f}, {sent} bytes of gradients in {steps} steps")
    print(f"checkpoint: {result.checkpoint.path}")
    ray.shutdown()


if __name__ == "__main__":
    main()
