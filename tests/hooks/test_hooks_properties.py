"""Whole hooks on any gradients: any shapes, dtypes and magnitudes, zeros, denormals, NaN, Inf."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_commhook import GradBucket, hooks
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.hooks.wrappers import Wrapper
from torch_commhook.testing import Simulation, simulate

EXAMPLES = [example for cls in CODECS.values() for example in cls.examples()]
#: What travels is a value and its place, or values in blocks whose bounds stand here; of sums of
#: other codecs nothing is said about single values.
SPARSE = [codec for codec in EXAMPLES if type(codec).__name__ == "topk"]
LINEAR = [codec for codec in EXAMPLES if type(codec).__name__ == "randomk"]
BLOCKS = [codec for codec in EXAMPLES if type(codec).__name__ in ("blockwise", "fp8", "sign")]

PLAIN = [hooks.allreduce(), hooks.cast(torch.bfloat16), hooks.cast(torch.float16)]
COMPRESSED = [hooks.compressed(codec) for codec in EXAMPLES]
FEEDBACK = [
    hooks.error_feedback(hooks.compressed(codec)) for codec in EXAMPLES if codec.takes_error
] + [hooks.momentum(hooks.topk(), 0.9), hooks.momentum(hooks.sign(), 0.9, dtype=torch.bfloat16)]

DTYPES = [torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16]
SPECIAL = [math.nan, math.inf, -math.inf]

pytestmark = pytest.mark.filterwarnings("ignore:.*take more bytes than cast")

any_case = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
shapes = st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=4)
any_hook = {
    "hook": st.sampled_from(PLAIN + COMPRESSED + FEEDBACK),
    "seed": st.integers(0, 2**31),
    "ranks": st.integers(1, 4),
    "form": shapes,
}
magnitudes = st.one_of(
    st.floats(-30, 30).map(lambda power: 10.0**power), st.sampled_from([1e-45, 1e-42, 1e-38, 1.0])
)


def gradients(
    seed: int, ranks: int, form: list[list[int]], dtypes: list[torch.dtype], magnitude: float
) -> list[list[Tensor]]:
    """Of each rank, with runs of zeros, and some magnitudes that differ much between the ranks."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    holes = [rng.random() < 0.3 for _ in form]
    found = []
    for _ in range(ranks):
        own = magnitude * rng.choice([1.0, 1.0, 1e-3])
        tensors = []
        for shape, dtype, with_hole in zip(form, dtypes, holes, strict=True):
            x = torch.randn(shape, generator=generator, dtype=torch.float64) * own
            if with_hole and x.numel():
                x.view(-1)[: x.numel() // 2] = 0
            tensors.append(x.to(dtype))
        found.append(tensors)
    return found


def flat(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """What a bucket has of one dtype, in float64."""
    pieces = [x.reshape(-1).double() for x in tensors if x.dtype == dtype]
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float64)


def dtypes_of(seed: int, form: list[list[int]]) -> list[torch.dtype]:
    rng = random.Random(seed + 1)
    return [rng.choice(DTYPES) for _ in form]


def run(hook: hooks.Hook, grads: list[list[Tensor]], steps: int = 1) -> Simulation:
    found = simulate(hook, grads, steps=steps)
    for got, own in zip(found.result, grads[0], strict=True):  # the same bits on all ranks
        assert got.dtype == own.dtype and got.shape == own.shape
    return found


# ---- zeros ---------------------------------------------------------------------------------------


@any_case
@given(**any_hook, steps=st.integers(1, 2))
def test_zeros_stay_zeros(
    hook: hooks.Hook, seed: int, ranks: int, form: list[list[int]], steps: int
) -> None:
    grads = gradients(seed, ranks, form, dtypes_of(seed, form), 0.0)
    for got in run(hook, grads, steps).result:
        assert torch.equal(got, torch.zeros_like(got))


@any_case
@given(
    codec=st.sampled_from(BLOCKS),
    seed=st.integers(0, 2**31),
    ranks=st.integers(1, 4),
    numel=st.integers(1, 3000),
    magnitude=magnitudes,
)
def test_a_block_of_zeros_stays_one(
    codec: Codec, seed: int, ranks: int, numel: int, magnitude: float
) -> None:
    """Whatever is in the others."""
    size = codec._form.block_size  # type: ignore[attr-defined]
    first = size * (seed % (numel // size + 1))
    grads = gradients(seed, ranks, [[numel]], [torch.float32], magnitude)
    for (x,) in grads:
        x[first : first + size] = 0
    got = run(hooks.compressed(codec), grads).result[0]
    assert torch.equal(got[first : first + size], torch.zeros(min(size, numel - first)))


# ---- what is not finite --------------------------------------------------------------------------


class Once(Wrapper):
    """Puts a value into the gradients of the first step."""

    def __init__(self, hook: hooks.Hook, place: int, value: float) -> None:
        super().__init__(hook)
        self.place, self.value, self.steps = place, value, 0

    def average(self, bucket: GradBucket) -> Any:
        self.steps += 1
        if self.steps == 1:
            bucket.buffer()[self.place] = self.value
        return super().average(bucket)


@any_case
@given(**any_hook, magnitude=magnitudes, count=st.integers(1, 3))
def test_what_is_not_finite_stays_so(
    hook: hooks.Hook, seed: int, ranks: int, form: list[list[int]], magnitude: float, count: int
) -> None:
    """In its own place: top-k as far as there is room, and then somewhere, as random-k does."""
    dtypes = dtypes_of(seed, form)
    grads = gradients(seed, ranks, form, dtypes, min(magnitude, 1e4))
    rng = random.Random(seed)
    places = []
    for _ in range(count):
        number, rank = rng.randrange(len(form)), rng.randrange(ranks)
        x = grads[rank][number]
        if x.numel():
            place = rng.randrange(x.numel())
            x.view(-1)[place] = rng.choice(SPECIAL)
            places.append((rank, number, place))
    result = run(hook, grads).result
    codec = getattr(getattr(hook, "hook", hook), "codec", None)
    for rank, number, place in places:
        bucket = flat(grads[rank], dtypes[number])
        among = int((~bucket.isfinite()).sum())
        has_room = codec in SPARSE and among <= codec.entries(len(bucket))
        if codec is None or codec in BLOCKS or has_room:
            assert not result[number].reshape(-1)[place].isfinite()
        else:
            assert not flat(result, dtypes[number]).isfinite().all()


@any_case
@given(
    hook=st.sampled_from(FEEDBACK),
    seed=st.integers(0, 2**31),
    ranks=st.integers(1, 3),
    numel=st.integers(1, 2000),
    magnitude=st.floats(-10, 10).map(lambda power: 10.0**power),
)
def test_what_is_not_finite_is_forgotten(
    hook: hooks.Hook, seed: int, ranks: int, numel: int, magnitude: float
) -> None:
    """It leaves no error, so that the next steps are as good as others."""
    grads = gradients(seed, ranks, [[numel]], [torch.float32], magnitude)
    place = seed % numel

    once = Once(hook, place, SPECIAL[seed % 3])
    result = run(once, grads).result[0]
    # Where messages have no places, all that is sent is NaN.
    has_places = getattr(hook.hook, "codec", None) not in LINEAR
    assert not (result[place] if has_places else result).isfinite().all()
    assert run(once, grads, steps=3).result[0].isfinite().all()


# ---- bounds --------------------------------------------------------------------------------------

DENORMAL = 2.0**-149
UNIT = {dtype: torch.finfo(dtype).eps / 2 for dtype in DTYPES}
LEAST = {dtype: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in DTYPES}


def lost_by_blocks(codec: Codec, x: Tensor) -> Tensor:
    """How far off each value may be once it was encoded: float64, of the values as they were."""
    settings = codec._settings  # type: ignore[attr-defined]
    size = settings["block_size"]
    blocks = torch.nn.functional.pad(x, (0, -len(x) % size)).view(-1, size)
    real = torch.nn.functional.pad(torch.ones(len(x)), (0, -len(x) % size)).view(-1, size) > 0
    largest = blocks.abs().amax(1, keepdim=True)
    name = type(codec).__name__
    if name == "sign":  # the magnitude is a mean, and a value anything up to the largest
        off = blocks.abs() + largest
    elif name == "fp8":
        roundoff, top, least = {
            "e4m3": (2.0**-4, 448.0, 2.0**-9),
            "e5m2": (2.0**-3, 57344.0, 2.0**-16),
        }[settings["format"]]
        # Steps are float32, so that those of denormal values are off themselves.
        off = torch.maximum(blocks.abs() * roundoff, (largest / top + DENORMAL) * least / 2)
        off = off + DENORMAL * top
    else:
        levels = 2 ** settings["bits"] - 1
        if settings["symmetric"]:
            levels //= 2
            span = largest
        else:
            inside = torch.where(real, blocks, math.inf), torch.where(real, blocks, -math.inf)
            span = inside[1].amax(1, keepdim=True) - inside[0].amin(1, keepdim=True)
        step = span / levels + DENORMAL
        off = (step if codec.is_random else step / 2) + DENORMAL * levels + 1e-5 * step
        off = off.expand_as(blocks)
    # Sums and products in float32 on the way.
    return (off + 8 * 2.0**-24 * largest + 2 * DENORMAL).reshape(-1)[: len(x)]


@dataclass(frozen=True)
class Case:
    """Gradients of some ranks, as the arguments of :func:`gradients`."""

    seed: int
    ranks: int
    form: list[list[int]]
    magnitude: float

    def means(self, hook: hooks.Hook) -> Iterator[tuple[torch.dtype, Tensor, Tensor]]:
        """Of each dtype: what a hook makes of its gradients, and a row of these for each rank."""
        dtypes = dtypes_of(self.seed, self.form)
        grads = gradients(self.seed, self.ranks, self.form, dtypes, self.magnitude)
        found = run(hook, grads)
        for dtype in set(dtypes):
            every = torch.stack([flat(own, dtype) for own in grads])
            yield dtype, flat(found.result, dtype), every

    def means_in_float32(self, hook: hooks.Hook) -> Iterator[tuple[torch.dtype, Tensor, Tensor]]:
        """:meth:`means` where float32 holds all of the gradients, which are rounded to it."""
        for dtype, got, every in self.means(hook):
            rounded = every.float().double()
            if rounded.isfinite().all() and rounded.numel():
                yield dtype, got, rounded


cases = st.builds(
    Case, seed=st.integers(0, 2**31), ranks=st.integers(1, 4), form=shapes, magnitude=magnitudes
)


@any_case
@given(codec=st.sampled_from(BLOCKS), case=cases)
def test_bounds_of_blocks(codec: Codec, case: Case) -> None:
    """Each rank's own loss, and that of the sum, whose blocks are those of the values."""
    for dtype, got, every in case.means_in_float32(hooks.compressed(codec)):
        mean = every.mean(0)
        first = torch.stack([lost_by_blocks(codec, own) for own in every]).mean(0)
        # The sum that is encoded again may be off by as much, either way.
        second = torch.maximum(
            lost_by_blocks(codec, mean + first), lost_by_blocks(codec, mean - first)
        )
        block = getattr(codec, "_settings", {})
        if not block.get("symmetric", True):
            # The least of a block may be off one way, and the largest the other way. So a block's
            # span may be longer by twice that, and a step by its share.
            steps = (1.0 if codec.is_random else 0.5) * 2 / (2 ** block["bits"] - 1)
            pieces = first.split(block["block_size"])
            second = second + steps * torch.cat([p.max().expand(len(p)) for p in pieces])
        limit = (first + second) * 1.0001
        limit = limit + UNIT[dtype] * (mean.abs() + limit) + LEAST[dtype]
        within = (got - mean).abs() <= limit
        if dtype == torch.float16:  # where what comes out is more than it holds
            within |= mean.abs() + limit >= 65504
        assert within.all()


@any_case
@given(codec=st.sampled_from(SPARSE), case=cases)
def test_bounds_of_top_k(codec: Any, case: Case) -> None:
    """The mean of what each rank has sent: its own largest values, exactly."""
    for dtype, got, every in case.means_in_float32(hooks.compressed(codec)):
        mean, numel = every.mean(0), every.shape[1]
        kept = codec.entries(numel)
        bound = (1 - kept / numel) ** 0.5 * every.norm(dim=1).mean()
        rounding = (case.ranks + 2) * (2.0**-24 + UNIT[dtype]) * every.norm(dim=1).sum()
        least = (LEAST[dtype] + 2 * DENORMAL) * numel**0.5
        overflows = dtype == torch.float16 and mean.abs().max() > 60000
        assert (got - mean).norm() <= bound + rounding + least or overflows
        assert int((got != 0).sum()) <= kept * case.ranks


@any_case
@given(hook=st.sampled_from(PLAIN), case=cases)
def test_bounds_of_means(hook: hooks.Hook, case: Case) -> None:
    for dtype, got, every in case.means(hook):
        wire = getattr(hook, "dtype", dtype)
        mean, sizes = every.mean(0), every.abs().mean(0)
        unit, least = max(UNIT[wire], UNIT[dtype]), max(LEAST[wire], LEAST[dtype], DENORMAL)
        limit = (2 * case.ranks + 2) * (unit * sizes * 1.1 + least)
        within = (got - mean).abs() <= limit
        if torch.float16 in (wire, dtype):
            within |= sizes + limit >= 65504
        within |= ~every.isfinite().all(0) | (sizes > 1e38)
        assert within.all()


@any_case
@given(
    hook=st.sampled_from(PLAIN[:1] + COMPRESSED + FEEDBACK),
    seed=st.integers(0, 2**31),
    ranks=st.integers(1, 4),
    numel=st.integers(1, 2000),
    power=st.integers(-60, 60),
)
def test_powers_of_two_change_nothing(
    hook: hooks.Hook, seed: int, ranks: int, numel: int, power: int
) -> None:
    """Nothing is lost or gained by the magnitude of gradients, short of float32's own limits."""
    grads = gradients(seed, ranks, [[numel]], [torch.float32], 1.0)
    scaled = [[x * 2.0**power for x in own] for own in grads]
    one, other = run(hook, grads, 2).result[0], run(hook, scaled, 2).result[0]
    assert torch.equal(one * 2.0**power, other)
