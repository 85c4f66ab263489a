"""A hook that measures in the first steps which hook makes a step shortest, and then uses it."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_commhook import _C
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.codecs.base import CODECS
from torch_commhook.hooks.base import Hook, HookTraits
from torch_commhook.hooks.compressed import check_inner_hook, hook_of_codec
from torch_commhook.hooks.mean import allreduce, cast
from torch_commhook.hooks.powersgd import powersgd
from torch_commhook.hooks.wrappers import number_text
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.watches import cannot_be_captured
from torch_commhook.wording import check_type

# ---- records a model's first steps ---------------------------------------------------------------


#: The number of steps before the timed ones: DDP forms new buckets after the first.
WARM_UP = 2
#: The number of timed steps.
TIMED = 3
#: The number of steps after which the record is complete.
STEPS = WARM_UP + TIMED
#: The most elements of a sample of the gradients, and the number of buckets in it.
_MOST_SAMPLED, _SAMPLED_BUCKETS = 1 << 19, 2


class FirstSteps:
    """Times and gradients of one model's first steps, on this rank.

    ``is_sparse`` says whether a gradient was sparse.
    """

    def __init__(self) -> None:
        self.is_sparse = False
        self._ended: float | None = None  # the end of the previous step
        self._ready: dict[int, list[float]] = {}  # by bucket
        self._samples: dict[int, list[Tensor]] = {}  # by bucket
        self._bucket_count = 0

    def bucket_full(self, bucket: GradBucket, steps: int) -> None:
        """Record that a bucket has all gradients, after this number of earlier steps."""
        if bucket.is_sparse():
            self.is_sparse = True
            return
        if not WARM_UP <= steps < STEPS or self._ended is None:
            return
        if bucket.bucket_count() != self._bucket_count:
            self._bucket_count = bucket.bucket_count()
            self._ready, self._samples = {}, {}
        if bucket.device().type == "cuda":  # the device works later than the host
            torch.cuda.current_stream(bucket.device()).synchronize()
        seconds = time.perf_counter() - self._ended
        self._ready.setdefault(bucket.index(), []).append(seconds)
        if steps == STEPS - 1 and bucket.index() in _sampled_buckets(self._bucket_count):
            gradients = bucket.gradients()
            self._samples[bucket.index()] = [
                gradients[place].detach().reshape(-1, *shape[1:])[: shape[0]].clone()
                for place, shape in _sampled(bucket.sizes())
            ]

    def step_ended(self, device: torch.device | None = None) -> None:
        """Record the end of a step that counts on all ranks."""
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self._ended = time.perf_counter()

    def ready(self, buckets: int) -> list[float] | None:
        """The median times at which buckets were full, in seconds from the end of the step before.

        None if one of this many buckets has no record.
        """
        if sorted(self._ready) != list(range(buckets)):
            return None
        return [statistics.median(self._ready[index]) for index in range(buckets)]

    def sample(self, buckets: Sequence[BucketMemory]) -> list[list[Tensor]] | None:
        """Gradients of the last recorded step, or their first rows: a list for each sampled bucket.

        None without a record of them.
        """
        found = [self._samples.get(buckets[i].index, []) for i in _sampled_buckets(len(buckets))]
        seen = [[gradient.shape for gradient in sample] for sample in found]
        return [sample for sample in found if sample] if seen == sample_shapes(buckets) else None


def sample_shapes(buckets: Sequence[BucketMemory]) -> list[list[torch.Size]]:
    """The shapes of the gradients of :meth:`FirstSteps.sample`, the same on all ranks."""
    sampled = [buckets[i].layout.sizes for i in _sampled_buckets(len(buckets))]
    return [[shape for _, shape in _sampled(sizes)] for sizes in sampled]


def random_sample(buckets: Sequence[BucketMemory], seed: int) -> list[list[Tensor]]:
    """Random normal numbers of the shapes of :func:`sample_shapes`."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    found = []
    for i, shapes in zip(_sampled_buckets(len(buckets)), sample_shapes(buckets), strict=True):
        to = buckets[i].device, buckets[i].gradient_dtype
        sample = [
            torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(*to)
            for shape in shapes
        ]
        found.append(sample)
    return [sample for sample in found if sample]


