"""Records a model's first steps: the times at which buckets are full, and some gradients."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.memory.bucket_memory import BucketMemory

#: The number of steps before the timed ones: DDP forms new buckets after the first.
WARM_UP = 2
#: The number of timed steps.
TIMED = 3
#: The number of steps after which the record is complete.
STEPS = WARM_UP + TIMED
#: The most elements of a sample of the gradients, and the number of buckets in it.
_MOST_SAMPLED, _SAMPLED_BUCKETS = 1 << 19, 2


class FirstSteps:
    """Times and gradients of one model's first steps, on this rank.

    Attributes:
        is_sparse: whether a gradient was sparse.
    """

    def __init__(self) -> None:
        self.is_sparse = False
        self._ended: float | None = None  # the end of the previous step
        self._ready: dict[int, list[float]] = {}  # by bucket
        self._samples: dict[int, list[Tensor]] = {}  # by bucket
        self._bucket_count = 0

    def bucket_full(self, bucket: GradBucket, steps: int) -> None:
        """Record that a bucket has all gradients.

        Args:
            bucket: the bucket.
            steps: the number of steps before this one.
        """
        if bucket.is_sparse():
            self.is_sparse = True
            return
        if not WARM_UP <= steps < STEPS or self._ended is None:
            return
        if bucket.bucket_count() != self._bucket_count:
            self._bucket_count = bucket.bucket_count()
            self._ready, self._samples = {}, {}
        if bucket.device().type == "cuda":  # the device works later than the host
            torch.cuda.current_stream(bucket.device()).synchronize()
        seconds = time.perf_counter() - self._ended
        self._ready.setdefault(bucket.index(), []).append(seconds)
        if steps == STEPS - 1 and bucket.index() in _sampled_buckets(self._bucket_count):
            gradients = bucket.gradients()
            self._samples[bucket.index()] = [
                gradients[place].detach().reshape(-1, *shape[1:])[: shape[0]].clone()
                for place, shape in _sampled(bucket.sizes())
            ]

    def step_ended(self, device: torch.device | None = None) -> None:
        """Record the end of a step that counts on all ranks.

        Args:
            device: the gradients' device.
        """
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self._ended = time.perf_counter()

    def ready(self, buckets: int) -> list[float] | None:
        """The median times at which buckets were full, in seconds from the end of the step before.

        Args:
            buckets: the number of buckets.

        Returns:
            A time for each bucket; None if one has no record.
        """
        if sorted(self._ready) != list(range(buckets)):
            return None
        return [statistics.median(self._ready[index]) for index in range(buckets)]

    def sample(self, buckets: Sequence[BucketMemory]) -> list[list[Tensor]] | None:
        """Gradients of the last recorded step, or their first rows.

        Args:
            buckets: all buckets.

        Returns:
            A list of gradients for each of a few buckets; None without a record of them.
        """
        found = [self._samples.get(buckets[i].index, []) for i in _sampled_buckets(len(buckets))]
        seen = [[gradient.shape for gradient in sample] for sample in found]
        return [sample for sample in found if sample] if seen == sample_shapes(buckets) else None


def sample_shapes(buckets: Sequence[BucketMemory]) -> list[list[torch.Size]]:
    """The shapes of the gradients of :meth:`FirstSteps.sample`, the same on all ranks."""
    sampled = [buckets[i].layout.sizes for i in _sampled_buckets(len(buckets))]
    return [[shape for _, shape in _sampled(sizes)] for sizes in sampled]


def random_sample(buckets: Sequence[BucketMemory], seed: int) -> list[list[Tensor]]:
    """Random normal numbers of the shapes of :func:`sample_shapes`."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    found = []
    for i, shapes in zip(_sampled_buckets(len(buckets)), sample_shapes(buckets), strict=True):
        to = buckets[i].device, buckets[i].gradient_dtype
        found.append([_normal(shape, generator).to(*to) for shape in shapes])
    return [sample for sample in found if sample]


def _normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _sampled_buckets(count: int) -> list[int]:
    """The numbers of the sampled buckets, evenly spaced."""
    return [i * count // _SAMPLED_BUCKETS for i in range(_SAMPLED_BUCKETS) if count > i]


def _sampled(sizes: Sequence[torch.Size]) -> list[tuple[int, torch.Size]]:
    """The sampled gradients of a bucket: their places, and the shapes of the sampled parts.

    Gradients that fit are sampled whole, since low-rank factors depend on the shape. If no matrix
    fits, the first rows of the largest one are sampled.
    """
    left = _MOST_SAMPLED // _SAMPLED_BUCKETS
    shapes = [size or torch.Size([1]) for size in sizes]
    order = [place for place in range(len(shapes)) if shapes[place].numel()]
    order.sort(key=lambda place: shapes[place].numel(), reverse=True)
    found: dict[int, torch.Size] = {}
    if order and all(len(shape) < 2 or shape.numel() > left for shape in shapes):
        rows, *rest = shapes[order[0]]
        rows = min(rows, max(1, left // max(1, math.prod(rest))))
        found[order.pop(0)] = taken = torch.Size([rows, *rest])
        left -= taken.numel()
    for place in order:
        if shapes[place].numel() <= left:
            found[place] = shapes[place]
            left -= shapes[place].numel()
    return sorted(found.items())
