"""Train with Accelerate on two processes, and save a checkpoint with the hook's state.

torchrun --nproc-per-node 2 examples/accelerate_training.py
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_commhook.integrations.accelerate import attach_to


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    x = torch.randn(1024, 64)
    loader = DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    handle = attach_to(accelerator, model, "error_feedback(blockwise(bits=4))")
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    folder = broadcast_object_list([tempfile.mkdtemp()])[0]
    accelerator.save_state(folder)
    stats = handle.stats()
    accelerator.print(f"{stats.steps} steps, {stats.compression_ratio:.1f} times less traffic")
    accelerator.end_training()


if __name__ == "__main__":
    main()
