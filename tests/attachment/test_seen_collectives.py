"""Bytes of hooks that call collectives of ``torch.distributed`` themselves."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from group_doubles import completed
from mode_cases import of_a_work
from on_ranks import on_processes
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import GradBucket, attach, collectives, hooks
from torch_commhook.process_group import RecordingProcessGroup, WrapperProcessGroup
from torch_commhook.step import seen_collectives

_NUMEL = 64 * 32 + 32
_FP32 = 4 * _NUMEL  # what each of two ranks sends of all gradients


def waits(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    dist.all_reduce(buffer)
    return completed(buffer / 2)


def returns_at_once(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / 2)


def gathers(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    rows = [torch.empty_like(bucket.buffer()) for _ in range(2)]
    dist.all_gather(rows, bucket.buffer())
    return completed(torch.stack(rows).mean(0))


def in_segments(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    own = torch.empty(bucket.buffer().numel() // 2)
    dist.reduce_scatter_tensor(own, bucket.buffer())
    whole = torch.empty_like(bucket.buffer())
    dist.all_gather_into_tensor(whole, own / 2)
    return completed(whole)


def exchanges(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    got = torch.empty_like(bucket.buffer())
    half = got.numel() // 2
    dist.all_to_all_single(got, bucket.buffer(), [half, half], [half, half])
    mean = (got[:half] + got[half:]) / 2
    rows = [torch.empty_like(mean) for _ in range(2)]
    dist.all_gather(rows, mean)
    return completed(torch.cat(rows))


def functionally(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    total = functional.all_reduce(bucket.buffer(), "sum", dist.group.WORLD)
    return completed(functional.wait_tensor(total) / 2)


def over_the_models_group(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=bucket.process_group())
    return completed(buffer / 2)


class InAClass(hooks.Hook):
    """A hook of the library's class that calls a function."""

    is_lossy = True

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return self.function(None, bucket)

    def __repr__(self) -> str:
        return "InAClass()"


COUNTED: dict[str, Callable[[], Any]] = {
    "waits": lambda: waits,
    "returns at once": lambda: returns_at_once,
    "gathers": lambda: gathers,
    "in segments": lambda: in_segments,
    "exchanges": lambda: exchanges,
    "functional": lambda: functionally,
    "the model's group": lambda: over_the_models_group,
    "of a class": lambda: InAClass(returns_at_once),
    "inside of another": lambda: hooks.clip(1e9, hook=InAClass(waits)),
    "PyTorch's": lambda: default_hooks.allreduce_hook,
}


def late(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A callback issues the second half; of rank 0 on another thread."""
    if dist.get_rank() == 1:
        time.sleep(0.05)
    half = bucket.buffer().numel() // 2
    buffer = bucket.buffer()

    def second(_: Any) -> torch.Tensor:
        dist.all_reduce(buffer[half:])
        return buffer / 2

    return dist.all_reduce(buffer[:half], async_op=True).get_future().then(second)


def _train(rank: int, hook: Any, state: Any, in_ddp: bool, steps: int = 3) -> list[Any]:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(64, 32)
    if in_ddp:
        model = DDP(model)
    handle = attach(model, hook, state=state)
    found: list[Any] = []
    for _ in range(steps):
        model.zero_grad()
        model(torch.full((2, 64), float(rank))).sum().backward()
        metric = torch.ones(1)
        dist.all_reduce(metric)  # between steps, which is no hook's
        stats = handle.stats()
        found.append((stats.bytes_sent, stats.bytes_sent_last_step))
    gradient = next(model.parameters()).grad
    assert gradient is not None and torch.allclose(gradient, torch.ones_like(gradient))
    handle.remove()
    return found


in_both = pytest.mark.parametrize("in_ddp", [False, True], ids=["module", "DDP"])


@in_both
@pytest.mark.parametrize("name", COUNTED)
@on_processes
def test_what_a_hook_sends_is_counted(rank: int, name: str, in_ddp: bool) -> None:
    found = _train(rank, COUNTED[name](), None, in_ddp)
    assert found == [(_FP32 * step, _FP32) for step in (1, 2, 3)]


@in_both
@on_processes
def test_bytes_that_a_callback_sends_are_not_made_up(rank: int, in_ddp: bool) -> None:
    found = _train(rank, late, None, in_ddp)
    if rank == 0:
        assert found == [(None, None)] * 3
    # A callback that runs at once, within the hook, is seen.
    assert all(sent in (None, _FP32 * step) for step, (sent, _) in enumerate(found, 1))


@in_both
@on_processes
def test_pytorchs_powersgd_is_known_until_it_compresses(rank: int, in_ddp: bool) -> None:
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    found = _train(rank, powerSGD_hook.powerSGD_hook, state, in_ddp, steps=4)
    factors = 4 * (64 + 32 + 32)  # of rank 1, with the bias
    assert found[0] == (_FP32, _FP32)
    # Callbacks that run at once, within the hook, are seen.
    assert found[-1][0] in (None, 2 * _FP32 + 2 * factors)
    assert found[-1][1] in (None, factors)


@on_processes
def test_nothing_is_counted_twice(rank: int) -> None:
    """Recording groups, and collectives of the library, count for themselves."""
    wrapper = WrapperProcessGroup(dist.group.WORLD)
    recording = RecordingProcessGroup(dist.group.WORLD)

    def of_a_wrapper(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        wrapper.allreduce([buffer]).wait()
        return completed(buffer / 2)

    def of_a_recording(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        recording.allreduce([buffer]).wait()
        return completed(buffer / 2)

    def of_the_library(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return collectives.all_reduce(bucket.buffer() / 2)

    for hook in (of_a_wrapper, of_a_recording, of_the_library):
        assert _train(rank, hook, None, False)[-1] == (3 * _FP32, _FP32)


@on_processes
def test_a_hook_with_compiled_code(rank: int) -> None:
    """No mode of PyTorch's is left on, and a hook's compiled code stays compiled."""
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    @torch.compile(backend=backend)
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        dist.all_reduce(buffer)
        return completed(halved(buffer))

    found = _train(rank, hook, None, False)
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode

    assert not is_in_torch_dispatch_mode()
    assert found[-1] == (3 * _FP32, _FP32) and len(compiled) == 1


def test_a_group_that_tells_nothing_any_more() -> None:
    class Failed:
        def _get_sequence_number_for_group(self) -> int:
            raise RuntimeError("no backend")

    group: Any = Failed()
    baseline = seen_collectives._Baseline(weakref.ref(group), 3, 0)
    assert seen_collectives._unseen([baseline]) < 0
    del group
    assert seen_collectives._unseen([baseline]) == 0


@on_processes
def test_bytes_are_known_however_late_callbacks_run(rank: int) -> None:
    """A step may end before the callbacks of a complete Future have run."""

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future:
        future = of_a_work(state, bucket)
        if bucket.index() == 0:
            future.add_done_callback(lambda _: time.sleep(0.3))
        else:
            time.sleep(0.1)
        return future

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with attach(model, hook, bucket_cap_mb=0.001) as handle:
        for step in (1, 2):
            model(torch.ones(2, 16)).sum().backward()
            time.sleep(0.4)
            assert handle.stats().bytes_sent == step * 4 * 2 * (16 * 16 + 16)
        assert len(handle.stats().buckets) > 1
