"""Exchanges of sharded gradients that go on while the backward does, on the CPU."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from sharded_models import device_mesh
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch_releases import since

from torch_commhook import GradBucket, attach, hooks
from torch_commhook.memory.sharded_bucket import ShardedBucket

WAYS = ("fsdp", "replicate")


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


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def _sharded(way: str, policy: MixedPrecisionPolicy | None = None) -> nn.Sequential:
    mesh = device_mesh((dist.get_world_size(),), ("ranks",))
    model = _net()
    apply = replicate if way == "replicate" else fully_shard
    settings = {} if policy is None else {"mp_policy": policy}
    for module in model:
        if isinstance(module, nn.Linear):
            apply(module, mesh=mesh, **settings)
    apply(model, mesh=mesh, **settings)
    return model


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.full_tensor().clone() for parameter in model.parameters()]


def _backward(model: nn.Sequential, rank: int, at_first_layer: Callable[[], None]) -> None:
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))

    def watch(module: nn.Module, arguments: object, output: Tensor) -> None:
        output.register_hook(lambda _: at_first_layer())

    hidden = model[0].register_forward_hook(watch)
    model(inputs).square().sum().backward()
    hidden.remove()


def _is_beside(rank: int, way: str) -> bool:
    plain = _sharded(way)
    _backward(plain, rank, lambda: None)
    model, hook = _sharded(way), _Late()
    handle = attach(model, hook)
    for _ in range(2):
        hook.may_end.clear()
        model.zero_grad()
        _backward(model, rank, hook.may_end.set)
    handle.remove()
    return all(map(torch.equal, _gradients(model), _gradients(plain)))


@pytest.mark.parametrize("way", WAYS)
def test_the_backward_goes_on(two_ranks: RankPool, way: str) -> None:
    """It would wait for the hook for ever, and the hook for it."""
    assert two_ranks.run(_is_beside, way) == [True, True]


def _is_removed_in_it(rank: int, way: str) -> bool:
    plain = _sharded(way)
    _backward(plain, rank, lambda: None)
    model, hook = _sharded(way), _Late()
    handle = attach(model, hook)

    def remove() -> None:
        handle.remove()
        threading.Timer(0.3, hook.may_end.set).start()

    _backward(model, rank, remove)
    same = all(map(torch.equal, _gradients(model), _gradients(plain)))
    model.zero_grad()
    _backward(model, rank, lambda: None)  # without a hook
    return same and all(map(torch.equal, _gradients(model), _gradients(plain)))


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_that_is_removed_in_the_backward(two_ranks: RankPool, way: str) -> None:
    """What it has begun is brought to its end."""
    assert two_ranks.run(_is_removed_in_it, way) == [True, True]


def _waits(rank: int, way: str, why: str) -> bool:
    """Whether gradients are right where PyTorch goes on with what it has reduced."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) if why == "cast" else None
    found = []
    for hook in (None, hooks.allreduce(), _Late()):
        model = _sharded(way, policy)
        handle = None if hook is None else attach(model, hook)
        if isinstance(hook, _Late):
            hook.may_end.set()  # nobody is late
        if why == "hook of a parameter":
            seen: list[Tensor] = []
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda p, seen=seen: seen.append(p.grad.to_local().clone())
                )
        if why == "hook of a module":
            seen = []
            model[1].register_full_backward_hook(
                lambda *_, last=model[4], seen=seen: seen.append(
                    last.weight.grad.to_local().clone()
                )
            )
        for _ in range(2 if why == "gradients add up" else 1):
            _backward(model, rank, lambda: None)
        found.append(_gradients(model) + (seen if why.startswith("hook of") else []))
        if handle is not None:
            handle.remove()
    plain, *others = found
    return all(all(map(torch.equal, other, plain)) for other in others)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "why", ["cast", "gradients add up", "hook of a parameter", "hook of a module"]
)
def test_what_is_needed_at_once_is_waited_for(two_ranks: RankPool, way: str, why: str) -> None:
    assert two_ranks.run(_waits, way, why) == [True, True]


def _fails_late(rank: int, way: str) -> list[str]:
    """What each backward raises where the last exchange of the first fails on rank 1."""
    model, hook = _sharded(way), _Late()
    handle = attach(model, hook)
    found = []
    for step in range(2):
        model.zero_grad()
        try:
            if step == 0 and rank == 1:
                hook.may_end.wait = lambda _: False  # type: ignore[method-assign]
            else:
                hook.may_end = threading.Event()
                hook.may_end.set()
            _backward(model, rank, lambda: None)
        except (RuntimeError, TimeoutError) as error:
            found.append(f"{type(error).__name__}: {error}")
            if rank == 1:  # the other one has got all of them
                left = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
                assert left and all(gradient.isnan().all() for gradient in left)
        else:
            found.append("nothing")
    handle.remove()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_one_that_fails_at_the_end(two_ranks: RankPool, way: str) -> None:
    """Gradients that have not come are NaN, so that nobody takes them for such."""
    first, second = two_ranks.run(_fails_late, way)
    assert second == ["TimeoutError: the backward did not go on", "nothing"]
    assert first[0].startswith(
        "PeerError: torch_commhook: this step failed on rank 1: TimeoutError"
    )
    assert first[1] == "nothing"


class _Headed(nn.Module):
    """Its head, which is sharded together with its body, can run alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)


def _heads_alone(rank: int) -> bool:
    """From the second time on ``fully_shard`` hears of no end of the backward."""
    found = []
    for hook in (None, _Late()):
        model = _Headed()
        mesh = device_mesh((dist.get_world_size(),), ("ranks",))
        fully_shard([model.body, model.head], mesh=mesh)
        fully_shard(model, mesh=mesh)
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
    return all(map(torch.equal, *found))


@since("2.13")
def test_a_part_of_a_group_that_runs_alone(two_ranks: RankPool) -> None:
    assert two_ranks.run(_heads_alone) == [True, True]
