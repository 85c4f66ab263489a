"""The scale of mixed precision, by which gradients are multiplied when they come to a hook."""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_commhook import _C
from torch_commhook._dynamo import left_to_python
from torch_commhook.running_backward import is_inside

if TYPE_CHECKING:
    from torch_commhook.attached import Attached
    from torch_commhook.bucket import GradBucket

_log = logging.getLogger(__name__)

_OPTIMIZER_FILE = register_optimizer_step_pre_hook.__code__.co_filename

_LARGEST = torch.finfo(torch.float32).max

#: Of the scaler's methods, one of which calls an optimizer's ``step()``.
_STEPS = frozenset(
    method.__code__
    for method in (GradScaler.step, getattr(GradScaler, "_maybe_opt_step", None))
    if method is not None
)
#: Between those and the optimizer's hooks: what wraps ``step()``, such as a scheduler.
_MOST_FRAMES = 16


def checked_scale(scaler: Any) -> float:
    """:func:`scale_of` for what a user gives.

    Raises:
        TypeError: it is no ``torch.amp.GradScaler``, nor has its ``get_scale()``.
        ValueError: its scale is not positive and finite.
    """
    if isinstance(scaler, type) or not callable(getattr(scaler, "get_scale", None)):
        raise TypeError(
            "attach: scaler must be a torch.amp.GradScaler, or have its get_scale(), got "
            f"{_C.type_name(scaler)}"
        )
    return scale_of(scaler, "attach")


def scale_of(scaler: Any, who: str) -> float:
    """What the next gradients are multiplied by. Waits for the device where that holds the scale.

    Args:
        scaler: what was given to ``attach``.
        who: who asks, for the message.

    Raises:
        TypeError: ``get_scale()`` gives no number.
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


# ---- scalers that a hook was not told of ---------------------------------------------------------
# A scaler calls the optimizer's step(): a hook on all optimizers finds it among its callers. That
# costs a microsecond in a step.

_watched: weakref.WeakSet[Attached] = weakref.WeakSet()
_handles: list[Any] = []


def watch(attached: Attached) -> None:
    """Say once, in the log, where a scaler turns up that the hook was not told of."""
    if attached not in _watched:
        _watched.add(attached)
        # Of a model that goes away with its hook on.
        weakref.finalize(attached, _end).atexit = False
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))


def watch_no_more(attached: Attached) -> None:
    """Look for scalers no more, where a hook is taken off."""
    _watched.discard(attached)
    _end()


@left_to_python
def _end() -> None:
    """Take the hook off all optimizers, where nothing is left to look for."""
    # The garbage collector may come here while an optimizer iterates over its hooks.
    if not list(_watched) and not is_inside(_OPTIMIZER_FILE):  # a set may count what is just going
        while _handles:
            _handles.pop().remove()


@left_to_python
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # A compiler that traces step() would break its graph at this.
    if torch.compiler.is_compiling() or not _scaler_calls():
        return
    own = [p for group in optimizer.param_groups for p in group["params"]]
    for attached in list(_watched):
        if attached.memory.has_any(own):
            _watched.discard(attached)  # the hook here stays: optimizers iterate over theirs
            attached.memory.jump_watch = None
            _log.warning(
                "hook '%s' was not told of the GradScaler that scales its gradients: %s; use "
                "attach(model, hook, scaler=scaler)",
                attached.name,
                "its error memory is in units of the old scale when the scale changes"
                if attached.keeps_error
                else "it clips by the norm of scaled gradients",
            )


def _scaler_calls() -> bool:
    """Whether a scaler is calling the optimizer's step()."""
    frame: Any = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        if frame.f_code in _STEPS:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False


# ---- scales that nobody told of ------------------------------------------------------------------


