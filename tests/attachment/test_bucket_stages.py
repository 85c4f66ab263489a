"""The hooks around a communication hook: called, checked and named alike in every mode."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mode_cases import batch, module
from modes import TRACED_MODES, Mode
from rank_pool import RankPool
from torch import Tensor, nn

from torch_commhook import GradBucket, HookHandle, attach, hooks


def _attached(mode: Mode) -> tuple[nn.Module, HookHandle]:
    torch._dynamo.reset()
    model = mode.wrap(module())
    return model, attach(model, hooks.cast(torch.bfloat16), **mode.attach_options)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def _step(mode: Mode, model: nn.Module, rank: int, number: int = 0) -> list[Tensor]:
    with mode.step_function(model) as step:
        model.zero_grad()
        step(batch(rank, number))
    return _gradients(model)


def _all_stages(rank: int, mode: Mode) -> dict[str, bool]:
    model, handle = _attached(mode)
    plain = _step(mode, model, rank)
    halved = handle.register_buffer_prehook(lambda bucket: bucket.buffer() / 2)
    buffers = _step(mode, model, rank)
    halved.remove()

    def first_to_zero(gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        return (torch.zeros_like(gradients[0]), *([None] * (len(gradients) - 1)))

    zeroed = handle.register_prehook(first_to_zero)
    local = handle.register_posthook(lambda reduced, local: tuple(g + 1 for g in local))
    of_local = _step(mode, model, rank)
    zeroed.remove()
    doubled = handle.register_posthook(lambda reduced, local: tuple(2 * g for g in reduced))
    in_order = _step(mode, model, rank)
    local.remove()
    of_reduced = _step(mode, model, rank)
    doubled.remove()
    seen: list[int] = []
    norms: list[Tensor] = []

    def look(bucket: GradBucket) -> None:
        seen.append(bucket.index())
        norms.append(torch.stack([p.grad.norm() for p in bucket.parameters()]).sum())

    looking = handle.register_post_accumulate_hook(look)
    final = _step(mode, model, rank)
    looking.remove()
    again = _step(mode, model, rank)
    handle.remove()
    alone = module()
    alone(batch(rank, 0)).square().sum().backward()
    own = _gradients(alone)
    total = sum(float(g.norm()) for g in final)
    return {
        "buffer pre-hook": _all(torch.equal(2 * a, b) for a, b in zip(buffers, plain, strict=True)),
        "pre-hook": any(bool((g == 1).all()) for g in of_local),
        "local": _all(
            bool((g == 1).all()) or torch.allclose(g, o + 1)
            for g, o in zip(of_local, own, strict=True)
        ),
        "in order": _all(
            torch.allclose(g, 2 * (o + 1)) for g, o in zip(in_order, own, strict=True)
        ),
        "reduced": _all(torch.equal(a, 2 * b) for a, b in zip(of_reduced, plain, strict=True)),
        "post-accumulate": seen == sorted(seen) and abs(float(sum(norms)) / total - 1) < 1e-5,
        "removed": _all(torch.equal(a, b) for a, b in zip(again, plain, strict=True)),
    }


def _all(checks: Any) -> bool:
    return all(list(checks))


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
def test_all_stages(two_ranks: RankPool, mode: Mode) -> None:
    for result in two_ranks.run(_all_stages, mode, timeout=180):
        assert [stage for stage, right in result.items() if not right] == []


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


def _errors(rank: int, mode: Mode) -> list[str]:
    model, handle = _attached(mode)
    plain = _step(mode, model, rank)
    wrong = []
    for stage, hook, kind, _ in WRONG:
        registered = getattr(handle, f"register_{stage}")(hook)
        try:
            _step(mode, model, rank)
            wrong.append("no exception")
        except kind as error:
            wrong.append(str(error))
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")
        registered.remove()
        after = _step(mode, model, rank)
        if not _all(torch.equal(a, b) for a, b in zip(after, plain, strict=True)):
            wrong[-1] = f"the next step after {hook.__name__} is wrong"
    handle.remove()
    return wrong


@pytest.mark.parametrize(
    "mode",
    [
        mode
        for mode in TRACED_MODES
        if not mode.fullgraph and (mode.model == "module" or not mode.compiles_backward)
    ],
    ids=str,
)
def test_what_they_return_is_checked(two_ranks: RankPool, mode: Mode) -> None:
    for messages in two_ranks.run(_errors, mode, timeout=180):
        for message, (_, hook, _, pattern) in zip(messages, WRONG, strict=True):
            assert re.search(pattern, message), message
            assert f"'test_bucket_stages.{hook.__name__}'" in message
            assert re.search(r"on bucket \d of \d", message), message
