"""Hooks around another hook."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_commhook import _C
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.codecs.base import ERROR_DTYPES, check_decay
from torch_commhook.hooks.base import Hook, HookTraits, step_scale_of
from torch_commhook.hooks.compressed import check_inner_hook
from torch_commhook.hooks.mean import allreduce
from torch_commhook.memory.bucket_memory import BucketMemory, ShardedBucket
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.watches import cannot_be_captured
from torch_commhook.native.bucket_ops import flatten_stats
from torch_commhook.wording import check_type


class Wrapper(Hook):
    """A hook around another hook, which does the work."""

    def __init__(self, hook: Hook) -> None:
        super().__init__()
        self._check_inside("hook", hook)
        self.hook = hook
        self.traits = HookTraits.of_any([hook])
        self.error_dtype, self.error_decay = hook.error_dtype, hook.error_decay

    def _check_inside(self, name: str, hook: Hook) -> None:
        check_inner_hook(f"{type(self).__name__}: {name}", hook)
        if hook.keeps_ranks_apart:
            raise ValueError(
                f"{type(self).__name__}: {name} must average in each step, got "
                f"{hook}, which keeps ranks apart; put this wrapper inside it, as its hook"
            )

    def hooks_inside(self) -> Sequence[Hook]:
        return (self.hook,)

    def prepare(self, memory: BucketMemory) -> None:
        self.hook.prepare(memory)

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.memory(bucket)  # the outermost hook's, which all inner hooks share
        return self.hook.average(bucket)

    def result_dtype(self, bucket: GradBucket) -> torch.dtype:
        return self.hook.result_dtype(bucket)

    def check_shards(self) -> None:
        for hook in self.hooks_inside():
            hook.check_shards()

    def average_shard(self, bucket: ShardedBucket) -> torch.futures.Future[Tensor]:
        self.memory(bucket)
        return self.hook.average_shard(bucket)

    def step_scale(
        self,
        results: Sequence[Tensor],
        past: Mapping[int, bool],
        loss_scale: Tensor | None = None,
    ) -> Tensor | None:
        return step_scale_of(self._hook_after(past), results, past, loss_scale)

    def step_counted(self, memory: HookMemory) -> None:
        self._hook_after(memory.past).step_counted(memory)

    def _hook_after(self, past: Mapping[int, bool]) -> Hook:
        """The inner hook whose turn it is, by the number of steps done."""
        return self.hook


class error_feedback(Wrapper):  # noqa: N801 (a hook is written as it is called)
    """Add the errors of earlier messages to the next message.

    Let g be the gradient of a step, and e the error memory. The rank sends p = g + e, and remembers
    e' = p - C(p). C(p) is the content of its message. If a sum is encoded again for its way
    back, the rank that encodes it remembers that error. So nothing is lost for good: under SGD with
    step size lr, the parameters minus lr times the mean error memory follow the path of
    uncompressed SGD.

    With ``decay=d`` below 1, ``e' = d (p - C(p))``: the memory fades, and the invariant does not
    hold. An error weighs ``d^n`` after n steps. :class:`momentum` is the same arithmetic. A decay
    below 1 takes one more pass over the memory.

    Encoding updates the memory in the same pass. The memory is float32: 4 bytes for each element,
    plus 4 for each element that this rank sums. With ``dtype=torch.bfloat16`` it takes half.
    Errors are still computed in float32, and rounded once when written: to the nearest value, off
    by at most 2^-8 of the remembered value. ``topk``, ``chunk_topk`` and ``randomk`` round at
    random, off by less than 2^-7 and unbiased, because most of their errors grow for many steps by
    less than their last bit.

    A step that fails on some rank may lose the content of its messages, while the memory keeps the
    rest: a repeated backward sends that rest twice. Load an earlier state if this matters. Under a
    ``GradScaler`` the hook must know the scaler: ``attach(model, hook, scaler=scaler)``.

    Args:
        hook: a hook that compresses, or contains one that does.
        decay: the factor of the memory in each step, in (0, 1].
        dtype: the memory's dtype: ``torch.float32`` or ``torch.bfloat16``. A decayed bfloat16
            memory is rounded at random, without bias.

    Raises:
        TypeError: ``hook`` is not a hook of the library, ``decay`` is not a number, or
            ``dtype`` is another dtype.
        ValueError: ``hook`` loses nothing, remembers its errors already, or is unbiased by scaling;
            ``decay`` is out of range.

    Example:
        >>> gradients = [[torch.tensor([1.0, 0.1])], [torch.tensor([1.0, 0.1])]]
        >>> hook = hooks.error_feedback(hooks.topk(0.5))  # sends one of the two values
        >>> simulate(hook, gradients).result
        [tensor([1., 0.])]
        >>> simulate(hook, gradients, steps=10).result
        [tensor([0.0000, 1.0000])]
        >>> simulate(hook, gradients, steps=11).result
        [tensor([2., 0.])]
    """

    _lets_stages_wait = True
    #: The name in its text, and the name of ``decay`` there and in errors.
    _name, _decay_name = "error_feedback", "decay"

    def __init__(
        self, hook: Hook, decay: float = 1.0, *, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(hook)
        name = self._name
        check_decay(f"{name}: {self._decay_name}", decay)
        if not isinstance(dtype, torch.dtype) or dtype not in ERROR_DTYPES:
            got = dtype if isinstance(dtype, torch.dtype) else _C.type_name(dtype)
            raise TypeError(f"{name}: dtype must be torch.float32 or torch.bfloat16, got {got}")
        if hook.keeps_error:
            raise ValueError(
                f"{name}: hook must be one that does not remember its errors already, got {hook}"
            )
        if not hook.takes_error:
            raise ValueError(f"{name}: hook must be one whose messages lose something, got {hook}")
        self.traits = replace(self.traits, takes_error=False, keeps_error=True)
        self.error_dtype = dtype
        self.error_decay = float(decay)

    def prepare(self, memory: BucketMemory) -> None:
        memory.with_error = True
        memory.error_dtype, memory.error_decay = self.error_dtype, self.error_decay
        super().prepare(memory)

    def _settings(self) -> str:
        return "" if self.error_decay == 1.0 else f", decay={number_text(self.error_decay)}"

    def __repr__(self) -> str:
        dtype = "" if self.error_dtype == torch.float32 else f", dtype={self.error_dtype}"
        return f"{self._name}({self.hook}{self._settings()}{dtype})"


class momentum(error_feedback):  # noqa: N801
    """Accumulate gradients in a momentum on each rank, and send a compressed part of it.

    With the momentum m and the gradient g of a step, ``m = beta m + g``; the rank sends ``C(m)``
    and keeps ``m - C(m)``. This is decoupled momentum, as in Peng et al., "DeMo: Decoupled Momentum
    Optimization" (2024). It equals error feedback with a memory that decays by beta::

        momentum(hook, beta)  # takes the steps of error_feedback(hook, decay=beta), bit for bit

    The content of a message is removed from the momentum. So large components are sent at once, and
    small ones accumulate until they are large. States hold ``beta (m - C(m))`` as the error.

    The result is the update: use SGD without a momentum of its own. Only with ``beta=1`` nothing is
    forgotten, and the invariant of :class:`error_feedback` holds.

    Args:
        hook: as for :class:`error_feedback`.
        beta: the momentum's factor in each step, in (0, 1].
        dtype: as for :class:`error_feedback`.

    Raises:
        TypeError, ValueError: as :class:`error_feedback`.

    Example:
        >>> gradients = [[torch.linspace(-1, 1, 4096)], [torch.linspace(0, 1, 4096)]]
        >>> hook = hooks.momentum(hooks.topk(0.25), beta=0.9)
        >>> same = hooks.error_feedback(hooks.topk(0.25), decay=0.9)
        >>> first, second = (simulate(each, gradients, steps=3).result[0] for each in (hook, same))
        >>> torch.equal(first, second)
        True
    """

    _lets_stages_wait = True
    _name, _decay_name = "momentum", "beta"

    def __init__(self, hook: Hook, beta: float, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(hook, beta, dtype=dtype)

    def _settings(self) -> str:
        return f", beta={number_text(self.error_decay)}"


class after(Wrapper):  # noqa: N801
    """Use one hook for the first steps, and another one afterwards.

    Gradients change fastest at the start of training, and compression harms most there. Under
    compiled autograd the change recompiles once.

    Args:
        step: the number of steps that ``before`` averages.
        hook: averages all later steps.
        before: averages the first steps. The default is :class:`allreduce`.

    Raises:
        TypeError: ``step`` is not an int, or a hook is none of the library.
        ValueError: ``step`` is negative; only one of two lossy hooks remembers its errors;
            ``before`` remembers errors and ``hook`` does not; their memories differ in dtype or
            decay; both send parts of a bucket.

    Example:
        >>> gradients = [[torch.linspace(-1, 1, 4096)], [torch.linspace(0, 1, 4096)]]
        >>> hook = hooks.after(2, hooks.error_feedback(hooks.blockwise(bits=4)))
        >>> [simulate(hook, gradients, steps=steps).wire_bytes for steps in (1, 2, 3)]
        [16384, 16384, 2112]
    """

    _lets_stages_wait = True

    def __init__(self, step: int, hook: Hook, before: Hook | None = None) -> None:
        super().__init__(hook)
        check_type("after: step", step, "an int", int)
        if step < 0:
            raise ValueError(f"after: step must be at least 0, got {step}")
        self.step = step
        self.before = allreduce() if before is None else before
        self._before_is_plain = before is None
        self._check_inside("before", self.before)
        self._check_memory()
        # The later hook sends the errors of the earlier one.
        either = HookTraits.of_any([hook, self.before])
        self.traits = replace(either, takes_error=hook.takes_error)
        self._left_plan = f"left by {self.before} for {self.hook}"

    def hooks_inside(self) -> Sequence[Hook]:
        return (self.hook, self.before)

    def _check_memory(self) -> None:
        """Check that both hooks can share one memory: ``hook`` sends the errors of ``before``."""
        before, hook = self.before, self.hook
        if before.keeps_error and not hook.keeps_error:
            raise ValueError(
                "after: hook must remember its errors, as before does, and send those of before, "
                f"got {hook} after {before}; use error_feedback"
            )
        if hook.keeps_error and before.takes_error and not before.keeps_error:
            raise ValueError(
                f"after: before must remember its errors, as hook does, got {before} before "
                f"{hook}; use error_feedback"
            )
        if before.keeps_error and before.error_dtype != hook.error_dtype:
            raise ValueError(
                f"after: before must remember errors in hook's dtype, {hook.error_dtype}, got "
                f"{before.error_dtype}"
            )
        if before.keeps_error and before.error_decay != hook.error_decay:
            raise ValueError(
                "after: before's memory must decay as hook's does, by "
                f"{number_text(hook.error_decay)}, got {number_text(before.error_decay)}"
            )
        parts = before.splits_buckets + hook.splits_buckets
        if parts > 1 or (parts and before.keeps_error):
            raise ValueError(
                "after: another hook cannot use a policy's memory of parts of a bucket, "
                f"got {hook} after {before}"
            )

    def prepare(self, memory: BucketMemory) -> None:
        memory.track_step(self.step)
        # The hook that owns a loaded memory takes it over first. In the step of the change this is
        # still `before`.
        hooks = [self.before, self.hook]
        for hook in reversed(hooks) if memory.steps > self.step else hooks:
            hook.prepare(memory)
        left = set(self.before.segments(memory)) - set(self.hook.segments(memory))
        memory.plans[self._left_plan] = "\n".join(sorted(left))

    def _take_over(self, memory: BucketMemory) -> None:
        """Let ``hook`` send the errors of ``before``, if ``hook`` has no memory of its own."""
        left = memory.plans[self._left_plan]
        if left and self._left_plan not in memory.folded:
            memory.fold_segments(left.split("\n"))
            memory.folded.add(self._left_plan)

    def check_capture(self, memory: BucketMemory) -> None:
        if not memory.past.get(self.step):
            raise cannot_be_captured(
                str(self), f"step {self.step}, after which another hook averages, is still to come"
            )
        self.hook.check_capture(memory)

    def _hook_after(self, past: Mapping[int, bool]) -> Hook:
        return self.hook if past.get(self.step) else self.before

    def _hook_of_now(self, bucket: GradBucket) -> Hook:
        memory = self.memory(bucket)
        current = self._hook_after(memory.past)
        if current is self.hook:
            self._take_over(memory)
        return current

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return self._hook_of_now(bucket).average(bucket)

    def result_dtype(self, bucket: GradBucket) -> torch.dtype:
        return self._hook_after(self.memory(bucket).past).result_dtype(bucket)

    def average_shard(self, bucket: ShardedBucket) -> torch.futures.Future[Tensor]:
        return self._hook_of_now(bucket).average_shard(bucket)

    def __repr__(self) -> str:
        before = "" if self._before_is_plain else f", before={self.before}"
        return f"after({self.step}, {self.hook}{before})"


class clip(Wrapper):  # noqa: N801
    """Scale a step's averaged gradients so that their norm is at most ``max_norm``.

    The norm is that of all gradients together, as in ``torch.nn.utils.clip_grad_norm_``, with the
    same factor: ``min(1, max_norm / (norm + 1e-6))``. The norm is summed in float64. The factor is
    applied in float32, or in float64 to float64 results. Our own reducer applies it while it writes
    the gradients, without another pass over memory. On CUDA the norm stays on the device, and the
    factor takes one more pass. All ranks have the same results, so the norm needs no communication.

    Only for attached hooks (:func:`torch_commhook.attach`): a hook by itself never sees all buckets
    of a step. If ``attach`` got a ``GradScaler``, the norm is that of unscaled gradients.

    Args:
        max_norm: a positive number.
        hook: averages the gradients. The default is :class:`allreduce`.

    Raises:
        ValueError: ``max_norm`` is not positive.
        TypeError: ``max_norm`` is not a number, or ``hook`` is not a hook of the library.

    Example:
        >>> def train(rank):
        ...     model = nn.Linear(4, 1, bias=False)
        ...     attach(model, hooks.clip(1.0))
        ...     model(torch.full((1, 4), 10.0)).sum().backward()
        ...     return round(model.weight.grad.norm().item(), 4)
        >>> run_ranks(train, 2)
        [1.0, 1.0]
    """

    _lets_stages_wait = True

    def __init__(self, max_norm: float, hook: Hook | None = None) -> None:
        super().__init__(allreduce() if hook is None else hook)
        check_type("clip: max_norm", max_norm, "a number", int, float)
        if not 0 < max_norm <= math.inf:
            raise ValueError(f"clip: max_norm must be positive, got {max_norm}")
        try:
            self.max_norm = float(max_norm)
        except OverflowError as error:
            got = f"an int of {int(max_norm).bit_length()} bits"
            raise ValueError(
                f"clip: max_norm must be a number that a float can hold, got {got}"
            ) from error
        self._is_plain = hook is None
        self.traits = replace(self.traits, scales_steps=True)

    def step_scale(
        self,
        results: Sequence[Tensor],
        past: Mapping[int, bool],
        loss_scale: Tensor | None = None,
    ) -> Tensor | None:
        norm = _total_norm(list(results))
        if loss_scale is not None:
            norm = norm / loss_scale.to(norm.device, norm.dtype)
        wide = any(result.dtype in (torch.float64, torch.complex128) for result in results)
        dtype = torch.float64 if wide else torch.float32
        scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0).to(dtype)
        inner = step_scale_of(self.hook, results, past, loss_scale)
        return scale if inner is None else torch.minimum(scale, inner)

    def check_shards(self) -> None:
        raise TypeError(
            f"{self}: no rank sees the norm of sharded gradients; call "
            "torch.nn.utils.clip_grad_norm_() after backward(), which sums it over the shards"
        )

    def __repr__(self) -> str:
        hook = "" if self._is_plain else f", {self.hook}"
        return f"clip({number_text(self.max_norm)}{hook})"


def number_text(number: float) -> str:
    """The shortest text that is read as the same number."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


