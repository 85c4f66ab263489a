"""Runs a hook in C++ on the reducer's buckets in an eager backward, without Python per bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.metrics import BucketTraffic
from torch_commhook.reducer.buckets import BucketState
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.step_group import StepGroup


class CppRun:
    """A running C++ hook, and its results.

    Args:
        hook: the hook.
        buckets: all of the reducer's buckets.
        groups: the process group of each bucket.
        check_layouts: raises if a gradient of a bucket has an unexpected layout.

    Attributes:
        native: notifies C++ of full buckets.
    """

    def __init__(
        self,
        hook: _C.CppHook,
        buckets: Sequence[BucketState],
        groups: list[dist.ProcessGroup],
        check_layouts: Callable[[BucketState], None],
    ) -> None:
        self.native = _C.ReducerRun(hook, [bucket.native for bucket in buckets], groups)
        self._buckets = buckets
        self._check_layouts = check_layouts

    @classmethod
    def of(
        cls,
        attached: Attached | None,
        group: StepGroup,
        buckets: Sequence[BucketState],
        check_layouts: Callable[[BucketState], None],
    ) -> CppRun | None:
        """Make one for the attached hook, if it and the buckets need no Python; else None."""
        hook = None if attached is None else attached.cpp_hook
        if attached is None or hook is None:
            return None
        if not all(each.in_own_dtype and not each.dtype.is_complex for each in buckets):
            return None
        own = attached.own_group
        groups = [group.group_for(bucket.device) if own is None else own for bucket in buckets]
        return cls(hook, buckets, groups, check_layouts)

    @property
    def started(self) -> int:
        """The number of buckets on which the hook was started."""
        return self.native.started

    def results(self, seconds: float) -> list[tuple[BucketState, Tensor]]:
        """Wait for the hook, at most ``seconds`` for each bucket, and write its results.

        Returns:
            The buckets with parameters without a gradient, and their results.

        Raises:
            TimeoutError, or the hook's error.
        """
        late = [bucket for bucket in self._buckets if bucket.pending]
        try:
            results = self.native.finish([bucket.index for bucket in late], seconds)
        except TypeError as error:
            self.explain(error)
            raise
        return list(zip(late, results, strict=True))

    def explain(self, error: BaseException) -> None:
        """Raise the cause of an error of the bucket that was started last, if it is known."""
        if not isinstance(error, TypeError):
            return
        bucket = self._buckets[self.started - 1]
        if bucket.native.gradients():
            self._check_layouts(bucket)

    def traffic(self) -> list[BucketTraffic]:
        """The traffic of each bucket."""
        return [
            BucketTraffic(bucket.numel, bucket.dtype, sent, sent)
            for bucket, sent in zip(self._buckets, self.native.bytes_sent(), strict=True)
        ]

    def drain(self, seconds: float) -> None:
        """Wait for running collectives, and ignore their results."""
        with suppress(Exception):
            self.native.drain(seconds)
