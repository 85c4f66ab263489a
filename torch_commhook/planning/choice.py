"""Which of several hooks makes a model's step shortest, as its ranks measure it.

What a hook computes and sends is measured as :func:`torch_commhook.planning.measure` does. Its
error is that of its result on gradients of the ranks, over their own process group. The time of a
step follows from these, from the link, and from the times at which the model's buckets were full.
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
from torch_commhook.hooks.base import Hook
from torch_commhook.hooks.first_steps import FirstSteps, random_sample
from torch_commhook.hooks.hierarchical import hierarchical
from torch_commhook.hooks.mean import allreduce
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.planning.hook_work import HookError
from torch_commhook.planning.link import MeasuredLink, measure_rate, measure_round_trip
from torch_commhook.planning.measured import Measured, measure
from torch_commhook.planning.model import Model, Parameter
from torch_commhook.planning.schedule import PAYLOAD, through_seconds
from torch_commhook.planning.wire import Wire

#: A hook that saves less of a step than this share is not taken.
LEAST_GAIN = 0.05
#: Steps that differ by less take as long, and the hook of the least error is taken.
_AS_FAST = 0.02
#: The time for measuring the link's round trip, and its rate.
_ROUND_TRIP_SECONDS = 0.3
_LINK_SECONDS = 1.5
#: Calls of a hook, of which the last shows its error: low-rank factors get better.
_CALLS = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """What is known of a hook.

    Attributes:
        hook: as it is written.
        error: relative, of its result; infinite where it cannot average the gradients.
        step_seconds: the predicted time of a step; infinite without a prediction.
    """

    hook: str
    error: float
    step_seconds: float = math.inf


@dataclass(frozen=True)
class Choice:
    """The hook that a model is to have.

    Attributes:
        number: among the candidates.
        reason: for it, in words.
    """

    number: int
    reason: str


def choose(
    candidates: Sequence[Candidate],
    max_error: float,
    link: MeasuredLink | None = None,
    *,
    has_computing: bool = True,
) -> Choice:
    """The hook of the shortest step whose error is small enough.

    Args:
        candidates: the first is ``allreduce()``, which is taken unless another one saves 5 % of its
            step.
        max_error: the largest error that is allowed.
        link: the link that the predictions are for.
        has_computing: whether the time that the model computes is in these steps.
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
        return Choice(0, "the times of the steps could not be predicted; the log says why")
    where = "" if link is None else f"over a link of {format_link(link)} "
    known = "" if has_computing else ", without the computing of the model, which is not known"
    if fastest.step_seconds > (1 - LEAST_GAIN) * plain.step_seconds:
        return Choice(
            0,
            f"{where}a step takes {format_seconds(plain.step_seconds)} by forecast{known}, and "
            f"{format_seconds(fastest.step_seconds)} with {fastest.hook}, the fastest of the "
            "others",
        )
    as_fast = fastest.step_seconds * (1 + _AS_FAST)
    number = min(
        (i for i in admitted if candidates[i].step_seconds <= as_fast),
        key=lambda i: (candidates[i].error, candidates[i].step_seconds),
    )
    chosen = candidates[number]
    return Choice(
        number,
        f"{where}a step takes {format_seconds(chosen.step_seconds)} by forecast{known}, and "
        f"{format_seconds(plain.step_seconds)} with {plain.hook}; the error is "
        f"{chosen.error:.2g} of at most {max_error:g}",
    )


def _or_infinite(error: float) -> float:
    return math.inf if math.isnan(error) else error


def predict(
    measured: Measured,
    link: MeasuredLink,
    *,
    buckets: Sequence[int],
    ready: Sequence[float],
    compute_seconds: float | None = None,
) -> float:
    """How long a step takes, from the end of the one before.

    Args:
        measured: the hook.
        link: of each rank.
        buckets: elements of each bucket, in the order of a backward.
        ready: when each is full, in seconds, with a hook that computes nothing.
        compute_seconds: of the hook; as ``measured`` has it by default.
    """
    elements = sum(buckets)
    shares = [size / elements for size in buckets]
    computing = measured.compute_seconds if compute_seconds is None else compute_seconds
    # Hooks compute on the processor of the backward, which each bucket's work holds up.
    later = [computing * share for share in accumulate(shares)]
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
    """Measure hooks on a model, and choose one. All ranks call it at the same point, and get alike.

    Args:
        hooks: the first is ``allreduce()``.
        max_error: the largest error that is allowed.
        buckets: of the model.
        first_steps: what was seen of it on this rank.
        group: the ranks.

    Raises:
        RuntimeError: a collective has failed.
    """
    device = buckets[0].device
    wire = Wire(group, device)
    if _on_any_rank(wire, first_steps.is_sparse):
        return Choice(0, "some gradients are sparse, which other hooks do not average")
    errors = _errors(hooks, buckets, first_steps, wire)
    names = [str(hook) for hook in hooks]
    allowed = [i for i, error in enumerate(errors) if error <= max_error]
    if len(allowed) == 1:
        found = [Candidate(*each) for each in zip(names, errors, strict=True)]
        return _told(choose(found, max_error), found)
    round_trip = measure_round_trip(wire, _ROUND_TRIP_SECONDS)
    rate = measure_rate(wire, round_trip, _LINK_SECONDS)
    if not 0 < rate < math.inf:
        return Choice(0, "the link has no rate that could be measured")
    link = MeasuredLink(rate, round_trip / 2)
    measured = {i: _measured(hooks[i], buckets, wire) for i in allowed}
    computing = _largest(wire, [_compute_seconds(measured[i]) for i in allowed])
    seen = first_steps.ready(len(buckets))
    has_computing = not _on_any_rank(wire, seen is None)
    sizes = [bucket.numel for bucket in buckets]
    ready = _largest(wire, seen if seen is not None and has_computing else [0.0] * len(sizes))
    seconds = [math.inf] * len(hooks)
    for i, computes in zip(allowed, computing, strict=True):
        of_hook = measured[i]
        if of_hook is not None and computes < math.inf:
            seconds[i] = predict(
                of_hook, link, buckets=sizes, ready=ready, compute_seconds=computes
            )
    seconds = wire.shared(*seconds)[0].tolist()  # rank 0's
    found = [Candidate(*each) for each in zip(names, errors, seconds, strict=True)]
    return _told(choose(found, max_error, link, has_computing=has_computing), found)


