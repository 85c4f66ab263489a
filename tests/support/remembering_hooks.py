"""Hooks with memory, and a float32 model on the CPU, independent of default settings."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_commhook import codecs, hooks
from torch_commhook.hooks.expressions import parse_hook

#: One for each codec.
WITH_ERROR_FEEDBACK = [
    "error_feedback(blockwise(bits=4))",
    "error_feedback(blockwise(bits=2))",
    "error_feedback(blockwise(rounding='stochastic'))",
    "error_feedback(fp8())",
    "error_feedback(sign())",
    "error_feedback(topk(0.1))",
    "error_feedback(randomk(0.1))",
    "error_feedback(chunk_topk(8, 64))",
]

#: All hooks with memory, and those with buffers.
HOOKS = [
    "allreduce()",
    "cast()",
    "error_feedback(powersgd(rank=2))",
    *WITH_ERROR_FEEDBACK,
    "adaptive(20000, every=2)",
    "hierarchical",
    "error_feedback(policy([('0.*', allreduce()), ('1.*', topk(0.1))], powersgd()))",
    "clip(0.1, error_feedback(sign()))",
    "momentum(topk(0.1), beta=0.9)",
    "error_feedback(sign(), decay=0.75, dtype=torch.bfloat16)",
    "after(1, error_feedback(sign()), before=error_feedback(powersgd()))",
    "local_sgd(2, hook=error_feedback(blockwise(bits=4)))",
    "local_sgd(2, hook=error_feedback(topk(0.1)), error_reset=True)",
    "local_sgd(4, hook=error_feedback(blockwise(bits=4)), fragments=2, delay=1, mix=0.5)",
    "error_feedback(powersgd(rank=2), dtype=torch.bfloat16)",
    "local_sgd(2, hook=error_feedback(topk(0.1), dtype=torch.bfloat16), error_reset=True)",
]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    sizes = [(24, 40), (40, 40), (40, 24)]
    return nn.Sequential(*(nn.Linear(*size, dtype=torch.float32, device="cpu") for size in sizes))


def batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(10 * number + rank)
    return torch.randn(4, 24, generator=generator, dtype=torch.float32, device="cpu")


def hook_of(text: str) -> hooks.Hook:
    if text != "hierarchical":
        return parse_hook(text)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    everybody = dist.new_group()
    codec = codecs.CODECS["blockwise"]()
    return hooks.error_feedback(hooks.hierarchical(codec, intra_group=alone, inter_group=everybody))


def check_same(got: list[list[Tensor]], want: list[list[Tensor]]) -> None:
    for mine, others in zip(got, want, strict=True):
        for a, b in zip(mine, others, strict=True):
            assert a.dtype == b.dtype and a.device == b.device
            assert torch.equal(a, b)
