"""A model as ``plan`` sees it: its buckets, and the work of hooks on them."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_commhook import hooks
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.native.runtime import run_hook
from torch_commhook.process_group.simulated.link import Issued
from torch_commhook.testing.ranks import run_ranks
from torch_commhook.testing.simulate import simulate

# ---- the sizes of a model's buckets --------------------------------------------------------------


#: DDP's capacities, in MiB: of the first bucket to be full, and of all others.
BUCKET_CAPS_MB = (1.0, 25.0)
_NUMBER_BYTES = 4  # gradients in float32
_MOST_BUCKETS = 10_000  # more make no difference to a prediction


def bucket_sizes(elements: int, bucket_cap_mb: Sequence[float] = BUCKET_CAPS_MB) -> list[int]:
    """The elements of each bucket of a model with float32 gradients, in the order of a backward.

    ``bucket_cap_mb`` has the capacity of each bucket, in MiB; the last one counts for all others.
    """
    caps = _caps(bucket_cap_mb)
    sizes: list[int] = []
    left = elements
    while left > 0:
        size = min(left, caps[min(len(sizes), len(caps) - 1)])
        if len(sizes) >= _MOST_BUCKETS:
            size = left
        sizes.append(size)
        left -= size
    return sizes


def filled_buckets(numels: Sequence[int], bucket_cap_mb: Sequence[float]) -> list[int]:
    """The elements of each bucket. A bucket is full once it reaches its capacity, as in DDP.

    ``numels`` has the elements of each parameter, in the order of a backward.
    """
    caps = _caps(bucket_cap_mb)
    sizes: list[int] = []
    size = 0
    for numel in numels:
        size += numel
        is_full = size >= caps[min(len(sizes), len(caps) - 1)]
        if is_full and len(sizes) < _MOST_BUCKETS:
            sizes.append(size)
            size = 0
    return [*sizes, size] if size else sizes


def _caps(bucket_cap_mb: Sequence[float]) -> list[int]:
    """The capacities in elements."""
    return [max(1, int(cap * (1 << 20)) // _NUMBER_BYTES) for cap in bucket_cap_mb]


# ---- describes a model for planning --------------------------------------------------------------


Shape = tuple[int, ...]
#: The number of matrices of a model with nothing known but its size: a few in each of some layers.
_MATRICES = 48


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model.

    Attributes:
        shape: the shape.
        name: the name in ``named_parameters()``; None if unknown.
    """

    shape: Shape
    name: str | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Model:
    """A model with float32 gradients.

    Attributes:
        elements: the number of elements of all parameters.
        parameters: the parameters in the order of ``named_parameters()``; None if only the size is
            known. The model then stands for 48 square matrices.
    """

    elements: int
    parameters: tuple[Parameter, ...] | None = None

    @classmethod
    def of(cls, module: nn.Module) -> Model:
        """The parameters of a module, on any device, that require gradients.

        Raises:
            ValueError: no parameter with elements requires a gradient.
        """
        return cls.of_parameters(
            [
                Parameter(tuple(parameter.shape), name)
                for name, parameter in module.named_parameters()
                if parameter.requires_grad
            ]
        )

    @classmethod
    def of_parameters(cls, parameters: Sequence[Parameter]) -> Model:
        """A model with these parameters.

        Raises:
            ValueError: the parameters have no elements.
        """
        elements = sum(each.numel for each in parameters)
        if not elements:
            raise ValueError("a model must have a parameter with elements that gets a gradient")
        return cls(elements, tuple(parameters))

    def bucket_sizes(self, bucket_cap_mb: Sequence[float] = BUCKET_CAPS_MB) -> list[int]:
        """The elements of each bucket, as of :func:`bucket_sizes`."""
        if self.parameters is None:
            return bucket_sizes(self.elements, bucket_cap_mb)
        return filled_buckets([each.numel for each in reversed(self.parameters)], bucket_cap_mb)

    def listed(self) -> tuple[Parameter, ...]:
        """The parameters, without names if only the size is known."""
        if self.parameters is not None:
            return self.parameters
        return tuple(Parameter(shape) for shape in square_shapes(self.elements, self.elements))

    def sample(self, most: int) -> list[Shape]:
        """The shapes of the model's last parameters, with ``most`` elements or fewer.

        A parameter with more elements has fewer rows.
        """
        most = max(1, min(most, self.elements))
        if self.parameters is None:
            return square_shapes(most, self.elements)
        found: list[Shape] = []
        for each in reversed(self.parameters):
            row = max(1, math.prod(each.shape[1:]))
            rows = min(each.numel // row, most // row)
            if rows == 0 and not found and each.numel:
                rows = 1
            if rows:
                found.append((rows, *each.shape[1:]))  # a scalar becomes a vector of one element
                most -= rows * row
            if most <= 0:
                break
        return found


def square_shapes(elements: int, model_elements: int, shards: int = 1) -> list[Shape]:
    """The shapes of a rank's elements of a model that consists mostly of square matrices.

    The rank has one of the ``shards`` of each matrix of the model, in all ``elements`` elements.
    """
    side = max(1, math.isqrt(min(elements * shards, model_elements // _MATRICES)))
    height = -(-side // shards)
    rows, rest = divmod(elements, side)
    heights = [height] * (rows // height) + [rows % height] * (rows % height > 0)
    return [*((height, side) for height in heights), *[(rest,)] * (rest > 0)]


# ---- measures a hook's computing time on this machine, and counts its bytes among threads --------


#: Elements of the largest measured bucket: 25 MiB.
MOST_MEASURED = 25 * (1 << 20) // 4
#: Elements of each rank in a count of bytes between threads.
_MOST_COUNTED = 1 << 18
_RUNS = 5


class HookError(RuntimeError):
    """A hook that could not run. The text is one sentence."""

    @classmethod
    def of(cls, hook: str, error: Exception, unknown: str) -> HookError:
        """The error of a hook that raised one.

        The reason is ``unknown`` if the hook must be attached to a model.
        """
        said = " ".join(f"{type(error).__name__}: {error}".split())
        reason = unknown if "attach(model, hook)" in said else said
        return cls(f"the hook {hook!r} can't be planned: {reason}")


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
    """The work of :class:`local_sgd` beside averaging: distances from the anchor, and moving both.

    It works on all fragments as one bucket, because they take turns until all of it is done.
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
    """Seconds of a function of a flat float32 tensor that passes over all gradients.

    The tensor has ``bucket_elements`` elements; a large one is measured on fewer.
    """
    gradient = torch.randn(min(bucket_elements, MOST_MEASURED), dtype=torch.float32, device="cpu")
    return median_seconds(partial(call, gradient)) * elements / gradient.numel()


def median_seconds(call: Callable[[], object], *, is_cpu: bool = True) -> float:
    """The median time of a few calls, after two calls that create buffers.

    ``call`` computes on the calling thread, and with ``is_cpu`` only on the CPU.
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


def random_gradients(shapes: Sequence[Shape]) -> list[Tensor]:
    """Random float32 tensors of these shapes, on the CPU."""
    return [torch.randn(shape, dtype=torch.float32, device="cpu") for shape in shapes]


def record_traffic(
    hook: Callable[..., Any], elements: int, world_size: int, shards: int = 1
) -> tuple[float, tuple[Issued, ...]]:
    """The bytes that each rank sends in a step, and the calls that it issues.

    A rank has ``elements`` elements: one of the ``shards`` of each matrix of the model.
    """
    # The bytes of low-rank factors are not proportional to the elements. So count them on matrices
    # of the model's own size, as far as memory allows.
    counted = counted_elements(elements, world_size)
    shapes = square_shapes(counted, elements * shards, shards)
    gradients = [random_gradients(shapes) for _ in range(world_size)]
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
    """Seconds that a hook computes for so many elements on this machine, without communication.

    It is measured on gradients of ``shapes``, all in one bucket.
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


# ---- measures the computing time of a model's step on this machine, without communication --------


#: The optimizers of :func:`measure_step`.
OPTIMIZERS = ("adamw", "sgd")
_STEPS = 3


def measure_step(module: nn.Module, inputs: Sequence[Any], optimizer: str = "adamw") -> float:
    """The time of a step without communication in seconds: the median of three steps.

    A step is a forward, a backward, the copy of all gradients into DDP's buckets, and a step of the
    optimizer. A first step, which creates buffers, does not count. Parameters keep their values.

    Raises:
        ValueError: another optimizer; no parameter requires a gradient; or the module returns no
            tensor with a gradient.
        Exception: any error of the module.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"measure_step: optimizer must be adamw or sgd, got {optimizer!r}")
    parameters = [each for each in module.parameters() if each.requires_grad]
    if not parameters:
        raise ValueError("measure_step: the module must have a parameter that gets a gradient")
    # A learning rate of 0 leaves the parameters as they are.
    stepping: torch.optim.Optimizer
    if optimizer == "adamw":
        stepping = torch.optim.AdamW(parameters, lr=0.0)
    else:
        stepping = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
    buckets = [torch.empty_like(each) for each in parameters]
    clock = compute_clock()
    seconds = []
    for _ in range(_STEPS + 1):
        begun = clock()
        _loss(module(*inputs)).backward()
        copy_gradients(parameters, buckets)
        stepping.step()
        stepping.zero_grad(set_to_none=True)
        seconds.append(clock() - begun)
    return statistics.median(seconds[1:])


def copy_gradients(parameters: Sequence[Tensor], buckets: Sequence[Tensor]) -> None:
    """Copy gradients into buckets of the same shapes, as DDP does before it sends a bucket.

    Parameters without a gradient are skipped.
    """
    for parameter, bucket in zip(parameters, buckets, strict=True):
        if parameter.grad is not None:
            bucket.copy_(parameter.grad)


def _loss(outputs: Any) -> Tensor:
    """A scalar that depends on all outputs that require a gradient."""
    found = [each.float().sum() for each in _tensors(outputs) if each.requires_grad]
    if not found:
        raise ValueError(
            "measure_step: the module must return a tensor with a gradient, or several in a "
            f"tuple, a list or a dict, got {type(outputs).__qualname__}"
        )
    return torch.stack(found).sum()


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, (list, tuple)):
        return [tensor for each in outputs for tensor in _tensors(each)]
    return []