#: Elements whose copy stays in a cache of the CPU; the number that other devices take at a time.
_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 24


def _total_norm(results: list[Tensor]) -> Tensor:
    """The norm of all results together: float64, 0-dimensional, on the first result's device.

    Summed in float64, so that the norm rounded to float32 does not depend on the buckets, which
    differ in compiled code and in DDP.
    """
    squares = [flatten_stats(batch).sum_of_squares for batch in _batches(results)]
    device = squares[0].device
    return torch.stack([square.to(device) for square in squares]).sum().sqrt()


def _batches(results: list[Tensor]) -> Iterator[list[Tensor]]:
    """The numbers of all results, those of one dtype and device that fit a cache together."""
    batch: list[Tensor] = []
    room = 0
    for result in results:
        if result.layout is not torch.strided:
            result = result.coalesce().values()
        if result.is_complex():
            result = torch.view_as_real(result)
        most = _CHUNK if result.device.type == "cpu" else _DEVICE_CHUNK
        for piece in result.reshape(-1).split(most):
            kind = piece.dtype, piece.device
            if batch and (piece.numel() > room or kind != (batch[0].dtype, batch[0].device)):
                yield batch
                batch = []
            if not batch:
                room = most
            batch.append(piece)
            room -= piece.numel()
    yield batch
