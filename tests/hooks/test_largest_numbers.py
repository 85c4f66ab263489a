"""Gradients of the largest numbers: hooks' memories stay finite, and training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.unsent import add_unsent_to_errors

LARGEST = torch.finfo(torch.float32).max
HOOKS = [
    *(
        f"error_feedback({hook})"
        for hook in (
            "blockwise(8)",
            "blockwise(4)",
            "blockwise(8, symmetric=False)",
            "blockwise(8, rounding='stochastic')",
            "fp8()",
            "fp8('e5m2')",
            "sign()",
            "sign(32)",
            "topk(0.1)",
            "randomk(0.3)",
            "chunk_topk(20, 64)",
            "chunk_topk(20, 64, 4)",
            "powersgd(rank=1)",
        )
    ),
    "policy()",
    "clip(1.0, error_feedback(sign()))",
    "after(2, error_feedback(sign()), before=error_feedback(blockwise(bits=4)))",
    "local_sgd(1, hook=error_feedback(blockwise(8)))",
]


class Given(nn.Module):
    """A model that is given its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(40, 30))
        self.vector = nn.Parameter(torch.zeros(17))

    def forward(self, matrix: Tensor, vector: Tensor) -> Tensor:
        return (self.matrix * matrix).sum() + (self.vector * vector).sum()


def tensors_in(state: Any) -> Iterator[Tensor]:
    if isinstance(state, dict):
        for value in state.values():
            yield from tensors_in(value)
    elif isinstance(state, Tensor) and state.is_floating_point():
        yield state


@pytest.mark.parametrize("kind", ["module", "DDP"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.filterwarnings("ignore:.*more bytes than cast", "ignore:randomk")
@on_ranks(2)
def test_memory_stays_finite_and_training_goes_on(rank: int, hook: str, kind: str) -> None:
    given = Given()
    model = DDP(given) if kind == "DDP" else given
    handle = attach(model, parse_hook(hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for step in range(7):
        matrix = torch.randn(40, 30, generator=generator)
        vector = torch.randn(17, generator=generator)
        if rank == 0 and step < 3:
            matrix[5 * step, 7], vector[step] = LARGEST, -LARGEST
        optimizer.zero_grad()
        model(matrix, vector).backward()
        optimizer.step()
        assert all(tensor.isfinite().all() for tensor in tensors_in(handle.state_dict()))
    handle.remove()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_results_of_unused_parameters_leave_finite_errors() -> None:
    errors = [torch.full((6,), LARGEST)]
    result, used = torch.full((2, 3), LARGEST), torch.zeros(1, dtype=torch.uint8)
    add_unsent_to_errors(errors, [result], [], used, [0, 0, 0, 6, 0, -1])
    assert errors[0].isfinite().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_segment_that_moves_leaves_finite_errors(sign: int) -> None:
    parameter = torch.zeros(10)
    memory = HookMemory().memory_of_bucket([parameter], 0, lambda memory: memory.flat("error"))
    name = memory.segment("shard_error", 3, 7, 2)
    memory.tensors[name].fill_(sign * LARGEST)
    memory.fold_segments([name])
    assert memory.tensors["error"].isfinite().all()
    assert memory.tensors["error"][3:7].sign().eq(sign).all()
