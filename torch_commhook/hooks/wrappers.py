"""What a message loses, added to the next one."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_commhook.bucket import GradBucket
from torch_commhook.hooks.base import Hook
from torch_commhook.memory import BucketMemory


class Wrapper(Hook):
    """A hook around another one, which does the work."""

    _commhook_traceable = True

    def __init__(self, hook: Hook) -> None:
        super().__init__()
        if not isinstance(hook, Hook):
            raise TypeError(
                f"{type(self).__name__}: hook must be one of torch_commhook.hooks, got "
                f"{type(hook).__qualname__}"
            )
        self.hook = hook
        self._commhook_traceable = getattr(hook, "_commhook_traceable", False)

    @property
    def is_lossy(self) -> bool:  # type: ignore[override]
        return self.hook.is_lossy

    @property
    def has_stages(self) -> bool:  # type: ignore[override]
        return self.hook.has_stages

    def prepare(self, memory: BucketMemory) -> None:
        self.hook.prepare(memory)

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.memory(bucket)  # of the outermost hook, which all inside share
        return self.hook.average(bucket)

    def result_dtype(self, bucket: GradBucket) -> torch.dtype:
        return self.hook.result_dtype(bucket)


class error_feedback(Wrapper):  # noqa: N801 (a hook is written as it is called)
    """Send what earlier messages have lost with the next one.

    With g the gradient of a step and e what was lost before it, p = g + e is sent, and
    e' = p - C(p) remembered, where C(p) is what this rank's own message holds. Where a sum is
    encoded again for its way back, what that loses is remembered by the rank that encodes it. So
    nothing is lost for good: under SGD of step size lr, parameters less lr times the mean of what
    is remembered follow the path of uncompressed SGD.

    Both happen in the pass over memory that encodes. The memory is float32: 4 bytes for each
    element, and as many for each that this rank adds up. A step that fails on some rank may lose
    what its messages held.

    Args:
        hook: one that compresses, or has one inside.

    Raises:
        TypeError: no hook of the library.
        ValueError: one that loses nothing.
    """

    def __init__(self, hook: Hook) -> None:
        super().__init__(hook)
        if not hook.is_lossy:
            raise ValueError(f"error_feedback: hook must be one that compresses, got {hook}")

    def prepare(self, memory: BucketMemory) -> None:
        memory.with_error = True
        super().prepare(memory)

    def __repr__(self) -> str:
        return f"error_feedback({self.hook})"
