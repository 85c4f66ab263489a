"""Chooses the hook that makes a model's step shortest, by measurements of its ranks.

:func:`torch_commhook.planning.measure` gives each hook's computing time and traffic. A hook's error
is that of its result on gradients of the ranks, over their own process group. The predicted time of
a step follows from these figures, the link, and the times at which the model's buckets were full.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.collectives.plain import all_reduce
from torch_commhook.hooks.auto import FirstSteps, random_sample
from torch_commhook.hooks.base import Hook
from torch_commhook.hooks.hierarchical import hierarchical
from torch_commhook.hooks.mean import allreduce
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.planning.measured import Measured, measure
from torch_commhook.planning.model import HookError, Model, Parameter
from torch_commhook.planning.wire import scaled, through_seconds
from torch_commhook.step.link import (
    PAYLOAD,
    MeasuredLink,
    Wire,
    measure_rate,
    measure_round_trip,
)

#: The share of a step that a hook must save to replace ``allreduce()``.
LEAST_GAIN = 0.05
#: Steps that differ by less than this share count as equally fast.
_AS_FAST = 0.02
#: The time limits for measuring the link's round trip and its rate.
_ROUND_TRIP_SECONDS = 0.3
_LINK_SECONDS = 1.5
#: Calls of a hook. The last one gives its error, because low-rank factors improve with each call.
_CALLS = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """The figures of a hook.

    Attributes:
        hook: the hook's text.
        error: the relative error of its result; infinite if it cannot average the gradients.
        step_seconds: the predicted time of a step; infinite without a prediction.
    """

    hook: str
    error: float
    step_seconds: float = math.inf


@dataclass(frozen=True)
class Choice:
    """The hook for a model: its index among the candidates, and the reason in words."""

    number: int
    reason: str


def choose(
    candidates: Sequence[Candidate],
    max_error: float,
    link: MeasuredLink | None = None,
    *,
    has_computing: bool = True,
) -> Choice:
    """The hook with the shortest step among those with a small enough error.

    ``allreduce()``, which is first, stays unless another one saves 5 % of its step. The predictions
    are for ``link``, and contain the model's computing time if ``has_computing``.
    """
    plain, *others = candidates
    admitted = [i for i, each in enumerate(candidates) if i and each.error <= max_error]
    if not admitted:
        least = min(others, key=lambda each: _or_infinite(each.error))
        return Choice(
            0,
            f"no other hook has an error of at most {max_error:g}; that of {least.hook} is "
            f"{least.error:.2g}",
        )
    fastest = min((candidates[i] for i in admitted), key=lambda each: each.step_seconds)
    if math.inf in (fastest.step_seconds, plain.step_seconds):
        return Choice(0, "the step times could not be predicted; the log has the reason")
    step = "a step" if link is None else f"over a link of {format_link(link)}, a step"
    if not has_computing:
        step += ", without the model's unknown computing time,"
    if fastest.step_seconds > (1 - LEAST_GAIN) * plain.step_seconds:
        return Choice(
            0,
            f"{step} is predicted to take {format_seconds(plain.step_seconds)}, and "
            f"{format_seconds(fastest.step_seconds)} with {fastest.hook}, the fastest other hook",
        )
    as_fast = fastest.step_seconds * (1 + _AS_FAST)
    number = min(
        (i for i in admitted if candidates[i].step_seconds <= as_fast),
        key=lambda i: (candidates[i].error, candidates[i].step_seconds),
    )
    chosen = candidates[number]
    return Choice(
        number,
        f"{step} is predicted to take {format_seconds(chosen.step_seconds)}, and "
        f"{format_seconds(plain.step_seconds)} with {plain.hook}; the error is "
        f"{chosen.error:.2g} of at most {max_error:g}",
    )


def _or_infinite(error: float) -> float:
    return math.inf if math.isnan(error) else error


def predict(
    measured: Measured, link: MeasuredLink, *, buckets: Sequence[int], ready: Sequence[float]
) -> float:
    """The predicted time of a step, in seconds from the end of the step before.

    ``buckets`` has the elements of each bucket, in the order of a backward. ``ready`` has the time
    at which it is full, in seconds, with a hook that computes nothing.
    """
    shares = [size / sum(buckets) for size in buckets]
    # Hooks compute on the backward's processor, so each bucket's work delays the later buckets.
    later = [measured.compute_seconds * share for share in accumulate(shares)]
    full = [when + delay for when, delay in zip(ready, later, strict=True)]
    return through_seconds(
        measured.chains,
        measured.agreement,
        ready=full,
        shares=shares,
        computed=full[-1],
        bits_per_second=link.bits_per_second * PAYLOAD,
        latency=link.delay_seconds,
    )


def choose_hook(
    hooks: Sequence[Hook],
    max_error: float,
    *,
    buckets: Sequence[BucketMemory],
    first_steps: FirstSteps,
    group: dist.ProcessGroup,
) -> Choice:
    """Measure hooks on a model, and choose one. All ranks call it at the same point.

    The first hook is ``allreduce()``. ``first_steps`` are the records of the model's first steps on
    this rank. The choice is the same on all ranks. Rank 0 logs all figures at level INFO, other
    ranks at DEBUG.

    Raises:
        RuntimeError: a collective failed.
    """
    wire = Wire(group, buckets[0].device)
    if _on_any_rank(wire, first_steps.is_sparse):
        return Choice(0, "some gradients are sparse, and other hooks do not average these")
    errors = _errors(hooks, buckets, first_steps, wire)
    allowed = [i for i, error in enumerate(errors) if error <= max_error]
    link: MeasuredLink | None = None
    has_computing = True
    seconds: dict[int, float] = {}
    if len(allowed) > 1:
        round_trip = measure_round_trip(wire, _ROUND_TRIP_SECONDS)
        rate = measure_rate(wire, round_trip, _LINK_SECONDS)
        if not 0 < rate < math.inf:
            return Choice(0, "the link's rate could not be measured")
        link = MeasuredLink(rate, round_trip / 2)
        seen = first_steps.ready(len(buckets))
        has_computing = not _on_any_rank(wire, seen is None)
        ready = seen if seen is not None and has_computing else [0.0] * len(buckets)
        predicted = _predictions([hooks[i] for i in allowed], link, buckets, ready, wire)
        seconds = dict(zip(allowed, predicted, strict=True))
    candidates = [
        Candidate(str(hook), error, seconds.get(i, math.inf))
        for i, (hook, error) in enumerate(zip(hooks, errors, strict=True))
    ]
    choice = choose(candidates, max_error, link, has_computing=has_computing)
    level = _log_level(group)
    for each in candidates:
        is_known = each.step_seconds < math.inf
        step = format_seconds(each.step_seconds) if is_known else "not predicted"
        _log.log(level, "%s: error %.2g, step %s", each.hook, each.error, step)
    _log.log(level, "auto chose %s: %s", candidates[choice.number].hook, choice.reason)
    return choice


def _log_level(group: dist.ProcessGroup) -> int:
    """The level of the figures. All ranks have the same ones, so only rank 0 logs at INFO."""
    return logging.INFO if group.rank() == 0 else logging.DEBUG


def _on_any_rank(wire: Wire, flag: bool) -> bool:
    return bool(wire.largest(float(flag))[0])


# ---- computing time and traffic of hooks ---------------------------------------------------------


def _predictions(
    hooks: Sequence[Hook],
    link: MeasuredLink,
    buckets: Sequence[BucketMemory],
    ready: Sequence[float],
    wire: Wire,
) -> list[float]:
    """Rank 0's predictions, from the slowest rank's times; infinite for a hook without figures."""
    measured = [_measured(hook, buckets, wire) for hook in hooks]
    own = [math.inf if each is None else each.compute_seconds for each in measured]
    computing, latest = wire.largest(*own), wire.largest(*ready)
    sizes = [bucket.numel for bucket in buckets]
    seconds = [
        math.inf
        if each is None or slowest == math.inf
        else predict(replace(each, compute_seconds=slowest), link, buckets=sizes, ready=latest)
        for each, slowest in zip(measured, computing, strict=True)
    ]
    found: list[float] = wire.shared(*seconds)[0].tolist()
    return found


def _measured(hook: Hook, buckets: Sequence[BucketMemory], wire: Wire) -> Measured | None:
    """The figures of :func:`measure` for float32; None for a hook that cannot be measured."""
    parameters = []
    for bucket in buckets:
        names: Sequence[str | None] = bucket.names or [None] * len(bucket.layout.sizes)
        sizes = zip(bucket.layout.sizes, names, strict=True)
        parameters += [Parameter(tuple(size), name) for size, name in sizes]
    parameters.reverse()  # the last layers come first in a backward
    try:
        (found,) = measure(
            [hook],
            model=Model.of_parameters(parameters),
            world_size=wire.ranks,
            bucket_cap_mb=[4 * bucket.numel / (1 << 20) for bucket in buckets],
            nodes=_nodes(hook),
            device=wire.device,
        )
    except HookError as error:
        _log.log(_log_level(wire.group), "%s", error)
        return None
    if type(hook) is not allreduce:
        return found
    # Messages of allreduce() have the gradients' dtype.
    elements = sum(bucket.numel for bucket in buckets)
    nbytes = sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets)
    factor = nbytes / (4 * elements)
    return replace(found, chains=tuple(scaled(chain, factor) for chain in found.chains))


def _nodes(hook: Hook) -> int:
    """The number of nodes of an attached ``hierarchical``; 1 for hooks that ignore nodes."""
    sizes = getattr(hook, "sizes", None)
    if sizes:
        return int(sizes[-1])
    return max([1, *map(_nodes, hook.hooks_inside())])


# ---- errors --------------------------------------------------------------------------------------


def _errors(
    hooks: Sequence[Hook], buckets: Sequence[BucketMemory], first_steps: FirstSteps, wire: Wire
) -> list[float]:
    """The relative error of each hook, on the first steps' gradients if all ranks can use these."""
    sample = first_steps.sample(buckets)
    means = None
    if not _on_any_rank(wire, sample is None):
        assert sample is not None
        means = _usable_means(sample, wire)
    if means is None:
        # One seed on all ranks: means of independent numbers are small, so errors would be large.
        sample = random_sample(buckets, seed=0)
        means = [_mean(gradients, wire.group) for gradients in sample]
    assert sample is not None
    found = [0.0]
    for hook in hooks[1:]:
        found.append(relative_error(hook, sample, means, wire.group))
    return wire.largest(*map(_or_infinite, found))


