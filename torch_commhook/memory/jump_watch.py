"""Detects a scale of the loss that a hook does not know, by the size of its gradients."""

from __future__ import annotations

import logging
import math
from collections import deque
from statistics import fmean
from typing import Protocol

import torch
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket

_log = logging.getLogger(__name__)

#: The number of steps before a jump, and after it, that are compared.
_STEPS = 8

#: The number of values of a gradient whose norm represents all.
_SAMPLE = 1024

#: The tolerance in octaves from a power of two: for a jump by one or two octaves, and by more.
_TOLERANCES = 0.2, 0.4

#: The minimum part of a jump between two consecutive steps.
_MOST = 0.7


class Event(Protocol):
    """An event, such as ``torch.cuda.Event``, that says whether earlier work is done."""

    def query(self) -> bool:
        """Whether the work is done."""


class JumpWatch:
    """Warns once if a rank's gradients become 2**k times as large between two steps, and stay so.

    Training itself seldom does this. In each step the watch takes the norm of a sample of bucket 0.
    It compares the norms of 8 steps with those of the next 8. A jump counts under three conditions:
    it is close to a power of two; most of it is between two consecutive steps; and the norms on
    either side vary by less than half of it. On CUDA the watch never waits: it reads a norm in the
    first later step in which the norm is on the host.

    Args:
        hook: the hook's name, for the message.
        keeps_error: whether the hook remembers errors; otherwise it clips.
    """

    def __init__(self, hook: str, *, keeps_error: bool) -> None:
        self.hook = hook
        self.keeps_error = keeps_error
        self._has_warned = False
        self._looked_at: tuple[int, int] | None = None
        self._octaves: deque[float] = deque(maxlen=2 * _STEPS)
        self._on_the_way: deque[tuple[Tensor, Event | None]] = deque()

    @torch.no_grad()
    def look(self, bucket: GradBucket) -> None:
        """Look at a bucket of this rank's gradients, before a hook averages it."""
        if torch.compiler.is_compiling() or self._has_warned or bucket.index() != 0:
            return
        sample = bucket.sample(_SAMPLE)
        if sample is None:
            return
        looked_at = id(bucket.first_parameter()), bucket.numel()
        if looked_at != self._looked_at:  # buckets were rebuilt
            self._looked_at = looked_at
            self._octaves.clear()
            self._on_the_way.clear()
        dtype = torch.float64 if sample.dtype == torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(sample, dtype=dtype)
        event = None
        if norm.is_cuda:
            host = torch.empty_like(norm, device="cpu", pin_memory=True)
            norm = host.copy_(norm, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        for read in self.read_when_come(norm, event):
            self._note(read)

    def read_when_come(self, norm: Tensor, event: Event | None) -> list[float]:
        """Read the norms of this and earlier steps that have reached the host since the last call.

        Args:
            norm: of no dimension, on the host.
            event: its ``query()`` tells whether ``norm`` has arrived; None if it has.
        """
        self._on_the_way.append((norm, event))
        found = []
        while self._on_the_way:
            norm, event = self._on_the_way[0]
            if event is not None and not event.query():
                break
            found.append(float(norm))
            self._on_the_way.popleft()
        return found

    def _note(self, norm: float) -> None:
        if not 0.0 < norm < math.inf:  # no gradient, or an overflow
            return
        self._octaves.append(math.log2(norm))
        jump = self._jump()
        if jump is None:
            return
        self._has_warned = True
        _log.warning(
            "hook '%s': gradients have become 2**%d times as large from one step to the next, and "
            "stay so. If the loss is multiplied by a scale that has changed, %s; use "
            "torch_commhook.attach(model, hook, scaler=scaler) with an object whose get_scale() "
            "gives the scale",
            self.hook,
            jump,
            "the hook's error memory is in units of the old scale"
            if self.keeps_error
            else "the hook clips by the norm of scaled gradients",
        )

    def _jump(self) -> int | None:
        """By how many octaves gradients jumped ``_STEPS`` steps ago, or None."""
        if len(self._octaves) < 2 * _STEPS:
            return None
        octaves = list(self._octaves)
        before, after = octaves[:_STEPS], octaves[_STEPS:]
        jump = fmean(after) - fmean(before)
        power = round(jump)
        if power == 0 or abs(jump - power) > _TOLERANCES[abs(power) > 2]:
            return None
        spread = max(max(before) - min(before), max(after) - min(after))
        if spread > abs(jump) / 2 or abs(after[0] - before[-1]) < _MOST * abs(jump):
            return None
        return power
