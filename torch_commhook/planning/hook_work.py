"""Measures a hook's computing time on this machine, and counts its bytes among threads."""

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

#: Elements of the largest measured bucket: 25 MiB.
MOST_MEASURED = 25 * (1 << 20) // 4
#: Elements of each rank in a count of bytes between threads.
_MOST_COUNTED = 1 << 18
_RUNS = 5


class HookError(RuntimeError):
    """A hook that could not run. The text is one sentence."""


@dataclass(frozen=True)
class Unwrapped:
    """A hook as it works after its first steps.

    Attributes:
        hook: the hook that averages a bucket.
        every: the number of steps from one exchange to the next.
        around: functions of a tensor that pass over all gradients in an exchange.
        fragments: the number of parts of the model that take turns in these steps.
        delay: the number of steps during which the exchange of a part continues.
    """

    hook: Any
    every: int = 1
    around: tuple[Callable[[Tensor], object], ...] = ()
    fragments: int = 1
    delay: int = 0


def unwrap_hook(hook: Any) -> Unwrapped:
    """A hook without the hooks around it that leave its work on a bucket unchanged."""
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
    """The work of :class:`local_sgd` beside averaging, on the parameters of a bucket.

    It computes the parameters' distance from the anchor, and moves both. It works on all fragments
    as one bucket, because they take turns until all of it is done.
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
    """Seconds of a function that passes over all gradients.

    Args:
        call: the function; it takes a flat float32 tensor.
        elements: the number of elements of all gradients.
        bucket_elements: the number of elements of the tensor; a large one is measured on fewer.
    """
    gradient = torch.randn(min(bucket_elements, MOST_MEASURED), dtype=torch.float32, device="cpu")
    return median_seconds(partial(call, gradient)) * elements / gradient.numel()


def median_seconds(call: Callable[[], object], *, is_cpu: bool = True) -> float:
    """The median time of a few calls, after two calls that create buffers.

    Args:
        call: a function that computes on the calling thread.
        is_cpu: whether it computes only on the CPU.
    """
    clock = compute_clock() if is_cpu else time.perf_counter
    times = []
    for _ in range(_RUNS + 2):
        begun = clock()
        call()
        times.append(clock() - begun)
    return statistics.median(times[2:])


def compute_clock() -> Callable[[], float]:
    """A clock for the calling thread's computing on the CPU, with PyTorch's threads.

    With one thread it counts processor time, which other programs do not lengthen.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def gradients_of(elements: int, model_elements: int, shards: int = 1) -> list[Tensor]:
    """Random gradients of a part of a model that consists mostly of square matrices.

    Args:
        elements: the number of elements of a rank.
        model_elements: the number of elements of the whole model.
        shards: the number of shards of each matrix; the rank has one of them.
    """
    return random_gradients(square_shapes(elements, model_elements, shards))


def random_gradients(shapes: Sequence[Shape]) -> list[Tensor]:
    """Random float32 tensors of these shapes, on the CPU."""
    return [torch.randn(shape, dtype=torch.float32, device="cpu") for shape in shapes]


def count_bytes(hook: Callable[..., Any], elements: int, world_size: int, shards: int = 1) -> float:
    """The bytes that each rank sends in a step; arguments as for :func:`record_traffic`."""
    return record_traffic(hook, elements, world_size, shards)[0]


def record_traffic(
    hook: Callable[..., Any], elements: int, world_size: int, shards: int = 1
) -> tuple[float, tuple[Issued, ...]]:
    """The bytes that each rank sends in a step, and the calls that it issues.

    Args:
        hook: the hook.
        elements: the number of elements of a rank's shard of the model.
        world_size: the number of ranks.
        shards: the number of shards of the model, as for :func:`gradients_of`.
    """
    # The bytes of low-rank factors are not proportional to the elements. So count them on matrices
    # of the model's own size, as far as memory allows.
    counted = counted_elements(elements, world_size)
    gradients = [gradients_of(counted, elements * shards, shards) for _ in range(world_size)]
    found = simulate(hook, gradients, steps=2, timeout=600)
    scale = elements / counted
    return found.wire_bytes * scale, tuple(each.scaled(scale) for each in found.issued)


def counted_elements(elements: int, world_size: int) -> int:
    """The number of a model's elements in a count of bytes between threads."""
    return min(elements, max(_MOST_COUNTED, (1 << 24) // world_size))


def measure_seconds(
    hook: Callable[..., Any],
    elements: int,
    shapes: Sequence[Shape],
    device: torch.device | str = "cpu",
) -> float:
    """Seconds that a hook computes in a step on this machine, without communication.

    Args:
        hook: the hook.
        elements: the number of elements that it averages.
        shapes: the shapes of the measured gradients, all in one bucket.
        device: the device of these gradients.
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