def _sampled_buckets(count: int) -> list[int]:
    """The numbers of the sampled buckets, evenly spaced."""
    return [i * count // _SAMPLED_BUCKETS for i in range(_SAMPLED_BUCKETS) if count > i]


def _sampled(sizes: Sequence[torch.Size]) -> list[tuple[int, torch.Size]]:
    """The sampled gradients of a bucket: their places, and the shapes of the sampled parts.

    Gradients that fit are sampled whole, since low-rank factors depend on the shape. If no matrix
    fits, the first rows of the largest one are sampled.
    """
    left = _MOST_SAMPLED // _SAMPLED_BUCKETS
    shapes = [size or torch.Size([1]) for size in sizes]
    order = [place for place in range(len(shapes)) if shapes[place].numel()]
    order.sort(key=lambda place: shapes[place].numel(), reverse=True)
    found: dict[int, torch.Size] = {}
    if order and all(len(shape) < 2 or shape.numel() > left for shape in shapes):
        rows, *rest = shapes[order[0]]
        rows = min(rows, max(1, left // max(1, math.prod(rest))))
        found[order.pop(0)] = taken = torch.Size([rows, *rest])
        left -= taken.numel()
    for place in order:
        if shapes[place].numel() <= left:
            found[place] = shapes[place]
            left -= shapes[place].numel()
    return sorted(found.items())


# ---- a hook that measures in the first steps which hook makes a step shortest --------------------


#: The number of a choice that the ranks have not made yet.
_OPEN = 0
#: The limit of ``max_error``. No hook's error reaches it; that of a result of zeros is 1.
_MOST_ERROR = 1e6


class auto(Hook):  # noqa: N801 (a hook is written as it is called)
    """Measure in the first steps which hook makes a step shortest, and then average with that hook.

    For five steps, ``auto`` averages as :class:`allreduce` does. At the beginning of the sixth, the
    ranks measure their link, each hook's computing time, and each hook's error on a sample of the
    model's own gradients. From these figures and from the times at which buckets were full, rank 0
    predicts the time of a step with each hook. From the end of that step on, all ranks use the
    fastest hook with an error of at most ``max_error``, or :class:`allreduce` if no hook saves at
    least 5 % of a step. ``handle.stats()`` has the choice and its reason. Rank 0 logs the figures
    of all hooks (``torch_commhook.planning.choice``, level INFO; other ranks: DEBUG).

    If compiled autograd captures a backward earlier, the ranks choose before the capture. The
    model's computing time is unknown then, and counts as zero.

    The hook's state (``handle.state_dict()``) contains the choice. A run that loads it measures
    nothing.

    Args:
        max_error: the largest relative error that a hook may have: the distance of its result from
            the exact mean of the ranks' gradients, divided by the length of that mean, as in
            :func:`torch_commhook.testing.simulate`. Above 0 and below 1e6.
        hooks: the candidates beside ``allreduce()``. Default: ``cast()``, ``blockwise()``,
            ``fp8()``, ``blockwise(bits=4)``, ``blockwise(bits=2)``, ``topk()`` and
            ``powersgd(rank=4)``. None of these has error feedback, because optimizers such as AdamW
            do not tolerate it.

    Raises:
        TypeError: ``max_error`` is not a number, or ``hooks`` is not a sequence of hooks of the
            library.
        ValueError: ``max_error`` is outside its range; ``hooks`` is empty, has only
            ``allreduce()``, or has a hook twice; or a hook keeps ranks apart, scales steps, or
            chooses a hook itself.

    Example:
        >>> def train(rank):
        ...     model = nn.Linear(4, 1)
        ...     handle = attach(model, hooks.auto(max_error=0.05))
        ...     for _ in range(6):
        ...         model(torch.ones(1, 4)).sum().backward()
        ...     return handle.stats().choice, handle.stats().reason
        >>> run_ranks(train, 2)[0]
        ('allreduce()', 'the ranks are threads of one process, with no link between them')
    """

    def __init__(self, max_error: float, hooks: Sequence[Hook] | None = None) -> None:
        super().__init__()
        check_type("auto: max_error", max_error, "a number", int, float)
        if not 0 < max_error < _MOST_ERROR:
            raise ValueError(
                f"auto: max_error must be above 0 and below {_MOST_ERROR:g}, got {max_error}"
            )
        self.max_error = float(max_error)
        self._has_default_hooks = hooks is None
        given = _default_hooks() if hooks is None else _checked_hooks(hooks)
        self._plain = allreduce()
        others = [hook for hook in given if repr(hook) != repr(self._plain)]
        if not others:
            raise ValueError(
                f"auto: hooks must have a hook beside {self._plain}, which is always a candidate"
            )
        #: The candidates; the first is ``allreduce()``.
        self.candidates: Sequence[Hook] = (self._plain, *others)
        self._by_number = dict(enumerate(self.candidates, start=_OPEN + 1))
        # A saved choice counts only for the same candidates.
        texts = repr([repr(hook) for hook in self.candidates])
        self._kind = f"auto {hashlib.sha256(texts.encode()).hexdigest()[:8]}"
        self.traits = replace(
            HookTraits.of_any(self.candidates), settles_buckets=True, chooses=True
        )
        self._in_use: list[Hook] = [self._plain]

    def hooks_inside(self) -> Sequence[Hook]:
        return self.candidates

    @property
    def lets_stages_wait(self) -> bool:
        return all(hook.lets_stages_wait for hook in self._in_use)

    # ---- the choice ------------------------------------------------------------------------------

    def chosen(self, memory: HookMemory) -> Hook | None:
        """The hook that the ranks chose for a model; None before the choice."""
        numbers = {bucket.choices.get(self._kind, _OPEN) for bucket in memory.bucket_memories()}
        return None if not numbers or _OPEN in numbers else self._by_number[min(numbers)]

    def is_due(self, memory: HookMemory) -> bool:
        """Whether a model's first steps are done and no hook is chosen; the same on all ranks."""
        return self.chosen(memory) is None and memory.steps >= STEPS

    def first_steps(self, memory: HookMemory) -> FirstSteps:
        """The records of a model's first steps on this rank."""
        return self._progress(memory).first_steps

    def _progress(self, memory: HookMemory) -> _Progress:
        """The progress of the choice for a model."""
        found: _Progress = memory.notes.setdefault(self._kind, _Progress())
        return found

    def propose(self, memory: HookMemory, number: int, reason: str) -> None:
        """Propose the hook ``candidates[number]`` for a model, with the reason in words.

        It counts once the current step has succeeded on all ranks.
        """
        self._progress(memory).proposed = number, reason

    def withdraw(self, memory: HookMemory) -> None:
        """Forget the proposed hook, because the step repeats."""
        self._progress(memory).proposed = None

    def take_proposed(self, memory: HookMemory) -> None:
        """Average with the proposed hook from now on. Call it between steps or at a step's end."""
        progress = self._progress(memory)
        if progress.proposed is None:
            return
        number, _ = progress.taken = progress.proposed
        progress.proposed = None
        with torch.inference_mode(False), torch.no_grad():
            for bucket in memory.bucket_memories():
                bucket.set_choice(self._kind, number + _OPEN + 1)
                self._prepare_chosen(bucket, self.candidates[number])
        progress.first_steps = FirstSteps()  # frees the sampled gradients

    def explain(self, memory: HookMemory, reason: str) -> None:
        """Set the reason why no hook is chosen."""
        self._progress(memory).why_open = reason

    def choice_and_reason(self, memory: HookMemory) -> tuple[str, str]:
        """The text of the hook that averages a model's gradients, and the reason for it."""
        hook, progress = self.chosen(memory), self._progress(memory)
        if hook is None:
            return repr(self._plain), progress.why_open
        number, reason = progress.taken
        is_loaded = self.candidates[number] is not hook or not reason
        return repr(hook), "the loaded state has this choice" if is_loaded else reason

    # ---- averages --------------------------------------------------------------------------------

    def prepare(self, memory: BucketMemory) -> None:
        numbers = (_OPEN, *self._by_number)
        number = memory.declare_choice(self._kind, _OPEN, among=numbers, decides_memory=True)
        self._prepare_chosen(memory, self._by_number.get(number, self._plain))

    def _prepare_chosen(self, memory: BucketMemory, hook: Hook) -> None:
        if hook not in self._in_use:
            self._in_use.append(hook)
        hook.prepare(memory)

    def _hook_of(self, memory: BucketMemory) -> Hook:
        return self._by_number.get(memory.choices[self._kind], self._plain)

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        memory = self.memory(bucket)
        if memory.choices[self._kind] == _OPEN:
            owner = memory.owner
            if isinstance(owner, HookMemory) and owner.world_size > 1:
                self.first_steps(owner).bucket_full(bucket, owner.steps)
        return self._hook_of(memory).average(bucket)

    def result_dtype(self, bucket: GradBucket) -> torch.dtype:
        return self._hook_of(self.memory(bucket)).result_dtype(bucket)

    def segments(self, memory: BucketMemory) -> list[str]:
        return self._hook_of(memory).segments(memory)

    def check_capture(self, memory: BucketMemory) -> None:
        if memory.choices[self._kind] == _OPEN and memory.world_size > 1:
            raise cannot_be_captured(
                str(self), f"it has not chosen a hook yet; run more than {STEPS} steps first"
            )
        self._hook_of(memory).check_capture(memory)

    def step_counted(self, memory: HookMemory) -> None:
        chosen = self.chosen(memory)
        if chosen is not None:
            chosen.step_counted(memory)
            return
        self.take_proposed(memory)
        buckets = memory.bucket_memories()
        if buckets and memory.world_size > 1 and self.chosen(memory) is None:
            self.first_steps(memory).step_ended(buckets[0].device)

    def _own_memory_of(self, bucket: GradBucket) -> BucketMemory:
        raise RuntimeError(
            f"{self}: it chooses a hook in the first steps of a model, and only an attached hook "
            "sees these; use torch_commhook.attach(model, hook)"
        )

    def __repr__(self) -> str:
        hooks = "" if self._has_default_hooks else f", hooks={list(self.candidates[1:])}"
        return f"auto(max_error={number_text(self.max_error)}{hooks})"


class _Progress:
    """The progress of the choice for one model: ``first_steps`` has its records."""

    def __init__(self) -> None:
        self.first_steps = FirstSteps()
        #: The number of the hook that counts from the end of this step on, and the reason.
        self.proposed: tuple[int, str] | None = None
        #: Those of the last proposed hook that counts now.
        self.taken = 0, ""
        #: The reason why no hook is chosen.
        self.why_open = f"its first {STEPS} steps are not over yet"


def _default_hooks() -> list[Hook]:
    blockwise, fp8, topk = (hook_of_codec(CODECS[name]) for name in ("blockwise", "fp8", "topk"))
    in_blocks = [blockwise(), fp8(), blockwise(bits=4), blockwise(bits=2)]
    return [cast(), *in_blocks, topk(), powersgd(rank=4)]


def _checked_hooks(hooks: object) -> list[Hook]:
    if isinstance(hooks, str) or not isinstance(hooks, Sequence):
        raise TypeError(f"auto: hooks must be a sequence of hooks, got {_C.type_name(hooks)}")
    if not hooks:
        raise ValueError("auto: hooks must have at least one hook to choose from, got none")
    for number, hook in enumerate(hooks):
        where = f"auto: hooks[{number}]"
        check_inner_hook(where, hook)
        if hook.scales_steps or hook.keeps_ranks_apart:
            raise ValueError(
                f"{where} must average gradients in each step and leave their scale alone, got "
                f"{hook}"
            )
    texts = [repr(hook) for hook in hooks]
    twice = next((text for text in texts if texts.count(text) > 1), None)
    if twice is not None:
        raise ValueError(f"auto: hooks must differ from each other, got {twice} twice")
    return list(hooks)
