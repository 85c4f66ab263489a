"""What a hook's memory must notice: a scaler's scale, jumps of it, and replays of graphs."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Protocol

import torch
from torch import Tensor

from torch_commhook import _C
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.collectives.futures import has_streams, is_capturing

# ---- the scale of mixed precision, which is a factor of a hook's gradients -----------------------


_LARGEST = torch.finfo(torch.float32).max


class Scaler(Protocol):
    """Scales a loss, such as ``torch.amp.GradScaler``."""

    def get_scale(self) -> float:
        """The factor of the loss."""


def checked_scale(scaler: Scaler) -> float:
    """The scale of a user's scaler; as :func:`scale_of`.

    Raises:
        TypeError: it is no ``torch.amp.GradScaler``, and has no ``get_scale()``.
        ValueError: its scale is not positive and finite.
    """
    if isinstance(scaler, type) or not callable(getattr(scaler, "get_scale", None)):
        raise TypeError(
            "attach: scaler must be a torch.amp.GradScaler, or have its get_scale(), got "
            f"{_C.type_name(scaler)}"
        )
    return scale_of(scaler, "attach")


def scale_of(scaler: Scaler, who: str) -> float:
    """The factor of the next gradients. Waits for the device if that holds the scale.

    Args:
        scaler: the argument of ``attach``.
        who: the caller, for the message.

    Raises:
        TypeError: ``get_scale()`` returns no number.
        ValueError: the scale is not positive and finite.
    """
    given = scaler.get_scale()
    try:
        scale = float(given)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{who}: scaler must give a number as its scale, got {_C.type_name(given)}"
        ) from error
    if not 0.0 < scale <= _LARGEST:
        raise ValueError(f"{who}: scaler must have a positive, finite scale, got {scale}")
    return scale


# ---- detects a scale of the loss that a hook does not know, by the size of its gradients ---------


_log = logging.getLogger(__name__)

#: The number of steps before a jump, and after it, that are compared.
_STEPS = 8

#: The number of values of a gradient whose norm represents all.
_SAMPLE = 1024

#: The tolerance in octaves from a power of two: for a jump by one or two octaves, and by more.
_TOLERANCES = 0.2, 0.4

#: The minimum part of a jump between two consecutive steps.
_MOST = 0.7


class ScaleJumpDetector:
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
        self._on_the_way: deque[tuple[Tensor, Callable[[], bool] | None]] = deque()

    @torch.no_grad()
    def look(self, bucket: GradBucket) -> None:
        """Look at a bucket of this rank's gradients, before a hook averages it."""
        if self._has_warned or bucket.index() != 0:
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
        has_come = None
        if norm.is_cuda:
            host = torch.empty_like(norm, device="cpu", pin_memory=True)
            norm = host.copy_(norm, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            has_come = event.query
        for read in self.read_when_come(norm, has_come):
            self._note(read)

    def read_when_come(
        self, norm: Tensor, has_come: Callable[[], bool] | None = None
    ) -> list[float]:
        """Read the norms of this and earlier steps that have reached the host since the last call.

        Args:
            norm: of no dimension, on the host.
            has_come: tells whether ``norm`` has arrived; None if it has.
        """
        self._on_the_way.append((norm, has_come))
        found = []
        while self._on_the_way:
            norm, has_come = self._on_the_way[0]
            if has_come is not None and not has_come():
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


# ---- steps that CUDA graphs replay, invisible to the host ----------------------------------------
#
# A replay runs kernels and no Python. So all values that change from step to step are on the
# device: errors, PowerSGD's factors, the factor of ``clip``, and the number of the step, which
# determines random numbers. Each captured step adds 1 to a counter on the device. The number of
# steps is this counter plus the eager steps that the host has counted. The host reads the counter
# only when the user asks for a state or statistics.
#
# A hook whose next steps depend on a count of the host raises during the capture
# (``Hook.check_capture``). A loaded state, or buckets that are formed anew, are in other tensors
# than those that a graph captured. If such a graph is replayed, its counter shows it, and a request
# for a state raises. The hook keeps the tensors that the graph writes, so such a replay does not
# write to memory of others.
#
# The tests replay graphs on the CPU (``tests/support/graph_on_host.py``): a replay calls the
# operators of the captured step again, on the same tensors. They also run the steps of every hook
# and refuse each operator that waits for a device.


class Replays:
    """Counts the steps of a hook that CUDA graphs have run."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._counter: Tensor | None = None
        self._has_captured = False
        self._before = 0  # of graphs whose captured memory is no longer in use
        # Their counters, the values that these must keep, and the memory that replays still write.
        self._stale: list[tuple[Tensor, int, object]] = []

    def prepare(self, device: torch.device) -> None:
        """Create the tensor, outside of captures: a graph must not own it."""
        if self._counter is None and has_streams(device):
            self._device = device
            with torch.inference_mode(False):
                self._counter = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def is_capturing(self) -> bool:
        """Whether a graph captures the current stream."""
        return self._device is not None and is_capturing(self._device)

    def capture(self) -> None:
        """Let the graph that captures the current stream count each replay.

        Raises:
            RuntimeError: the hook was not prepared for captures.
        """
        if self._counter is None:
            raise RuntimeError(
                "torch_commhook: a CUDA graph can capture a hook only once it is attached; run a "
                "step before the capture"
            )
        self._counter += 1
        self._has_captured = True

    def count(self) -> int:
        """Return the number of replays. Waits for the device if a graph has captured a step.

        Raises:
            RuntimeError: a graph writes memory that the hook no longer uses.
        """
        for counter, value, _ in self._stale:
            if int(counter) != value:
                raise RuntimeError(
                    "torch_commhook: a CUDA graph was replayed that had captured the hook's memory "
                    "before a state was loaded or buckets were rebuilt; the present memory "
                    "misses those steps. Capture the graph again"
                )
        if self._counter is None or not self._has_captured:
            return self._before
        return self._before + int(self._counter)

    def memory_loaded(self, before: object) -> None:
        """As :meth:`memory_replaced`, by another training's memory: no earlier replay counts."""
        self.memory_replaced(before)
        self._stale = [(counter, int(counter), kept) for counter, _, kept in self._stale]

    def memory_replaced(self, before: object) -> None:
        """Note that the hook uses other tensors from now on: graphs must be captured again.

        The object ``before``, which has the old tensors, stays: graphs may still be replayed.
        """
        if self._counter is None or not self._has_captured:
            return
        counter, value = self._counter, int(self._counter)
        self._stale.append((counter, value, before))
        self._before += value
        self._counter, self._has_captured = None, False
        if self._device is not None:
            self.prepare(self._device)


def cannot_be_captured(what: str, why: str) -> RuntimeError:
    """The error of a hook whose steps change with a count on the host."""
    return RuntimeError(
        f"{what}: a CUDA graph cannot capture its steps: {why}, and replays run nothing on the host"
    )
