"""Which hook is chosen, of made-up figures."""

from __future__ import annotations

import logging
import math
import re
import threading

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from torch_commhook import hooks
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.hooks.auto import STEPS, WARM_UP, FirstSteps, random_sample
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.planning import Measured, MeasuredLink
from torch_commhook.planning.choice import (
    Candidate,
    choose,
    choose_hook,
    format_link,
    predict,
    relative_error,
)
from torch_commhook.process_group.operations import Traffic
from torch_commhook.process_group.simulated.link import Issued
from torch_commhook.testing import run_ranks

#: What hooks of two ranks send and compute for 10 M elements, and their errors.
FIGURES = {
    "allreduce()": (40e6, 0.010, 0.0),
    "cast()": (20e6, 0.020, 0.002),
    "blockwise()": (10e6, 0.040, 0.008),
    "blockwise(bits=4)": (5e6, 0.045, 0.12),
    "powersgd(rank=4)": (1e6, 0.030, 0.8),
}
NAMES = list(FIGURES)


def sending(name: str) -> Measured:
    nbytes, seconds, _ = FIGURES[name]
    issued = (Issued("", Traffic("all_to_all_single", 2, 2 * nbytes, nbytes)),)
    return Measured(name, nbytes, seconds, chains=(issued,))


@pytest.mark.parametrize(
    ("rate", "delay", "compute", "max_error", "want"),
    [
        (100e6, 0.0, 0.2, 1.0, "powersgd(rank=4)"),
        (100e6, 0.0, 0.2, 0.2, "blockwise(bits=4)"),
        (100e6, 0.0, 0.2, 0.05, "blockwise()"),
        (100e6, 0.0, 0.2, 0.005, "cast()"),
        (100e6, 0.0, 0.2, 0.001, "allreduce()"),  # none is exact enough
        (100e6, 0.05, 0.2, 0.05, "blockwise()"),
        (1e9, 0.0, 0.2, 0.05, "cast()"),  # the backward hides most of its messages
        (1e9, 0.0, 2.0, 0.05, "allreduce()"),  # the backward hides it
        (100e9, 0.0, 0.2, 1.0, "allreduce()"),  # the link is faster than encoding
    ],
)
def test_each_regime(
    rate: float, delay: float, compute: float, max_error: float, want: str
) -> None:
    """Of ten buckets, which are full one after another in the last two thirds of a step."""
    ready = [compute * (1 + 2 * (i + 1) / 10) / 3 for i in range(10)]
    link = MeasuredLink(rate, delay)
    found = [
        Candidate(
            name, FIGURES[name][2], predict(sending(name), link, buckets=[1] * 10, ready=ready)
        )
        for name in NAMES
    ]
    assert NAMES[choose(found, max_error, link).number] == want


def test_a_hook_that_gains_little_is_not_taken() -> None:
    def number(seconds: float) -> int:
        return choose([Candidate("a", 0.0, 1.0), Candidate("b", 0.1, seconds)], 0.2).number

    assert [number(seconds) for seconds in (0.9, 0.96, 1.5)] == [1, 0, 0]


def test_of_hooks_that_are_as_fast_the_most_exact_one_is_taken() -> None:
    found = [
        Candidate("a", 0.0, 10.0),
        Candidate("b", 0.3, 1.0),
        Candidate("c", 0.1, 1.01),
        Candidate("d", 0.05, 1.1),
    ]
    assert choose(found, 0.5).number == 2
    assert choose(found, 0.06).number == 3


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_a_hook_without_an_error_is_not_taken(error: float) -> None:
    choice = choose([Candidate("a", 0.0, 10.0), Candidate("b", error, 1.0)], 1e5)
    assert choice.number == 0
    assert choice.reason == f"no other hook has an error of at most 100000; that of b is {error:g}"


def test_without_predictions_nothing_is_chosen() -> None:
    for seconds in ((math.inf, math.inf), (math.inf, 1.0), (1.0, math.inf)):
        found = [Candidate(name, 0.0, each) for name, each in zip("ab", seconds, strict=True)]
        choice = choose(found, 0.5)
        assert choice.number == 0
        assert choice.reason == "the step times could not be predicted; the log has the reason"


def test_reasons() -> None:
    link = MeasuredLink(99.6e6, 0.0102)
    found = [Candidate("allreduce()", 0.0, 3.95), Candidate("blockwise()", 0.0081, 0.612)]
    start = "over a link of 99.6 Mbit/s and 10 ms, a step"
    end = (
        "is predicted to take 612 ms, and 3.95 s with allreduce(); "
        "the error is 0.0081 of at most 0.05"
    )
    assert choose(found, 0.05, link).reason == f"{start} {end}"
    assert choose(found, 0.05, link, has_computing=False).reason == (
        f"{start}, without the model's unknown computing time, {end}"
    )
    found = [Candidate("allreduce()", 0.0, 0.30), Candidate("blockwise()", 0.0081, 0.29)]
    assert choose(found, 0.05, link).reason == (
        f"{start} is predicted to take 300 ms, and 290 ms with blockwise(), the fastest other hook"
    )
    assert format_link(MeasuredLink(2.5e9, 0.0)) == "2.5 Gbit/s and 0 ms"


