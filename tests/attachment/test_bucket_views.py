"""Gradients that are views of their bucket, and the hooks around a communication hook."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mode_cases import TRACED_MODES, Mode, batch, equal, gradients, module, outcome
from on_ranks import on_processes, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import GradBucket, HookHandle, attach, hooks

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


# ---- hooks around a communication hook -----------------------------------------------------------


def _attached(mode: Mode) -> tuple[nn.Module, HookHandle]:
    torch._dynamo.reset()
    model = mode.wrap(module())
    return model, attach(model, hooks.cast(torch.bfloat16), **mode.attach_options)


def _step(mode: Mode, model: nn.Module, rank: int, number: int = 0) -> list[Tensor]:
    with mode.step_function(model) as step:
        model.zero_grad()
        step(batch(rank, number))
    return gradients(model)


def _is_long(mode: Mode) -> bool:
    """Compiles a backward seven times, as one of them does in ``make test``."""
    return mode.compiles_backward and not mode.fullgraph


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.long if _is_long(mode) else [], id=str(mode))
        for mode in TRACED_MODES
    ],
)
@on_processes
def test_all_stages(rank: int, mode: Mode) -> None:
    alone = module()
    alone(batch(rank, 0)).square().sum().backward()
    own = gradients(alone)
    model, handle = _attached(mode)
    plain = _step(mode, model, rank)
    halved = handle.register_buffer_prehook(lambda bucket: bucket.buffer() / 2)
    assert equal([2 * each for each in _step(mode, model, rank)], plain)
    halved.remove()

    def first_to_zero(gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        return (torch.zeros_like(gradients[0]), *([None] * (len(gradients) - 1)))

    zeroed = handle.register_prehook(first_to_zero)
    local = handle.register_posthook(lambda reduced, local: tuple(g + 1 for g in local))
    of_local = _step(mode, model, rank)
    are_zeroed = [bool((each == 1).all()) for each in of_local]
    assert any(are_zeroed)
    for is_zeroed, found, one in zip(are_zeroed, of_local, own, strict=True):
        assert is_zeroed or torch.allclose(found, one + 1)
    zeroed.remove()
    doubled = handle.register_posthook(lambda reduced, local: tuple(2 * g for g in reduced))
    for found, one in zip(_step(mode, model, rank), own, strict=True):  # in order
        assert torch.allclose(found, 2 * (one + 1))
    local.remove()
    assert equal(_step(mode, model, rank), [2 * each for each in plain])
    doubled.remove()
    seen: list[int] = []
    norms: list[Tensor] = []

    def look(bucket: GradBucket) -> None:
        seen.append(bucket.index())
        norms.append(torch.stack([p.grad.norm() for p in bucket.parameters()]).sum())

    looking = handle.register_post_accumulate_hook(look)
    total = sum(float(each.norm()) for each in _step(mode, model, rank))
    assert seen == sorted(seen) and abs(float(sum(norms)) / total - 1) < 1e-5
    looking.remove()
    assert equal(_step(mode, model, rank), plain)
    handle.remove()


def wrong_buffer_type(bucket: GradBucket) -> Any:
    return bucket.buffer().double()


def wrong_buffer_size(bucket: GradBucket) -> Any:
    return bucket.buffer()[1:]


def no_buffer(bucket: GradBucket) -> Any:
    return 3


def a_list(gradients: tuple[Tensor, ...]) -> Any:
    return list(gradients)


def too_few(gradients: tuple[Tensor, ...]) -> Any:
    return gradients[1:]


def of_another_dtype(gradients: tuple[Tensor, ...]) -> Any:
    return tuple(gradient.double() for gradient in gradients)


def no_tensor(gradients: tuple[Tensor, ...]) -> Any:
    return (1.0, *gradients[1:])


def one_for_all(reduced: tuple[Tensor, ...], local: tuple[Tensor, ...]) -> Any:
    return reduced[0]


def broadcastable(reduced: tuple[Tensor, ...], local: tuple[Tensor, ...]) -> Any:
    return tuple(gradient[:1] for gradient in reduced)


def returns(bucket: GradBucket) -> Any:
    return bucket


WRONG: list[tuple[str, Callable[..., Any], type[Exception], str]] = [
    (
        "buffer_prehook",
        wrong_buffer_type,
        RuntimeError,
        "changed the type of value .dtype was",
    ),
    ("buffer_prehook", wrong_buffer_size, RuntimeError, "changed the size of value"),
    ("buffer_prehook", no_buffer, TypeError, "expected Tensor, but hook returned 'int'"),
    ("prehook", a_list, TypeError, "expected tuple, but hook returned 'list'"),
    ("prehook", too_few, RuntimeError, "incorrect number of values .got [0-9], but expected"),
    ("prehook", of_another_dtype, RuntimeError, "value 0: hook has changed the type of value"),
    ("prehook", no_tensor, TypeError, "value 0: expected Tensor, but hook returned 'float'"),
    ("posthook", one_for_all, TypeError, "expected tuple, but hook returned"),
    ("posthook", broadcastable, RuntimeError, "value 0: hook has changed the size of value"),
    ("post_accumulate_hook", returns, RuntimeError, "should return None, but returned"),
]


@pytest.mark.parametrize(
    "mode",
    [
        mode
        for mode in TRACED_MODES
        if not mode.fullgraph and (mode.model == "module" or not mode.compiles_backward)
    ],
    ids=str,
)
@on_processes
def test_what_they_return_is_checked(rank: int, mode: Mode) -> None:
    model, handle = _attached(mode)
    plain = _step(mode, model, rank)
    for stage, hook, kind, pattern in WRONG:
        registered = getattr(handle, f"register_{stage}")(hook)
        message = outcome(lambda: _step(mode, model, rank))
        registered.remove()
        assert message.startswith(f"{kind.__name__}: ") and re.search(pattern, message), message
        assert f"'test_bucket_views.{hook.__name__}'" in message
        assert re.search(r"on bucket \d of \d", message), message
        assert equal(_step(mode, model, rank), plain), hook.__name__
    handle.remove()
