"""A hook on its way with one bucket: started, waited for, checked."""

from __future__ import annotations

import time
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

#: How long a rank where something failed waits for its own collectives in flight.
DRAIN_SECONDS = 60.0

_is_compiling = torch.compiler.is_dynamo_compiling


@dataclass(eq=False)
class HookCall:
    """A hook on its way with one bucket.

    Attributes:
        bucket: what the hook was given.
        future: a Future of the result.
        dtype: that the result must have.
        where: names hook and bucket.
        traffic: what it put on the wire (None bytes where it went past the library's collectives).
        local: the gradients before the hook, where post-hooks will ask for them.
        used: the tensors that streams of the library use until :attr:`future` is waited for.
    """

    bucket: GradBucket
    future: Any
    dtype: torch.dtype
    where: str
    traffic: BucketTraffic
    local: tuple[Tensor, ...] | None = None
    used: UsedTensors | None = None

    @classmethod
    def start_average(cls, hook: Hook, bucket: GradBucket, where: str) -> HookCall:
        """Start a hook of the library on a bucket, with no stages around it."""
        used = UsedTensors()
        with keeping(used):
            result, dtype, traffic = run_average(hook, bucket)
        future = _C.as_future(result, where)
        return cls(bucket, future, dtype, where, traffic, used=used)

    def wait(self, timeout: timedelta) -> Tensor:
        """Wait for the result, and check it. While a compiler traces, it is there at once.

        Args:
            timeout: how long a collective may take.

        Raises:
            TimeoutError: it takes longer.
            Exception: as :meth:`result`.
        """
        # Those that are traced come from before the graph was broken.
        if not (_is_compiling() or isinstance(self.future, TracedFuture)):
            _C.wait_for_result(self.future, self.where, timeout.total_seconds())
        return self.result()

    def result(self) -> Tensor:
        """The result, checked, however long it takes.

        Raises:
            Exception: what the hook failed with, or as :func:`checked_result`.
        """
        value = self.future.wait()
        if self.used is not None:
            self.used.waited_for()
        return checked_result(value, self.bucket, self.dtype, self.where)

    def drain(self, deadline: float) -> None:
        """Wait for what is in flight, whatever becomes of it. Raises only what a signal does.

        Args:
            deadline: until when, by ``time.monotonic()``.
        """
        with suppress(Exception):  # theirs are a consequence, or as good a reason
            if isinstance(self.future, TracedFuture):
                self.future.wait()
            else:
                _C.wait_for(self.future, max(deadline - time.monotonic(), 0.0))


def run_average(hook: Hook, bucket: GradBucket) -> tuple[Any, torch.dtype, BucketTraffic]:
    """Start a hook of the library; as :meth:`Attached.run`."""
    meter = WireMeter()
    spans = spans_of(lambda: bucket_label(bucket.index(), hook_name(hook)))
    with counting(meter), active(spans):
        # Bringing the result into the gradients casts it: no pass of its own for that.
        dtype = checked_result_dtype(hook, bucket)
        result = driven(_C.run_average(hook, bucket))
    if spans is not None:
        spans.note_sent(result)
    return result, dtype, meter.traffic(bucket.numel(), bucket.dtype())
