"""A bucket, and a hook that is an object."""

from __future__ import annotations

import torch

from torch_commhook import GradBucket


def one_bucket(numel: int = 6) -> GradBucket:
    parameter = torch.zeros(numel)
    return GradBucket([parameter], [torch.arange(float(numel))], index=1, bucket_count=4)


class Callable:
    def __call__(self, state: object, bucket: GradBucket) -> torch.Tensor:
        return bucket.buffer()

    def method(self, state: object, grads: GradBucket) -> torch.Tensor:
        return grads.buffer()
