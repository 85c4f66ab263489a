"""What a hook computes, measured on this machine, and what it sends, counted among threads."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_commhook import hooks
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.native.runtime import run_hook
from torch_commhook.planning.model import Shape, square_shapes
from torch_commhook.process_group.simulated.link import Issued
from torch_commhook.testing.ranks import run_ranks
from torch_commhook.testing.simulate import simulate

#: Elements of the largest bucket that is measured: 25 MiB.
MOST_MEASURED = 25 * (1 << 20) // 4
#: Elements that are sent between threads to count the bytes, for each rank.
_MOST_COUNTED = 1 << 18
_RUNS = 5


class HookError(RuntimeError):
    """A hook that could not be run, in one sentence."""


@dataclass(frozen=True)
class Unwrapped:
    """A hook as it is in the long run.

    Attributes:
        hook: what it does with a bucket.
        every: steps in which it does so once.
        around: functions of a tensor, that go over all gradients then.
        fragments: parts of the model that are exchanged one by one in these steps.
        delay: steps during which an exchange of one goes on.
    """

    hook: Any
    every: int = 1
    around: tuple[Callable[[Tensor], object], ...] = ()
    fragments: int = 1
    delay: int = 0


def unwrap_hook(hook: Any) -> Unwrapped:
    """A hook without those around it that do not change what it does with a bucket."""
    found = Unwrapped(hook)
    while True:
        hook = found.hook
        if isinstance(hook, hooks.after):
            found = replace(found, hook=hook.hook)
        elif isinstance(hook, hooks.clip):
            around = (*found.around, torch.linalg.vector_norm)
            found = replace(found, hook=hook.hook, around=around)
        elif isinstance(hook, hooks.local_sgd):
            found = Unwrapped(
                hook.hook,
                found.every * hook.H,
                (*found.around, _Exchange(hook)),
                hook.fragments,
                hook.delay,
            )
        else:
            return found


class _Exchange:
    """What a :class:`local_sgd` does beside averaging, with the parameters of a bucket.

    It measures how far they have come, and moves the anchor and them. Fragments are measured as one
    bucket; they do so with all of it in turn.
    """

    def __init__(self, hook: hooks.local_sgd) -> None:
        self._hook = copy.copy(hook)
        self._hook.fragments = 1
        self._kept: HookMemory | None = None

    def __call__(self, parameter: Tensor) -> None:
        if self._kept is None:
            self._kept = HookMemory()
            self._kept.set_parameters([("parameter", parameter)], rank=0, world_size=1)
        memory = self._kept.memory_of_bucket([parameter], 0, self._hook.prepare)
        self._hook.unsent(memory)
        distance = self._hook.distance(memory)
        self._hook.move(memory, self._hook.means(memory, distance), mix=self._hook.mix)


def measure_pass(call: Callable[[Tensor], object], elements: int, bucket_elements: int) -> float:
    """Of something that goes over all gradients.

    Args:
        call: takes a flat float32 tensor.
        elements: of all gradients.
        bucket_elements: of that tensor, or fewer.
    """
    gradient = torch.randn(min(bucket_elements, MOST_MEASURED), dtype=torch.float32, device="cpu")
    return median_seconds(partial(call, gradient)) * elements / gradient.numel()


def median_seconds(call: Callable[[], object], *, is_cpu: bool = True) -> float:
    """Of a few calls, after two in which buffers are made.

    Args:
        call: computes on the calling thread.
        is_cpu: whether it computes on the CPU alone.
    """
    clock = compute_clock() if is_cpu else time.perf_counter
    times = []
    for _ in range(_RUNS + 2):
        begun = clock()
        call()
        times.append(clock() - begun)
    return statistics.median(times[2:])


def compute_clock() -> Callable[[], float]:
    """A clock for what the calling thread computes on the CPU, with PyTorch's threads.

    With one thread it counts the processor's time, so that other programs lengthen nothing.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def gradients_of(elements: int, model_elements: int, shards: int = 1) -> list[Tensor]:
    """Random gradients of so many elements of a model.

    Args:
        elements: of a rank.
        model_elements: of the whole model, which is mostly square matrices.
        shards: those of each matrix, of which the rank has one.
    """
    return random_gradients(square_shapes(elements, model_elements, shards))


def random_gradients(shapes: Sequence[Shape]) -> list[Tensor]:
    """Random float32 tensors of these shapes, on the CPU."""
    return [torch.randn(shape, dtype=torch.float32, device="cpu") for shape in shapes]


def count_bytes(hook: Callable[..., Any], elements: int, world_size: int, shards: int = 1) -> float:
    """Sent by each rank in a step, of ``elements`` that are one of so many shards of a model."""
    return record_traffic(hook, elements, world_size, shards)[0]


def record_traffic(
    hook: Callable[..., Any], elements: int, world_size: int, shards: int = 1
) -> tuple[float, tuple[Issued, ...]]:
    """Bytes that each rank sends in a step, and what it issues.

    Args:
        hook: averages gradients.
        elements: one of so many shards of a model.
        world_size: ranks.
        shards: as :func:`gradients_of` takes them.
    """
    # What low-rank factors send is no share of the elements: count it on matrices of the model's
    # own size, as far as memory goes.
    counted = counted_elements(elements, world_size)
    gradients = [gradients_of(counted, elements * shards, shards) for _ in range(world_size)]
    found = simulate(hook, gradients, steps=2, timeout=600)
    scale = elements / counted
    return found.wire_bytes * scale, tuple(each.scaled(scale) for each in found.issued)


def counted_elements(elements: int, world_size: int) -> int:
    """How many of a model's elements are sent between so many threads, to count the bytes."""
    return min(elements, max(_MOST_COUNTED, (1 << 24) // world_size))


def measure_seconds(
    hook: Callable[..., Any],
    elements: int,
    shapes: Sequence[Shape],
    device: torch.device | str = "cpu",
) -> float:
    """Of a step on this machine, with nothing to wait for.

    Args:
        hook: averages gradients.
        elements: that it averages.
        shapes: of gradients that it is measured with, all in one bucket.
        device: of these.
    """
    gradients = [gradient.to(device) for gradient in random_gradients(shapes)]
    measured = sum(gradient.numel() for gradient in gradients)

    def of_bucket(rank: int) -> float:
        parameters = [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients]

        def average() -> None:
            bucket = GradBucket(parameters, gradients)
            result = run_hook(hook, None, bucket).wait()
            for gradient, piece in zip(gradients, bucket.layout().views(result), strict=True):
                gradient.copy_(piece)
            if gradients[0].device.type == "cuda":
                torch.cuda.current_stream(gradients[0].device).synchronize()

        return median_seconds(average, is_cpu=gradients[0].device.type == "cpu")

    return run_ranks(of_bucket, 1, timeout=600)[0] * elements / measured
