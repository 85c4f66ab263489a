"""Train with the Trainer of transformers on two processes; gradients travel in 4 bits.

torchrun --nproc-per-node 2 examples/transformers_training.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from torch_commhook.integrations.transformers import CommHookTrainerCallback


def main() -> None:
    set_seed(0)
    tokens = torch.arange(256).remainder(50).unfold(0, 32, 1)
    examples = [{"input_ids": each, "labels": each} for each in tokens]
    callback = CommHookTrainerCallback("error_feedback(blockwise(bits=4))")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=20,
            per_device_train_batch_size=4,
            logging_steps=10,
            save_strategy="no",
            ddp_find_unused_parameters=False,
            report_to=[],
            use_cpu=True,
        )
        config = GPT2Config(
            vocab_size=64,
            n_embd=64,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLM",
        )
        trainer = Trainer(
            GPT2LMHeadModel(config), arguments, train_dataset=examples, callbacks=[callback]
        )
        trainer.train()
    stats = callback.handle.stats()
    if trainer.is_world_process_zero():
        print(f"{stats.steps} steps, {stats.compression_ratio:.1f} times less traffic")


if __name__ == "__main__":
    main()
