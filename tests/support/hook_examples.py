"""A bucket, hooks that are objects, and a module of hooks that record their arguments."""

from __future__ import annotations

import types

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


class Call(tuple[object, ...]):
    """A hook that records its arguments."""

    def __call__(self, state: object, bucket: object) -> None:
        raise AssertionError("not called")


def hooks_module() -> types.ModuleType:
    """A module like ``torch_commhook.hooks`` with hooks that are tuples of their arguments."""
    module = types.ModuleType("hooks")

    def cast(dtype: torch.dtype) -> tuple[object, ...]:
        if not isinstance(dtype, torch.dtype):
            raise TypeError("cast: dtype must be a torch.dtype")
        return Call(("cast", dtype))

    def allreduce() -> tuple[object, ...]:
        return Call(("allreduce",))

    def error_feedback(hook: object, decay: float = 1.0) -> tuple[object, ...]:
        return Call(("error_feedback", hook, decay))

    def blockwise(
        bits: int = 8, process_group: object = None, *, sizes: object = None
    ) -> tuple[object, ...]:
        return Call(("blockwise", bits, sizes))

    def part() -> object:
        return object()

    def secret() -> None:
        raise AssertionError("not public")

    for function in (cast, allreduce, error_feedback, blockwise, part, secret):
        setattr(module, function.__name__, function)
    module.__all__ = ["cast", "allreduce", "error_feedback", "blockwise", "part"]  # type: ignore[attr-defined]
    return module


HOOKS = hooks_module()