# ---- errors --------------------------------------------------------------------------------------


@on_ranks(2)
def test_an_error_is_the_distance_from_the_mean_over_its_length(rank: int) -> None:
    gradients = [torch.tensor([1.0, 3.0, -3.0, 1.0]), torch.tensor([1.0, 3.0, -3.0, 3.0])][rank]
    mean = torch.tensor([1.0, 3.0, -3.0, 2.0])
    # Each rank sends its mean magnitude, 2 and 2.5; their mean has one magnitude, 2.25.
    want = math.sqrt((1.25**2 + 0.75**2 * 2 + 0.25**2) / (1 + 9 + 9 + 4))
    found, exact = (
        relative_error(hook, [[gradients]], [mean], dist.group.WORLD)
        for hook in (hooks.sign(), hooks.allreduce())
    )
    assert found == pytest.approx(want, rel=1e-6)
    assert exact == pytest.approx(0.0, abs=1e-7)


@on_ranks(2)
def test_a_hook_that_cannot_average_the_gradients_has_no_error(rank: int) -> None:
    values = torch.ones(4, dtype=torch.complex64)
    error = relative_error(hooks.blockwise(), [[values]], [values], dist.group.WORLD)
    assert error == math.inf


# ---- the log -------------------------------------------------------------------------------------


def test_only_rank_0_logs_the_figures_at_info(caplog: pytest.LogCaptureFixture) -> None:
    buckets = [_bucket([(4, 8), (4,)], HookMemory())]

    def choose_on(rank: int) -> tuple[int, str]:
        choice = choose_hook(
            [hooks.allreduce(), hooks.sign()],
            1e-5,
            buckets=buckets,
            first_steps=FirstSteps(),
            group=dist.group.WORLD,
        )
        return threading.get_ident(), choice.reason

    with caplog.at_level(logging.DEBUG, "torch_commhook.planning.choice"):
        ranks = run_ranks(choose_on, 2)
    for (thread, reason), level in zip(ranks, (logging.INFO, logging.DEBUG), strict=True):
        records = [record for record in caplog.records if record.thread == thread]
        assert [record.levelno for record in records] == [level] * 3
        plain, sign, choice = (record.getMessage() for record in records)
        assert plain == "allreduce(): error 0, step not predicted"
        assert re.fullmatch(r"sign\(\): error [\d.]+, step not predicted", sign)
        assert choice == f"auto chose allreduce(): {reason}"


# ---- what is seen of the first steps -------------------------------------------------------------


def _bucket(shapes: list[tuple[int, ...]], memory: HookMemory) -> BucketMemory:
    parameters = [torch.zeros(shape) for shape in shapes]
    _KEPT.append(parameters)
    return memory.memory_of_bucket(parameters, 0, lambda bucket: None)


_KEPT: list[list[torch.Tensor]] = []  # a memory keeps no parameter


@pytest.mark.parametrize(
    ("shapes", "sampled"),
    [
        ([(3, 4), (4,), ()], [(3, 4), (4,), (1,)]),
        ([(512, 400), (512, 400), (512,)], [(512, 400), (512,)]),  # whole matrices
        ([(1024, 1024), (7,)], [(256, 1024)]),  # the first rows of one that does not fit
        ([(2, 1 << 20), (7,)], [(1, 1 << 20)]),
        ([(1 << 20,), (7,)], [(1 << 18,)]),
    ],
)
def test_what_is_sampled(shapes: list[tuple[int, ...]], sampled: list[tuple[int, ...]]) -> None:
    bucket = _bucket(shapes, HookMemory())
    (found,) = random_sample([bucket], seed=0)
    assert [tuple(gradient.shape) for gradient in found] == sampled


def test_the_last_of_the_first_steps_is_sampled() -> None:
    memory, seen = HookMemory(), FirstSteps()
    bucket = _bucket([(2, 3), (3,)], memory)
    for step in range(STEPS):
        gradients = [torch.full((2, 3), float(step)), torch.full((3,), -float(step))]
        seen.bucket_full(GradBucket(_KEPT[-1], gradients), step)
        seen.step_ended()
        if step < STEPS - 1:
            assert seen.sample([bucket]) is None
    (sample,) = seen.sample([bucket]) or ()
    last = float(STEPS - 1)
    assert [gradient.tolist() for gradient in sample] == [[[last] * 3] * 2, [-last] * 3]
    (ready,) = seen.ready(1) or ()
    assert 0 < ready < 1
    assert seen.ready(2) is None
    assert WARM_UP >= 2  # DDP forms its buckets anew after the first
