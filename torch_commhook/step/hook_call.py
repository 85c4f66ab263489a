"""A running call of a hook on one bucket: started, awaited, checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from torch_commhook import _C
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.buckets.results import checked_result
from torch_commhook.collectives import TracedFuture
from torch_commhook.collectives.futures import driven
from torch_commhook.collectives.streams import UsedTensors, keeping
from torch_commhook.hooks.base import Hook, checked_result_dtype
from torch_commhook.metrics import BucketTraffic, WireMeter, counting
from torch_commhook.native.runtime import hook_name
from torch_commhook.spans import active, bucket_label, spans_of

#: How long a failed rank waits for its own running collectives.
DRAIN_SECONDS = 60.0

_is_compiling = torch.compiler.is_dynamo_compiling


@dataclass(eq=False)
class HookCall:
    """A running call of a hook on one bucket.

    Attributes:
        bucket: the hook's bucket.
        future: a Future of the result.
        dtype: the dtype that the result must have.
        where: names hook and bucket in errors.
        traffic: the call's traffic (None bytes if the hook does not use the library's collectives).
        local: the gradients before the hook, if post-hooks need them.
        used: tensors that the library's streams use until :attr:`future` is waited for.
        look: notes whether the hook has issued collectives that nobody has counted. Called once the
            result is there, before the library issues other messages.
    """

    bucket: GradBucket
    future: Any
    dtype: torch.dtype
    where: str
    traffic: BucketTraffic
    local: tuple[Tensor, ...] | None = None
    used: UsedTensors | None = None
    look: Callable[[], None] | None = None

    @classmethod
    def start_average(cls, hook: Hook, bucket: GradBucket, where: str) -> HookCall:
        """Start a hook of the library on a bucket, without stages around it."""
        used = UsedTensors()
        with keeping(used):
            result, dtype, traffic = run_average(hook, bucket)
        future = _C.as_future(result, where)
        return cls(bucket, future, dtype, where, traffic, used=used)

    def wait(self, timeout: timedelta) -> Tensor:
        """Wait for the result, and check it. While a compiler traces, this returns at once.

        Args:
            timeout: the longest time of a collective.

        Raises:
            TimeoutError: it takes longer.
            Exception: as :meth:`result`.
        """
        # Traced calls date from before a graph break.
        if not (_is_compiling() or isinstance(self.future, TracedFuture)):
            _C.wait_for_result(self.future, self.where, timeout.total_seconds())
        return self.result()

    def result(self) -> Tensor:
        """Wait for the result without a limit, and check it.

        Raises:
            Exception: the hook's error, or as :func:`checked_result`.
        """
        value = self.future.wait()
        if self.look is not None:
            self.look()
        if self.used is not None:
            self.used.waited_for()
        return checked_result(value, self.bucket, self.dtype, self.where)

    def drain(self, deadline: float) -> None:
        """Wait for running collectives, and ignore their results. Raises only for a signal.

        Args:
            deadline: the end of the wait, by ``time.monotonic()``.
        """
        with suppress(Exception):  # a consequence of the failure, or as good a reason
            if isinstance(self.future, TracedFuture):
                self.future.wait()
            else:
                _C.wait_for(self.future, max(deadline - time.monotonic(), 0.0))


def run_average(hook: Hook, bucket: GradBucket) -> tuple[Any, torch.dtype, BucketTraffic]:
    """Start a hook of the library; as :meth:`Attached.run`."""
    meter = WireMeter()
    spans = spans_of(lambda: bucket_label(bucket.index(), hook_name(hook)))
    with counting(meter), active(spans):
        # Writing the result into the gradients casts it, without another pass.
        dtype = checked_result_dtype(hook, bucket)
        result = driven(_C.run_average(hook, bucket))
    if spans is not None:
        spans.note_sent(result)
    return result, dtype, meter.traffic(bucket.numel(), bucket.dtype())
