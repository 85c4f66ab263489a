"""The parts of ``bench``: codecs, collectives, hooks and the link."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_commhook.attachment.attaching import attach
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.planning.link_file import CodecSpeed, CollectiveTime, HookTime, Message
from torch_commhook.planning.model import MOST_MEASURED, unwrap_hook
from torch_commhook.step.link import MOST_BYTES, Link, Wire, measure
from torch_commhook.wording import one_line

# ---- times calls that all ranks of bench do together ---------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """The seconds of a call, including its work on the device."""
    synchronize(device)
    begun = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begun


def _times(call: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """The seconds of some calls, which all ranks begin together."""
    dist.barrier()
    return [timed(call, device) for _ in range(count)]


def slowest(*values: float, device: torch.device) -> list[float]:
    """The maximum over the ranks of each number, on all ranks."""
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    found: list[float] = shared.tolist()
    return found


def median_within(
    measure: Callable[[], Sequence[float]],
    largest: Callable[..., list[float]],
    seconds: float,
    least: int,
    most: int,
) -> float:
    """The median over repetitions of a mean time, in seconds, on the slowest rank.

    ``measure`` returns the times of one repetition, whose mean counts. ``largest`` returns the
    maximum over the ranks of each given number. There are ``least`` to ``most`` repetitions, in
    about ``seconds``.
    """
    begun = time.perf_counter()
    found: list[float] = []
    while len(found) < most:
        *took, elapsed = largest(*measure(), time.perf_counter() - begun)
        found.append(statistics.fmean(took))
        if len(found) >= least and elapsed > seconds:
            break
    return statistics.median(found)


# ---- measures the codecs, as a part of bench -----------------------------------------------------


_LEAST_ROUNDS, _MOST_ROUNDS = 3, 30


def measure_codecs(device: torch.device, elements: int, seconds: float) -> list[CodecSpeed]:
    """Measure the codecs' speed on this rank, with all their ``examples()``, in about ``seconds``.

    The gradients have ``elements`` elements, at most those of a bucket of 25 MiB.
    """
    examples = [codec for kind in CODECS.values() for codec in kind.examples()]
    gradients = torch.randn(min(elements, MOST_MEASURED), dtype=torch.float32, device=device)
    share = seconds / len(examples)
    return [_speed(codec, gradients, share) for codec in examples]


def _speed(codec: Codec, gradients: torch.Tensor, seconds: float) -> CodecSpeed:
    """Encode, decode and copy in turn, so that all three have the same conditions."""
    device, nbytes = gradients.device, gradients.nbytes
    message = torch.zeros(codec.nbytes(gradients.numel()), dtype=torch.uint8, device=device)
    into = torch.zeros_like(gradients)
    seeds = torch.tensor([1, 2], dtype=torch.int64, device=device)
    rounding = seeds if codec.is_random else None
    calls: dict[str, Callable[[], object]] = {
        "copy": partial(into.copy_, gradients),
        "encode": partial(codec.encode, [gradients], message, rounding=rounding),
        "decode": partial(codec.decode, message, [into], rounding=rounding),
    }
    begun = time.perf_counter()
    for call in calls.values():
        call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and time.perf_counter() - begun > seconds:
            break
        for name, call in calls.items():
            found[name].append(timed(call, device))
    copy, encode, decode = (statistics.median(times) for times in found.values())
    return CodecSpeed(
        repr(codec),
        nbytes / len(message),
        nbytes / encode,
        nbytes / decode,
        encode / copy,
        decode / copy,
    )


# ---- measures the backend's collectives, as a part of bench --------------------------------------


COLLECTIVE_SIZES = tuple(1 << power for power in (16, 20, 24))
_ELEMENT_BYTES = 4
#: A collective of the next size may take this many times as long.
_GROWTH = 16

# Newer releases of torch have new names, and warn about the old ones.
_distributed: Any = dist
_all_gather = getattr(dist, "all_gather_single", None) or _distributed.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or _distributed.reduce_scatter_tensor


def measure_collectives(device: torch.device, seconds: float) -> list[CollectiveTime]:
    """Measure each collective at each size of :data:`COLLECTIVE_SIZES`, in about ``seconds``.

    The function omits sizes that would take longer.
    """
    smallest = torch.zeros(dist.get_world_size(), dtype=torch.float32, device=device)
    names, largest = list(_calls(smallest)), partial(slowest, device=device)
    share = seconds / len(names) / len(COLLECTIVE_SIZES)
    found = []
    last: dict[str, float] = {}
    for size in COLLECTIVE_SIZES:
        elements = size // _ELEMENT_BYTES // dist.get_world_size() * dist.get_world_size()
        numel = max(elements, dist.get_world_size())
        whole = torch.zeros(numel, dtype=torch.float32, device=device)
        for name, call in _calls(whole).items():
            if last.get(name, 0.0) * _GROWTH > seconds:
                continue
            call()  # untimed
            measure = partial(_times, call, 1, device)
            last[name] = median_within(measure, largest, share, 3, 50)
            found.append(CollectiveTime(name, whole.nbytes, last[name]))
    return found


def _calls(whole: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The collectives on float32 tensors, by name."""
    part = whole[: whole.numel() // dist.get_world_size()].clone()
    other = torch.empty_like(whole)
    return {
        "all_reduce": partial(dist.all_reduce, whole),
        "all_gather": partial(_all_gather, other, part),
        "reduce_scatter": partial(_reduce_scatter, part, whole),
        "all_to_all": partial(dist.all_to_all_single, other, whole),
    }


# ---- measures a step with each hook, as a part of bench ------------------------------------------


#: The name of the row without a hook.
ALONE = "no communication"
#: The least steps in a turn. An untimed turn comes first: buckets change, and TCP adapts.
_STEPS = 3
#: The least and the most turns.
_TURNS = 2, 30


class StandIn(nn.Module):
    """A model of given shapes. Each rank has random gradients, the same ones in each step."""

    def __init__(self, shapes: Sequence[Sequence[int]], device: torch.device) -> None:
        super().__init__()
        random = torch.Generator(device).manual_seed(dist.get_rank())
        self.given = [
            torch.randn(tuple(shape), generator=random, dtype=torch.float32, device=device)
            for shape in shapes
        ]
        self.weights = nn.ParameterList(torch.zeros_like(each) for each in self.given)

    def backward(self) -> None:
        """Give each parameter its gradient, and compute next to nothing."""
        torch.autograd.backward(list(self.weights), self.given)


def measure_hooks(
    hooks: Sequence[str],
    shapes: Sequence[Sequence[int]],
    device: torch.device,
    seconds: float,
) -> list[HookTime]:
    """Measure a step without a hook, then with each hook of ``train``, in about ``seconds``.

    Each hook has at least a few steps. Ratios compare with the first hook.

    Raises:
        RuntimeError: a hook fails; the message names the hook.
    """
    share = seconds / (len(hooks) + 1)
    model = StandIn(shapes, device)
    turn, largest = _turn_of(model), partial(slowest, device=device)
    turn()  # the first backward with given gradients imports modules of torch
    found: list[tuple[str, float, float | None]] = [
        (ALONE, median_within(turn, largest, share / 4, *_TURNS), 0.0)
    ]
    for text in hooks:
        try:
            found.append((text, *_with_hook(model, text, share)))
        except Exception as error:  # a user's hook may raise anything
            raise RuntimeError(f"the hook {text!r} can't be measured: {one_line(error)}") from error
    baseline = found[1][1]
    return [HookTime(text, took, sent, took / baseline) for text, took, sent in found]


def _turn_of(
    model: StandIn, every: int = 1, *, is_apart: bool = False
) -> Callable[[], list[float]]:
    """A function that does the steps of a turn, and returns the seconds of each.

    A turn has a multiple of the ``every`` steps from one exchange of the hook to the next. With
    ``is_apart`` the hook counts the steps of an optimizer.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3) if is_apart else None

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model.backward()
        if optimizer is not None:
            optimizer.step()

    count = every * math.ceil(_STEPS / every)
    return partial(_times, step, count, model.given[0].device)


def _with_hook(model: StandIn, text: str, seconds: float) -> tuple[float, float | None]:
    """The seconds of a step, and the bytes that this rank sends in it; None if unknown."""
    hook = parse_hook(text)
    every, largest = unwrap_hook(hook).every, partial(slowest, device=model.given[0].device)
    handle = attach(model, hook)
    try:
        turn = _turn_of(model, every, is_apart=getattr(hook, "keeps_ranks_apart", False))
        turn()
        before = handle.stats()
        took = median_within(turn, largest, seconds, *_TURNS)
        after = handle.stats()
        handle.synchronize()  # otherwise a hook that keeps ranks apart warns when it is removed
        if before.bytes_sent is None or after.bytes_sent is None:
            return took, None
        steps = after.local_steps - before.local_steps or after.steps - before.steps
        return took, (after.bytes_sent - before.bytes_sent) / steps
    finally:
        handle.remove()
        model.zero_grad(set_to_none=True)
        gc.collect()


# ---- measures the link between the ranks, as a part of bench -------------------------------------


LINK_SIZES = tuple(1 << power for power in range(10, 27, 2))
#: The share of the part's time for the rate and the round trip.
_FIGURES = 0.5
#: The least and the most messages of a size.
_OF_A_SIZE = 3, 30


@dataclass(frozen=True)
class LinkPart:
    """The measurements of the link, and the reason for each size in bytes that was not measured."""

    figures: Link
    messages: list[Message]
    left_out: dict[int, str]


def measure_link_part(wire: Wire, seconds: float) -> LinkPart:
    """Measure the link, and messages of 1 KiB to 64 MiB in both directions at once."""
    begun = time.perf_counter()
    figures = measure(wire, seconds * _FIGURES)
    left = seconds - float(wire.shared(time.perf_counter() - begun).max())
    messages, left_out = [], {}
    for number, size in enumerate(LINK_SIZES):
        sent = size * (wire.ranks - 1)
        bits_per_second = min(figures.rates.values())
        wanted = figures.round_trip + sent * 8 / bits_per_second
        if sent > MOST_BYTES:
            left_out[size] = f"{wire.ranks} ranks would need too much memory"
        elif number and wanted * (1 + _OF_A_SIZE[0]) > left:
            left_out[size] = f"one takes about {wanted:.1f} s; give more --seconds"
        else:
            begun = time.perf_counter()
            share = left / (len(LINK_SIZES) - number)
            wire.seconds(size)  # allocates memory, and lets TCP adapt
            took = median_within(partial(_message, wire, size), wire.largest, share, *_OF_A_SIZE)
            messages.append(Message(size, took))
            left -= float(wire.shared(time.perf_counter() - begun).max())
    return LinkPart(figures, messages, left_out)


def _message(wire: Wire, nbytes: int) -> list[float]:
    return [wire.seconds(nbytes)]
