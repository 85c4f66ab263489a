"""Gradients that are views of their bucket, and what a user may do to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from on_ranks import on_processes, on_ranks
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


@pytest.mark.parametrize("cpp", [False, True], ids=["python", "cpp"])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
@on_ranks(2)
def test_a_view_that_has_left_its_bucket(
    rank: int, move: Callable[[nn.Module], None], cpp: bool
) -> None:
    model = Linear()
    hook = hooks.cpp("allreduce") if cpp else hooks.allreduce()
    attach(model, hook, gradient_as_bucket_view=True)
    model(1.0 + rank).backward()
    move(model)
    for _ in range(2):
        model(1.0 + rank).backward()
        assert [float(p.grad.mean()) for p in model.parameters()] == [1.5] * 3
        model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("cpp", [False, True], ids=["python", "cpp"])
@on_ranks(2)
def test_a_parameter_that_no_rank_uses_keeps_its_gradient(rank: int, cpp: bool) -> None:
    """Rank 0 used it in the step before."""
    model = Linear()
    hook = hooks.cpp("cast") if cpp else hooks.error_feedback(hooks.sign())
    attach(model, hook, gradient_as_bucket_view=True)
    model(1.0 + rank).backward()
    model.zero_grad(set_to_none=False)
    model(0.3 + rank, (0, 1, 2) if rank == 0 else (0, 1)).backward()
    last = model.weights[2]
    before = last.grad.clone()
    model(0.3 + rank, (0, 1)).backward()
    assert torch.equal(last.grad, before)


@on_ranks(2)
def test_a_rank_that_has_joined_keeps_its_gradients(rank: int) -> None:
    model = Linear()
    handle = attach(model, hooks.allreduce(), gradient_as_bucket_view=True)
    with handle.join():
        for _ in range(1 + 2 * rank):
            model.zero_grad(set_to_none=False)
            model(1.0).backward()
    assert [float(p.grad.mean()) for p in model.parameters()] == [0.5 if rank else 1.0] * 3


@pytest.mark.parametrize("move", MOVES[:2], ids=lambda move: move.__name__)
@on_ranks(2)
def test_ddp_with_a_view_that_has_left_its_bucket(
    rank: int, move: Callable[[nn.Module], None]
) -> None:
    model = Linear()
    ddp = DDP(model, gradient_as_bucket_view=True)
    attach(ddp, hooks.allreduce())
    for _ in range(2):  # the second has the buckets that stay
        ddp(1.0 + rank).backward()
    move(model)
    with pytest.raises(RuntimeError, match="outside the memory of DistributedDataParallel's buck"):
        ddp(1.0 + rank).backward()


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@on_processes
def test_ddp_forgets_what_a_failed_step_has_used(rank: int, view: bool) -> None:
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
    assert [parameter.grad is None for parameter in ddp.parameters()] == [False, False, True]


@pytest.mark.parametrize(
    "make",
    [
        hooks.allreduce,
        lambda: hooks.cpp("cast"),
        lambda: hooks.error_feedback(hooks.sign()),
        lambda: hooks.clip(0.1, hooks.cpp("cast")),
    ],
    ids=["allreduce", "cpp", "sign", "clip"],
)
@on_ranks(2)
def test_ddp_leaves_gradients_alone_that_no_rank_uses(
    rank: int, make: Callable[[], hooks.Hook]
) -> None:
    ddp = DDP(Linear(), find_unused_parameters=True, gradient_as_bucket_view=True)
    attach(ddp, make())
    for _ in range(2):
        ddp.zero_grad(set_to_none=False)
        ddp(1.0 + rank).backward()
    last = ddp.module.weights[2]
    last.grad.fill_(0.3 + rank)  # another number on each rank, and none of 16 bits
    before = last.grad.clone()
    for weight in ddp.module.weights[:2]:
        weight.grad.zero_()
    ddp(1.0 + rank, (0, 1)).backward()
    assert torch.equal(last.grad, before) and ddp.module.weights[0].grad.ne(0).all()
