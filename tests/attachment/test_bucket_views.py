"""Gradients that are views of their bucket, and what a user may do to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks

SHAPES = [(6, 5), (40,), (3, 4)]


class Linear(nn.Module):
    """A loss whose gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, gradient: float, used: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        return gradient * sum(self.weights[i].sum() for i in used)


def data_is_replaced(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.data = torch.zeros_like(parameter)


def memory_is_replaced(model: nn.Module) -> None:
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.grad.set_(torch.zeros_like(parameter))


def model_is_converted_and_back(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)
    model.to(torch.float64).to(torch.float32)


def memory_is_freed(model: nn.Module) -> None:
    model.weights[0].grad.untyped_storage().resize_(0)
    model.zero_grad(set_to_none=True)


MOVES = [data_is_replaced, memory_is_replaced, model_is_converted_and_back, memory_is_freed]


def _after_a_move(rank: int, move: Callable[[nn.Module], None], cpp: bool) -> list[float]:
    model = Linear()
    hook = hooks.cpp("allreduce") if cpp else hooks.allreduce()
    attach(model, hook, gradient_as_bucket_view=True)
    model(1.0 + rank).backward()
    move(model)
    found = []
    for _ in range(2):
        model(1.0 + rank).backward()
        found += [float(p.grad.mean()) for p in model.parameters()]
        model.zero_grad(set_to_none=False)
    return found


@pytest.mark.parametrize("cpp", [False, True], ids=["python", "cpp"])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_a_view_that_has_left_its_bucket(
    two_ranks: RankPool, move: Callable[[nn.Module], None], cpp: bool
) -> None:
    assert two_ranks.run(_after_a_move, move, cpp) == [[1.5] * 6] * 2


def _unused_later(rank: int, cpp: bool) -> list[list[float]]:
    """A parameter that rank 0 used in one step and no rank in the next."""
    model = Linear()
    hook = hooks.cpp("cast") if cpp else hooks.error_feedback(hooks.sign())
    attach(model, hook, gradient_as_bucket_view=True)
    model(1.0 + rank).backward()
    model.zero_grad(set_to_none=False)
    model(0.3 + rank, (0, 1, 2) if rank == 0 else (0, 1)).backward()
    last = model.weights[2]
    before = last.grad.clone()
    model(0.3 + rank, (0, 1)).backward()
    return [before.flatten().tolist(), last.grad.flatten().tolist()]


@pytest.mark.parametrize("cpp", [False, True], ids=["python", "cpp"])
def test_a_parameter_that_no_rank_uses_keeps_its_gradient(two_ranks: RankPool, cpp: bool) -> None:
    for before, after in two_ranks.run(_unused_later, cpp):
        assert before == after


def _joined(rank: int) -> list[float]:
    model = Linear()
    handle = attach(model, hooks.allreduce(), gradient_as_bucket_view=True)
    with handle.join():
        for _ in range(1 + 2 * rank):
            model.zero_grad(set_to_none=False)
            model(1.0).backward()
    return [float(p.grad.mean()) for p in model.parameters()]


def test_a_rank_that_has_joined_keeps_its_gradients(two_ranks: RankPool) -> None:
    assert two_ranks.run(_joined) == [[1.0] * 3, [0.5] * 3]


def _ddp_after_a_move(rank: int, move: Callable[[nn.Module], None]) -> str:
    model = Linear()
    ddp = DDP(model, gradient_as_bucket_view=True)
    attach(ddp, hooks.allreduce())
    for _ in range(2):  # the second has the buckets that stay
        ddp(1.0 + rank).backward()
    move(model)
    try:
        ddp(1.0 + rank).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("move", MOVES[:2], ids=lambda move: move.__name__)
def test_ddp_with_a_view_that_has_left_its_bucket(
    two_ranks: RankPool, move: Callable[[nn.Module], None]
) -> None:
    for message in two_ranks.run(_ddp_after_a_move, move):
        assert "is outside the memory of DistributedDataParallel's bucket" in message


def _unused_after_a_failure(rank: int, view: bool) -> list[bool]:
    ddp = DDP(Linear(), find_unused_parameters=True, gradient_as_bucket_view=view)
    handle = attach(ddp, hooks.allreduce())
    ddp(1.0).backward()
    ddp.zero_grad()

    def fail(bucket: object) -> None:
        if rank == 0:
            raise ValueError("boo")

    failing = handle.register_buffer_prehook(fail)
    with pytest.raises((ValueError, RuntimeError)):
        ddp(1.0).backward()
    failing.remove()
    ddp.zero_grad()
    ddp(1.0, (0, 1)).backward()
    return [parameter.grad is None for parameter in ddp.parameters()]


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_ddp_forgets_what_a_failed_step_has_used(two_ranks: RankPool, view: bool) -> None:
    assert two_ranks.run(_unused_after_a_failure, view) == [[False, False, True]] * 2


def _ddp_unused(rank: int, name: str) -> list[bool]:
    """Whether a gradient that no rank uses stays, on DDP with views."""
    ddp = DDP(Linear(), find_unused_parameters=True, gradient_as_bucket_view=True)
    made = {
        "allreduce": hooks.allreduce,
        "cpp": lambda: hooks.cpp("cast"),
        "sign": lambda: hooks.error_feedback(hooks.sign()),
        "clip": lambda: hooks.clip(0.1, hooks.cpp("cast")),
    }
    attach(ddp, made[name]())
    for _ in range(2):
        ddp.zero_grad(set_to_none=False)
        ddp(1.0 + rank).backward()
    last = ddp.module.weights[2]
    last.grad.fill_(0.3 + rank)  # another number on each rank, and none of 16 bits
    before = last.grad.clone()
    for weight in ddp.module.weights[:2]:
        weight.grad.zero_()
    ddp(1.0 + rank, (0, 1)).backward()
    return [bool(last.grad.equal(before)), bool(ddp.module.weights[0].grad.ne(0).all())]


@pytest.mark.parametrize("name", ["allreduce", "cpp", "sign", "clip"])
def test_ddp_leaves_gradients_alone_that_no_rank_uses(two_ranks: RankPool, name: str) -> None:
    assert two_ranks.run(_ddp_unused, name) == [[True, True]] * 2
