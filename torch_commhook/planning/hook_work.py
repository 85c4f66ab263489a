"""What a hook computes, measured on this machine, and what it sends, counted among threads."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torch_commhook import hooks
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.native.runtime import run_hook
from torch_commhook.process_group.simulated.link import Issued
from torch_commhook.testing.ranks import run_ranks
from torch_commhook.testing.simulate import simulate

#: Elements of the largest bucket that is measured: 25 MiB.
MOST_MEASURED = 25 * (1 << 20) // 4
#: Matrices of a model: a few in each of some layers. What low-rank factors send depends on it.
_MATRICES = 48
#: Elements that are sent between threads to count the bytes, for each rank.
_MOST_COUNTED = 1 << 18
_RUNS = 5


class HookError(RuntimeError):
    """A hook that could not be run, in one sentence."""


def unwrap_hook(hook: Any) -> tuple[Any, int, list[Callable[[Any], object]]]:
    """A hook as it is in the long run: what it does with a bucket, and in how many steps once.

    And what else goes over all gradients then: functions of a tensor.
    """
    steps, around = 1, []
    while True:
        if isinstance(hook, hooks.after):
            hook = hook.hook
        elif isinstance(hook, hooks.clip):
            around.append(torch.linalg.vector_norm)
            hook = hook.hook
        elif isinstance(hook, hooks.local_sgd):
            around.append(partial(_outer_step, hook.outer))
            steps, hook = steps * hook.H, hook.hook
        else:
            return hook, steps, around


def _outer_step(outer: Any, gradient: Any) -> None:
    """What :class:`local_sgd` does beside averaging: how far it is, the anchor's step, and back."""
    distance = (gradient - gradient).to(gradient.dtype)
    outer.step([gradient.clone()], [distance], [distance] if outer.momentum else [])
    gradient.copy_(distance)


def measure_pass(call: Callable[[Any], object], elements: int, bucket_elements: int) -> float:
    """Of something that goes over all gradients."""
    gradient = torch.randn(min(bucket_elements, MOST_MEASURED), dtype=torch.float32, device="cpu")
    return median_seconds(partial(call, gradient)) * elements / gradient.numel()


def median_seconds(call: Callable[[], object]) -> float:
    """Of a few calls, after two in which buffers are made."""
    times = []
    for _ in range(_RUNS + 2):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


def gradients_of(elements: int, model_elements: int, shards: int = 1) -> list[Any]:
    """Random gradients of so many elements of a model.

    Args:
        elements: of a rank.
        model_elements: of the whole model, which is mostly square matrices.
        shards: those of each matrix, of which the rank has one.
    """
    side = max(1, math.isqrt(min(elements * shards, model_elements // _MATRICES)))
    height = -(-side // shards)
    rows, rest = divmod(elements, side)
    heights = [height] * (rows // height) + [rows % height] * (rows % height > 0)
    shapes = [(height, side) for height in heights] + [(rest,)] * (rest > 0)
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
    hook: Callable[..., Any], elements: int, bucket_elements: int, shards: int = 1
) -> float:
    """Of a step on this machine, with nothing to wait for.

    Args:
        hook: averages gradients.
        elements: that it averages.
        bucket_elements: those of a bucket.
        shards: as :func:`gradients_of` takes them.
    """
    measured = min(bucket_elements, MOST_MEASURED)
    gradients = gradients_of(measured, elements * shards, shards)

    def of_bucket(rank: int) -> float:
        parameters = [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients]

        def average() -> None:
            bucket = GradBucket(parameters, gradients)
            result = run_hook(hook, None, bucket).wait()
            for gradient, piece in zip(gradients, bucket.layout().views(result), strict=True):
                gradient.copy_(piece)

        return median_seconds(average)

    return run_ranks(of_bucket, 1, timeout=600)[0] * elements / measured
