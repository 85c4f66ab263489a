"""Exchanges of sharded gradients that go on while the backward does, on the CPU."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_models import Mesh, batch, local, loss_of, on_processes, same_bits, sharded
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch_releases import since

from torch_commhook import GradBucket, PeerError, attach, hooks
from torch_commhook.memory.bucket_memory import ShardedBucket

PLACES = ["fsdp-2", "replicate-2"]


class _Late(hooks.Hook):
    """Averages, and tells nobody until the backward has come to the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        average = hooks.allreduce().average(bucket).wait()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(average.clone())
        bucket.buffer().fill_(math.nan)
        return self._late(future)

    def average_shard(self, bucket: ShardedBucket) -> torch.futures.Future[Tensor]:
        shard = hooks.allreduce().average_shard(bucket).wait()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(shard.clone())
        return self._late(future, shard.fill_(math.nan).copy_)

    def _late(
        self,
        future: torch.futures.Future[Tensor],
        write: Callable[[Tensor], Tensor] = lambda result: result,
    ) -> torch.futures.Future[Tensor]:
        late: torch.futures.Future[Tensor] = torch.futures.Future()

        def wait() -> None:
            result = future.wait()
            time.sleep(0.02)  # whoever takes it before, takes what is not there yet
            if self.may_end.wait(10):
                late.set_result(write(result))
            else:
                late.set_exception(TimeoutError("the backward did not go on"))

        threading.Thread(target=wait).start()
        return late

    def __repr__(self) -> str:
        return "late"


def _gradients(model: nn.Module) -> list[Tensor]:
    return [local(parameter.grad) for parameter in model.parameters()]


def _nothing() -> None:
    pass


def _backward(model: Any, rank: int, at_first_layer: Callable[[], None] = _nothing) -> None:
    def watch(module: nn.Module, arguments: object, output: Tensor) -> None:
        output.register_hook(lambda _: at_first_layer())

    hidden = model[0].register_forward_hook(watch)
    loss_of(model(batch(rank, 0))).backward()
    hidden.remove()


def _expected(place: str, rank: int) -> list[Tensor]:
    plain = sharded(place)
    _backward(plain, rank)
    return _gradients(plain)


@on_processes(*PLACES)
def test_the_backward_goes_on(rank: int, place: str) -> None:
    """It would wait for the hook for ever, and the hook for it."""
    expected = _expected(place, rank)
    model, hook = sharded(place), _Late()
    handle = attach(model, hook)
    for _ in range(2):
        hook.may_end.clear()
        model.zero_grad()
        _backward(model, rank, hook.may_end.set)
    handle.remove()
    assert same_bits(_gradients(model), expected)


@on_processes(*PLACES)
def test_a_hook_that_is_removed_in_the_backward(rank: int, place: str) -> None:
    """What it has begun is brought to its end."""
    expected = _expected(place, rank)
    model, hook = sharded(place), _Late()
    handle = attach(model, hook)

    def remove() -> None:
        handle.remove()
        threading.Timer(0.3, hook.may_end.set).start()

    _backward(model, rank, remove)
    assert same_bits(_gradients(model), expected)
    model.zero_grad()
    _backward(model, rank)  # without a hook
    assert same_bits(_gradients(model), expected)


@pytest.mark.parametrize(
    "why", ["cast", "gradients add up", "hook of a parameter", "hook of a module"]
)
@on_processes(*PLACES)
def test_what_is_needed_at_once_is_waited_for(rank: int, place: str, why: str) -> None:
    """Gradients are right where PyTorch goes on with what it has reduced."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if why == "cast" else None)
    found = []
    for hook in (None, hooks.allreduce(), _Late()):
        model: Any = sharded(place, mp_policy=policy)
        handle = None if hook is None else attach(model, hook)
        if isinstance(hook, _Late):
            hook.may_end.set()  # nobody is late
        seen: list[Tensor] = []
        if why == "hook of a parameter":
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda p, seen=seen: seen.append(local(p.grad))
                )
        if why == "hook of a module":
            model[1].register_full_backward_hook(
                lambda *_, last=model[4], seen=seen: seen.append(local(last.weight.grad))
            )
        for _ in range(2 if why == "gradients add up" else 1):
            _backward(model, rank)
        assert bool(seen) == why.startswith("hook of")
        found.append([*_gradients(model), *seen])
        if handle is not None:
            handle.remove()
    plain, *others = found
    assert all(same_bits(other, plain) for other in others)


@on_processes(*PLACES)
def test_one_that_fails_at_the_end(rank: int, place: str) -> None:
    """Gradients that have not come are NaN, so that nobody takes them for such."""
    model, hook = sharded(place), _Late()
    handle = attach(model, hook)
    if rank == 0:
        hook.may_end.set()
        told = "^torch_commhook: this step failed on rank 1: TimeoutError"
        with pytest.raises(PeerError, match=told):  # it has got all gradients
            _backward(model, rank)
    else:
        hook.may_end.wait = lambda _: False  # type: ignore[method-assign]
        with pytest.raises(TimeoutError, match=r"^the backward did not go on$"):
            _backward(model, rank)
        left = [local(p.grad) for p in model.parameters() if p.grad is not None]
        assert left and all(gradient.isnan().all() for gradient in left)
    hook.may_end = threading.Event()
    hook.may_end.set()
    model.zero_grad()
    _backward(model, rank)
    handle.remove()


class _Headed(nn.Module):
    """Its head, which is sharded together with its body, can run alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)


@since("2.13")
@on_processes("fsdp-2")
def test_a_part_of_a_group_that_runs_alone(rank: int, place: str) -> None:
    """From the second time on ``fully_shard`` hears of no end of the backward."""
    found = []
    for hook in (None, _Late()):
        model, mesh = _Headed(), Mesh.of(place)
        mesh.apply([model.body, model.head])
        mesh.apply(model)
        handle = None if hook is None else attach(model, hook)
        hidden = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)))
        gradients = []
        for _ in range(3):
            if hook is not None:
                hook.may_end.clear()
                threading.Timer(0.2, hook.may_end.set).start()
            model.head(hidden.detach().requires_grad_()).square().sum().backward()
            gradients.append(model.head.weight.grad.full_tensor().clone())
            model.zero_grad()
        found.append(gradients)
        if handle is not None:
            assert handle.stats().steps == 3
            handle.remove()
    assert same_bits(*found)
