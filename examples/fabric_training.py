"""Train with Lightning Fabric on two processes, and save the hook's state.

python examples/fabric_training.py
"""

import tempfile

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_commhook.integrations.lightning import setup


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    x = torch.randn(1024, 64)
    loader = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    handle = setup(fabric, model, "error_feedback(blockwise(bits=4))")
    for x, y in fabric.setup_dataloaders(loader):
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()

    folder = fabric.broadcast(tempfile.mkdtemp())
    fabric.save(f"{folder}/last.ckpt", {"model": model, "hook": handle.state_dict(gather=True)})
    stats = handle.stats()
    fabric.print(f"{stats.steps} steps, {stats.compression_ratio:.1f} times less traffic")


if __name__ == "__main__":
    main()