def _usable_means(sample: Sequence[Sequence[Tensor]], wire: Wire) -> list[Tensor] | None:
    """The means over the ranks; None if all are zero or some are not finite."""
    means = [_mean(gradients, wire.group) for gradients in sample]
    square = sum(float(mean.abs().square().sum()) for mean in means)
    return None if _on_any_rank(wire, not 0 < square < math.inf) else means


def _mean(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """The mean over the ranks, as a flat tensor of float32 or complex64."""
    flat = _bucket(gradients, group).buffer()
    own = flat.to(torch.complex64 if flat.is_complex() else torch.float32) / group.size()
    numbers = torch.view_as_real(own).contiguous() if own.is_complex() else own
    mean = all_reduce(numbers, group=group).wait()
    return torch.view_as_complex(mean) if own.is_complex() else mean


def _bucket(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> GradBucket:
    parameters = [torch.zeros_like(each, requires_grad=True) for each in gradients]
    return GradBucket(parameters, [each.clone() for each in gradients], process_group=group)


@torch.no_grad()
def relative_error(
    hook: Hook,
    sample: Sequence[Sequence[Tensor]],
    means: Sequence[Tensor],
    group: dist.ProcessGroup,
) -> float:
    """The distance of a hook's results from the means, divided by the means' length.

    All ranks call it, and a copy of the hook runs. The definition is that of
    :func:`torch_commhook.testing.simulate`, over all buckets together. It is infinite if the hook
    cannot average such gradients.

    Args:
        hook: the hook.
        sample: this rank's gradients, a list for each bucket.
        means: the flat mean over the ranks, for each bucket.
        group: the ranks.

    Raises:
        RuntimeError: a collective failed.
    """
    distance = length = 0.0
    for gradients, mean in zip(sample, means, strict=True):
        own = copy.deepcopy(hook)
        _use_within(own, group)
        bucket = _bucket(gradients, group)
        values = bucket.buffer().clone()
        result = values
        try:
            for _ in range(_CALLS):
                bucket.buffer().copy_(values)
                result = own(group, bucket).wait()
        except (TypeError, ValueError):  # dtype or shape, so all ranks get here
            return math.inf
        off = result.view(-1).to(mean.dtype) - mean
        distance += float(off.abs().square().sum(dtype=torch.float64))
        length += float(mean.abs().square().sum(dtype=torch.float64))
    return math.sqrt(distance / length) if length else math.inf


def _use_within(hook: Hook, group: dist.ProcessGroup) -> None:
    """Let a copy of an attached hook average over the group that the library made for a model."""
    if isinstance(hook, hierarchical):
        hook.use_within(group)
    for each in hook.hooks_inside():
        _use_within(each, group)


# ---- numbers as text -----------------------------------------------------------------------------


def format_link(link: MeasuredLink) -> str:
    """A link as text, such as ``200 Mbit/s and 25 ms``."""
    rate = link.bits_per_second
    text = f"{rate / 1e9:.3g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.3g} Mbit/s"
    return f"{text} and {link.delay_seconds * 1e3:.2g} ms"


def format_seconds(seconds: float) -> str:
    """A time as text, such as ``1.2 s`` or ``350 ms``."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
