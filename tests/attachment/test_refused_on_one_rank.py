"""A hook that one rank refuses, or attaches with buffers of any strides: all ranks hear of it."""

from __future__ import annotations

import pytest
import torch
from on_ranks import of_all_ranks, on_processes
from torch import nn

from torch_commhook import attach, hooks


class _Refused(hooks.allreduce):
    rank = 0

    def check_parameters(self, named: object) -> None:
        if self.rank == 1:
            raise ZeroDivisionError("here")


@pytest.mark.parametrize("replaces", [False, True])
@on_processes
def test_all_ranks_hear_why_one_refuses_a_hook(rank: int, replaces: bool) -> None:
    hook = _Refused()
    hook.rank = rank
    model = nn.Linear(4, 4)
    with pytest.raises((RuntimeError, ZeroDivisionError)) as raised:
        if replaces:
            with attach(model, hooks.allreduce()) as handle:
                handle.replace(hook)
        else:
            attach(model, hook)
    with attach(model, hooks.allreduce()):
        model(torch.full((1, 4), float(rank))).sum().backward()
    said = f"{raised.type.__name__}: {raised.value}"
    if rank == 0:
        assert "it failed on rank 1: ZeroDivisionError: here" in said
    else:
        assert said == "ZeroDivisionError: here"
    assert float(model.weight.grad[0, 0]) == 0.5  # type: ignore[index]


@on_processes
def test_buffers_that_are_not_contiguous(rank: int) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("strided", (torch.arange(24.0) + rank).view(4, 6)[:, ::2])
    with attach(model, hooks.allreduce()):
        model(torch.ones(1, 4)).sum().backward()
        model(torch.ones(1, 4)).sum().backward()
    for first, second in zip(*of_all_ranks(list(model.state_dict().values())), strict=True):
        assert torch.equal(first, second)
    assert torch.equal(model.strided, torch.arange(24.0).view(4, 6)[:, ::2])
