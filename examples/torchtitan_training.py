"""Train a small Llama with torchtitan and a hook.

    torchrun --nproc-per-node 2 examples/torchtitan_training.py

``--replicas 2`` trains whole replicas instead of shards, and the hook averages across them. A
second run resumes from the checkpoint of the first run, including the hook's state.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from torch_commhook.integrations.torchtitan import attach_to


class Counting(BaseDataLoader):
    """Sequences of consecutive numbers from a random start."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **rest: Any
    ) -> None:
        self.shape = local_batch_size, seq_len
        self.name = f"rank{dp_rank}"  # the key in a checkpoint, which holds all ranks' states
        self.generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        batch, length = self.shape
        positions = torch.arange(length).expand(batch, -1)
        while True:
            start = torch.randint(256, (batch, 1), generator=self.generator)
            tokens = (start + torch.arange(length + 1)) % 256
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {self.name: self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.set_state(state_dict[self.name])


class Bytes(BaseTokenizer):
    """Each byte is a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **rest: Any) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


def configured(replicas: int, steps: int, folder: str) -> Trainer.Config:
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        tokenizer=Bytes.Config(),
        dataloader=Counting.Config(),
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
        ),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=64,
            steps=steps,
            disable_cuda_graphs=True,  # a graph would replay the hook's first call
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=replicas, spmd_backend="partial_dtensor"
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=5, last_save_model_only=False, keep_latest_k=2
        ),
        dump_folder=folder,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hook", default="error_feedback(blockwise(bits=4))")
    parser.add_argument("--folder", default="outputs")
    options = parser.parse_args()
    init_logger()
    trainer = configured(options.replicas, options.steps, options.folder).build()
    handle = attach_to(trainer, options.hook)
    trainer.train()
    if dist.get_rank() == 0:
        print(f"step {trainer.step}: {handle.stats().bytes_sent} bytes of gradients were sent")
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
