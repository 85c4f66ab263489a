"""A hook that one rank refuses, or attaches with buffers of any strides: all ranks hear of it."""

from __future__ import annotations

import pytest
import torch
from rank_pool import RankPool
from torch import nn

from torch_commhook import attach, hooks


class _Refused(hooks.allreduce):
    rank = 0

    def check_parameters(self, named: object) -> None:
        if self.rank == 1:
            raise ZeroDivisionError("here")


def _attach_refused(rank: int, replaces: bool) -> tuple[str, float]:
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
    return f"{raised.type.__name__}: {raised.value}", float(model.weight.grad[0, 0])  # type: ignore[index]


@pytest.mark.parametrize("replaces", [False, True])
def test_all_ranks_hear_why_one_refuses_a_hook(two_ranks: RankPool, replaces: bool) -> None:
    first, second = two_ranks.run(_attach_refused, replaces, timeout=30)
    assert "it failed on rank 1: ZeroDivisionError: here" in first[0]
    assert second[0] == "ZeroDivisionError: here"
    assert first[1] == second[1] == 0.5


def _attach_strided(rank: int) -> list[torch.Tensor]:
    model = nn.Linear(4, 4)
    model.register_buffer("strided", (torch.arange(24.0) + rank).view(4, 6)[:, ::2])
    with attach(model, hooks.allreduce()):
        model(torch.ones(1, 4)).sum().backward()
        model(torch.ones(1, 4)).sum().backward()
    return [each.detach().clone() for each in model.state_dict().values()]


def test_buffers_that_are_not_contiguous(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_attach_strided)
    assert all(map(torch.equal, first, second))
    assert torch.equal(first[-1], torch.arange(24.0).view(4, 6)[:, ::2])