class JumpWatch:
    """Looks for two steps between which a rank's gradients become 2**k times as large, and stay so.

    Training alone seldom does that: never in 60,000 steps of 120 small networks. The watch takes
    the norm of a sample of one gradient in each step. The norms of :attr:`STEPS` steps, and those
    of as many that follow, must each vary by less than half of the jump. The jump must be close to
    a power of two, and most of it must lie between two steps. On CUDA a norm is read when it has
    come to the host, without waiting for it.

    Args:
        hook: its name, for the message.
        keeps_error: whether the hook remembers errors; it clips otherwise.
    """

    STEPS = 8
    SAMPLE = 1024

    #: Octaves from the nearest power of two: for a jump by one or two octaves, and by more.
    TOLERANCES = 0.2, 0.4
    #: The part of a jump that lies between two steps.
    MOST = 0.7

    def __init__(self, hook: str, *, keeps_error: bool) -> None:
        self.hook = hook
        self.keeps_error = keeps_error
        self.has_ended = False
        self._looked_at: tuple[int, ...] | None = None  # which gradient of how many, its size
        self._octaves: deque[float] = deque(maxlen=2 * self.STEPS)
        self._on_the_way: deque[tuple[Tensor, Any]] = deque()

    @torch.no_grad()
    def look(self, bucket: GradBucket) -> None:
        """Look at the gradients of a bucket that a hook is to average; at those of bucket 0."""
        if torch.compiler.is_compiling() or self.has_ended or bucket.index() != 0:
            return
        sample = self._sample(bucket.sources())
        if sample is None:
            return
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

    def read_when_come(self, norm: Tensor, event: Any) -> list[float]:
        """The norms of this and earlier steps that have come to the host since the last call.

        Args:
            norm: of no dimension, on the host.
            event: has a ``query()`` that says whether ``norm`` has come; None if it has.
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

    def _sample(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """Some values of the largest gradient that is plain memory; None where none is."""
        plain = [number for number, each in enumerate(gradients) if _is_plain(each)]
        if not plain:
            return None
        number = max(plain, key=lambda number: gradients[number].numel())
        size = gradients[number].numel()
        looked_at = (len(gradients), number, size)
        if looked_at != self._looked_at:  # buckets were formed anew
            self._looked_at = looked_at
            self._octaves.clear()
            self._on_the_way.clear()
        return gradients[number].detach().view(-1)[:: -(-size // self.SAMPLE)]

    def _note(self, norm: float) -> None:
        if not 0.0 < norm < math.inf:  # nothing was used, or a scale was too large
            return
        self._octaves.append(math.log2(norm))
        jump = self._jump()
        if jump is None:
            return
        self.has_ended = True
        _log.warning(
            "hook '%s': gradients have become 2**%d times as large from one step to the next, and "
            "stay so. If the loss is multiplied by a scale that has changed, %s; use "
            "torch_commhook.attach(model, hook, scaler=scaler) with an object whose get_scale() "
            "gives the scale",
            self.hook,
            jump,
            "what the hook remembers is in units of the old scale"
            if self.keeps_error
            else "the hook clips by the norm of scaled gradients",
        )

    def _jump(self) -> int | None:
        """By how many octaves gradients jumped :attr:`STEPS` steps ago, if they did."""
        if len(self._octaves) < 2 * self.STEPS:
            return None
        octaves = list(self._octaves)
        before, after = octaves[: self.STEPS], octaves[self.STEPS :]
        jump = fmean(after) - fmean(before)
        power = round(jump)
        if power == 0 or abs(jump - power) > self.TOLERANCES[abs(power) > 2]:
            return None
        spread = max(max(before) - min(before), max(after) - min(after))
        if spread > abs(jump) / 2 or abs(after[0] - before[-1]) < self.MOST * abs(jump):
            return None
        return power


def _is_plain(gradient: Tensor) -> bool:
    """Whether its values lie side by side, and are real numbers."""
    return (
        gradient.layout is torch.strided
        and gradient.is_floating_point()
        and gradient.is_contiguous()
        and gradient.numel() > 0
    )