def _told(choice: Choice, candidates: Sequence[Candidate]) -> Choice:
    """The choice, once the log has it."""
    for each in candidates:
        is_known = each.step_seconds < math.inf
        step = format_seconds(each.step_seconds) if is_known else "not predicted"
        _log.info("%s: error %.2g, step %s", each.hook, each.error, step)
    _log.info("auto chose %s: %s", candidates[choice.number].hook, choice.reason)
    return choice


def _on_any_rank(wire: Wire, flag: bool) -> bool:
    return bool(_largest(wire, [float(flag)])[0])


def _largest(wire: Wire, values: Sequence[float]) -> list[float]:
    """The largest of all ranks, number by number."""
    found: list[float] = wire.shared(*values).amax(0).tolist()
    return found


# ---- what hooks compute and send -----------------------------------------------------------------


def _measured(hook: Hook, buckets: Sequence[BucketMemory], wire: Wire) -> Measured | None:
    """What :func:`measure` gives for float32; None where a hook cannot be measured."""
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
        _log.info("%s", error)
        return None
    if type(hook) is not allreduce:  # whose messages have the dtype of the gradients
        return found
    elements = sum(bucket.numel for bucket in buckets)
    nbytes = sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets)
    scaled = tuple(each.scaled(nbytes / (4 * elements)) for each in found.issued)
    return replace(found, issued=scaled)


def _compute_seconds(measured: Measured | None) -> float:
    return math.inf if measured is None else measured.compute_seconds


def _nodes(hook: Hook) -> int:
    """The nodes of an attached ``hierarchical``; one for other hooks, whose bytes do not mind."""
    sizes = getattr(hook, "sizes", None)
    if sizes:
        return int(sizes[-1])
    return max([1, *map(_nodes, hook.hooks_inside())])


# ---- errors --------------------------------------------------------------------------------------


def _errors(
    hooks: Sequence[Hook], buckets: Sequence[BucketMemory], first_steps: FirstSteps, wire: Wire
) -> list[float]:
    """The relative error of each hook, on gradients of the first steps where these serve."""
    sample = first_steps.sample(buckets)
    means = None
    if not _on_any_rank(wire, sample is None):
        assert sample is not None
        means = _usable_means(sample, wire)
    if means is None:
        # Of one seed on all ranks: means of other numbers are small, and errors of them large.
        sample = random_sample(buckets, seed=0)
        means = [_mean(gradients, wire.group) for gradients in sample]
    assert sample is not None
    found = [0.0]
    for hook in hooks[1:]:
        found.append(relative_error(hook, sample, means, wire.group))
    return _largest(wire, [_or_infinite(error) for error in found])


def _usable_means(sample: Sequence[Sequence[Tensor]], wire: Wire) -> list[Tensor] | None:
    """The ranks' means; None where they are zero, or not finite."""
    means = [_mean(gradients, wire.group) for gradients in sample]
    square = sum(float(mean.abs().square().sum()) for mean in means)
    return None if _on_any_rank(wire, not 0 < square < math.inf) else means


def _mean(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """The mean over the ranks, as a flat tensor in float32, or in complex64."""
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
    """How far a hook's results are from the means, over the length of these. All ranks call it.

    As :func:`torch_commhook.testing.simulate` defines it, over all buckets together.

    Args:
        hook: of which a copy is used.
        sample: gradients of this rank, lists for a few buckets.
        means: of each bucket over the ranks, flat.
        group: the ranks.

    Returns:
        Infinite where the hook cannot average such gradients.

    Raises:
        RuntimeError: a collective has failed.
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
        except (TypeError, ValueError):  # of their dtype or shape, which all ranks have alike
            return math.inf
        off = result.view(-1).to(mean.dtype) - mean
        distance += float(off.abs().square().sum(dtype=torch.float64))
        length += float(mean.abs().square().sum(dtype=torch.float64))
    return math.sqrt(distance / length) if length else math.inf


def _use_within(hook: Hook, group: dist.ProcessGroup) -> None:
    """Have a copy of an attached hook average over the group that the library made for a model."""
    if isinstance(hook, hierarchical):
        hook.use_within(group)
    for each in hook.hooks_inside():
        _use_within(each, group)


# ---- numbers as text -----------------------------------------------------------------------------


def format_link(link: MeasuredLink) -> str:
    """Such as ``200 Mbit/s and 25 ms``."""
    rate = link.bits_per_second
    text = f"{rate / 1e9:.3g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.3g} Mbit/s"
    return f"{text} and {link.delay_seconds * 1e3:.2g} ms"


def format_seconds(seconds: float) -> str:
    """Such as ``1.2 s`` or ``350 ms``."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
