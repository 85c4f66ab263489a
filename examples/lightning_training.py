"""Train with Lightning on two processes; gradients travel in 4 bits, with error feedback.

python examples/lightning_training.py
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_commhook.integrations.lightning import CommHookCallback


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    pl.seed_everything(0)
    x = torch.randn(1024, 64)
    loader = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), batch_size=32, shuffle=True)
    callback = CommHookCallback("error_feedback(blockwise(bits=4))")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Regression(), loader)
    stats = callback.handle.stats()
    if trainer.is_global_zero:
        print(f"{stats.steps} steps, {stats.compression_ratio:.1f} times less traffic")


if __name__ == "__main__":
    main()
