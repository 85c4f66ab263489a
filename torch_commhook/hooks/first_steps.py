"""What a model's first steps show: when its buckets are full, and a sample of its gradients."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.memory.bucket_memory import BucketMemory

#: Steps at the beginning that are not timed: DDP forms its buckets anew after the first.
WARM_UP = 2
#: Steps of which a bucket's times are taken.
TIMED = 3
#: After so many steps there is all that is to be seen.
STEPS = WARM_UP + TIMED
#: Elements of a sample of the gradients, and the buckets that they are taken from.
_MOST_SAMPLED, _SAMPLED_BUCKETS = 1 << 19, 2


class FirstSteps:
    """Times and gradients of one model's first steps, on this rank.

    Attributes:
        is_sparse: whether a gradient was sparse.
    """

    def __init__(self) -> None:
        self.is_sparse = False
        self._ended: float | None = None  # the step before
        self._ready: dict[int, list[float]] = {}  # by bucket
        self._samples: dict[int, list[Tensor]] = {}  # by bucket
        self._bucket_count = 0

    def bucket_full(self, bucket: GradBucket, steps: int) -> None:
        """A bucket has all gradients.

        Args:
            bucket: the bucket.
            steps: that have been done before this one.
        """
        if bucket.is_sparse():
            self.is_sparse = True
            return
        if not WARM_UP <= steps < STEPS or self._ended is None:
            return
        if bucket.bucket_count() != self._bucket_count:
            self._bucket_count = bucket.bucket_count()
            self._ready, self._samples = {}, {}
        if bucket.device().type == "cuda":  # which is behind the host
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
        """A step was counted on all ranks.

        Args:
            device: of the gradients.
        """
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self._ended = time.perf_counter()

    def ready(self, buckets: int) -> list[float] | None:
        """When each bucket was full, in seconds from the end of the step before: medians.

        Args:
            buckets: how many there are.

        Returns:
            None where it was not seen of each.
        """
        if sorted(self._ready) != list(range(buckets)):
            return None
        return [statistics.median(self._ready[index]) for index in range(buckets)]

    def sample(self, buckets: Sequence[BucketMemory]) -> list[list[Tensor]] | None:
        """Gradients of the last of the steps, or the first rows of some: lists of a few buckets.

        Args:
            buckets: all that there are.

        Returns:
            None where they were not seen.
        """
        found = [self._samples.get(buckets[i].index, []) for i in _sampled_buckets(len(buckets))]
        seen = [[gradient.shape for gradient in sample] for sample in found]
        return [sample for sample in found if sample] if seen == sample_shapes(buckets) else None


def sample_shapes(buckets: Sequence[BucketMemory]) -> list[list[torch.Size]]:
    """The shapes of what :meth:`FirstSteps.sample` gives, the same on all ranks."""
    sampled = [buckets[i].layout.sizes for i in _sampled_buckets(len(buckets))]
    return [[shape for _, shape in _sampled(sizes)] for sizes in sampled]


def random_sample(buckets: Sequence[BucketMemory], seed: int) -> list[list[Tensor]]:
    """Random normal numbers of the same shapes."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    found = []
    for i, shapes in zip(_sampled_buckets(len(buckets)), sample_shapes(buckets), strict=True):
        to = buckets[i].device, buckets[i].dtype
        found.append([_normal(shape, generator).to(*to) for shape in shapes])
    return [sample for sample in found if sample]


def _normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _sampled_buckets(count: int) -> list[int]:
    """The numbers of those that a sample is taken from, evenly spaced."""
    return [i * count // _SAMPLED_BUCKETS for i in range(_SAMPLED_BUCKETS) if count > i]


def _sampled(sizes: Sequence[torch.Size]) -> list[tuple[int, torch.Size]]:
    """What a sample has of a bucket's gradients: their places, and the shapes of what is taken.

    Whole gradients where they fit, since low-rank factors depend on the shape; the first rows of
    the largest one where no matrix fits.
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
