"""Sums, reduce-scatters and all-gathers of messages: what calls refuse, take and measure."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunk_cases import FIRST, error_of, rounding_of, values
from codec_examples import of_each_codec
from collective_cases import NO_GROUP
from on_ranks import on_processes
from rank_pool import RankPool
from staged_steps import Around
from torch import Tensor

from torch_commhook.codecs import CODECS, Codec
from torch_commhook.collectives import (
    compressed_all_gather,
    compressed_all_reduce,
    compressed_reduce_scatter,
)
from torch_commhook.collectives.compressed_call import (
    MessageError,
    _places,
    _values_at,
    segment_range,
)
from torch_commhook.metrics import CallMeter
from torch_commhook.testing import run_ranks

Call = Callable[..., Any]
CHUNKS: list[Call] = [compressed_reduce_scatter, compressed_all_gather]
CALLS: list[Call] = [compressed_all_reduce, *CHUNKS]
of_each_call = pytest.mark.parametrize("call", CALLS)


class Elsewhere(Around):
    """A codec with an exchange that nobody knows."""

    exchange = "by_post"  # type: ignore[assignment]


BLOCKWISE = CODECS["blockwise"]()
STOCHASTIC = CODECS["blockwise"](rounding="stochastic")
UNBIASED = CODECS["randomk"](0.1, unbiased=True)
ELSEWHERE = Elsewhere(BLOCKWISE, lambda method: None)
X, ZEROS = torch.ones(600), torch.zeros(600)
SEED = torch.ones(2, dtype=torch.int64)
META = torch.zeros(600, device="meta")
EXPANDED = torch.ones(1).expand(600)

INT64 = r"rounding must be of dtype torch\.int64, got torch\.float32"
SHAPE = (
    r"rounding must be of shape \({}\) for blockwise\(rounding='stochastic'\), {}seed and step, "
)
SIZES = "sizes must be 1 numbers of at least 0, one for each rank, got "
#: What differs from a good call, and its message.
Wrong = list[tuple[dict[str, Any], str]]
TYPES: Wrong = [
    ({"codec": "blockwise"}, "codec must be a Codec, got str"),
    ({"codec": CODECS["topk"]}, "codec must be a Codec, got ABCMeta"),
    ({"tensors": [X, 3]}, r"tensors\[1\] must be a tensor, got int"),
    ({"tensors": None}, "tensors must be a tensor or a list of tensors, got "),
    (
        {"tensors": X.long()},
        r"tensors\[0\] must be of dtype float64, float32, float16 or bfloat16, got torch\.int64",
    ),
    ({"tensors": X.to_sparse()}, "must be dense"),
    # Of a codec without an operator.
    ({"tensors": X.to_sparse(), "codec": CODECS["topk"]()}, "must be dense"),
    ({"out": X.long()}, r"out\[0\] must be of dtype"),
    (
        {"error": ZEROS.double()},
        "error must be of dtype torch.float32 or torch.bfloat16, got torch.float64",
    ),
    ({"rounding": [[1, 2], [3, 4]]}, "rounding must be a tensor, got list"),
    ({"buffers": {}}, "buffers must be a MessageBuffers or None, got dict"),
    ({"meter": 3}, "meter must be a CallMeter or None, got int"),
    ({"timeout": 3}, "timeout must be a timedelta or None, got int"),
    ({"group": 3}, NO_GROUP[1]),
]
VALUES: Wrong = [
    ({"tensors": []}, "tensors must hold at least one tensor, got none"),
    ({"tensors": [X, META]}, r"tensors\[1\] must be on the device of tensors\[0\], cpu, got meta"),
    ({"out": []}, "out must hold at least one tensor, got none"),
    (
        {"out": [X[:300], X[:299]]},
        "out must hold 600 elements, as many as "
        "(tensors|this rank's chunk|the chunks of all ranks), got 599",
    ),
    ({"out": EXPANDED}, "must reach each of its elements once"),
    ({"error": ZEROS[:599]}, "^{call}: error must be flat and hold 600 elements"),
    ({"error": META}, "error must be on the tensors' device, cpu, got meta"),
    ({"error": ZEROS.to_sparse()}, "error must be dense and flat"),
]
SUM_TYPES: Wrong = [
    ({"sum_error": [0.0] * 600}, "sum_error must be a tensor, got list"),
    ({"codec": STOCHASTIC, "rounding": torch.ones(2, 2)}, INT64),
]
SUM_VALUES: Wrong = [
    (
        {"sum_error": ZEROS[:599]},
        "compressed_all_reduce: sum_error must be flat and hold 600 elements",
    ),
    ({"sum_error": META}, "sum_error must be on the tensors' device, cpu, got meta"),
    ({"sum_error": torch.zeros(1200)[::2]}, r"sum_error must be contiguous, got strides \[2\]"),
    ({"codec": STOCHASTIC}, SHAPE.format("2, 2", "rows of ") + "got None"),
    ({"codec": STOCHASTIC, "rounding": SEED}, SHAPE.format("2, 2", "rows of ") + r"got \[2\]"),
    (
        {"codec": ELSEWHERE},
        "the codec's exchange must be 'all_to_all', 'all_gather' or 'all_reduce', got 'by_post'",
    ),
]
CHUNK_TYPES: Wrong = [
    ({"sizes": ["600"]}, r"sizes must be a list of ints, got \['600'\]"),
    ({"sizes": 600}, "sizes must be a list of ints, got 600"),
    ({"codec": STOCHASTIC, "rounding": SEED.float()}, INT64),
]
CHUNK_VALUES: Wrong = [
    ({"sizes": [300, 300]}, SIZES + r"\[300, 300\]"),
    ({"sizes": [-1]}, SIZES + r"\[-1\]"),
    (
        {"sizes": [599]},
        r"sizes must (add up to 600, as tensors have|"
        r"give rank 0 the 600 elements of its tensors), got \[599\]",
    ),
    ({"codec": STOCHASTIC}, SHAPE.format("2,", "") + "got None"),
    (
        {"codec": STOCHASTIC, "rounding": torch.stack([SEED, SEED])},
        SHAPE.format("2,", "") + r"got \[2, 2\]",
    ),
    (
        {"codec": UNBIASED, "error": ZEROS, "rounding": SEED},
        "error must be None for an unbiased codec",
    ),
]
SCALE_TYPES: Wrong = [
    ({"scale": "a"}, "scale must be a number, got str"),
    ({"scale": None}, "scale must be a number, got NoneType"),
]
SCALE_VALUES: Wrong = [({"scale": 10**400}, "scale must be a number that a float can hold")]

SCALED = [compressed_all_reduce, compressed_reduce_scatter]
ERRORS = [
    (call, given, error, message)
    for calls, error, table in [
        (CALLS, TypeError, TYPES),
        (CALLS, ValueError, VALUES),
        ([compressed_all_reduce], TypeError, SUM_TYPES),
        ([compressed_all_reduce], ValueError, SUM_VALUES),
        (SCALED, TypeError, SCALE_TYPES),
        (SCALED, ValueError, SCALE_VALUES),
        (CHUNKS, TypeError, CHUNK_TYPES),
        (CHUNKS, ValueError, CHUNK_VALUES),
    ]
    for given, message in table
    for call in calls
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("call", "given", "error", "message"), ERRORS)
def test_errors(call: Call, given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace("{call}", call.__name__)):
        call(**{"tensors": X, "codec": BLOCKWISE, **given}).wait()
    call(X, BLOCKWISE).wait()  # the group is as good as before


@of_each_call
def test_no_group_at_all(call: Call) -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="a process group is needed"):
        call(X, BLOCKWISE)


# ---- what they take and measure ------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
@of_each_call
def test_tensors_that_require_grad(call: Call) -> None:
    """Nothing is recorded."""
    x = torch.randn(600, requires_grad=True)
    for codec in FIRST:
        drawn = rounding_of(codec, 0, 1)
        if drawn is not None and call is compressed_all_reduce:
            drawn = torch.stack([drawn, drawn])
        result = call(x, codec, rounding=drawn).wait()
        assert not result.requires_grad
        assert torch.equal(result, call(x.detach(), codec, rounding=drawn).wait())


@on_processes
@of_each_codec
def test_inference_mode(rank: int, codec: Codec) -> None:
    """Results are made on other threads, whose mode is another."""
    drawn = rounding_of(codec, rank, 3)
    for call in CALLS if drawn is None else CHUNKS:
        right = call(values(rank, 700, 1), codec, rounding=drawn).wait().clone()
        with torch.inference_mode():
            got = call(values(rank, 700, 1), codec, rounding=drawn).wait()
            assert got.is_inference() and torch.equal(got, right)


def _relative_error(meter: CallMeter) -> float | None:
    return None if meter.squares is None else math.sqrt(meter.squares[0] / meter.squares[1])


def _metered(rank: int, codec: Codec) -> list[tuple[dict[str, float], float | None]]:
    meters = []
    for call in CALLS:
        meters.append(CallMeter())
        call(torch.randn(3001), codec, meter=meters[-1]).wait()
    return [(meter.seconds, _relative_error(meter)) for meter in meters]


@pytest.mark.parametrize("codec", [CODECS["blockwise"](bits=4), CODECS["topk"]()], ids=repr)
def test_a_meter_is_told(two_ranks: RankPool, codec: Codec) -> None:
    for found in [*two_ranks.run(_metered, codec), *run_ranks(_metered, 2, codec)]:
        for seconds, error in found:
            assert set(seconds) == {"encode", "wire", "decode"}
            assert all(each > 0 for each in seconds.values())
            assert error is not None and 0.01 < error < 1


# ---- several at once -----------------------------------------------------------------------------


def _in_flight(rank: int, inner: Codec, seed: int) -> list[Tensor]:
    """Calls that nobody waits for until all are on their way; each method takes a while."""
    world_size, dice = dist.get_world_size(), random.Random(seed * 10 + rank)
    slow = Around(inner, lambda method: time.sleep(dice.random() * 0.003))
    quick = Around(inner, lambda method: None)
    cases = [(call, 1500 * (number + 1), seed + number) for number in range(5) for call in CALLS]

    def issue(number: int, codec: Codec) -> tuple[Any, list[Tensor]]:
        """The future, and what the call remembers."""
        call, numel, drawn = cases[number]
        options = {"error": error_of(codec, rank, numel, drawn)}
        rounding = rounding_of(codec, rank, drawn)
        if call is compressed_all_reduce:
            begin, end = segment_range(codec, numel, rank=rank, world_size=world_size)
            lost = options["error"] is not None and codec.exchange == "all_to_all"
            options["sum_error"] = torch.full((end - begin,), 0.01) if lost else None
            rounding = None if rounding is None else torch.stack([rounding, rounding])
        future = call(values(rank, numel, drawn), codec, rounding=rounding, **options)
        return future, [each for each in options.values() if each is not None]

    numbers = range(len(cases))
    under_way = [issue(number, slow) for number in numbers]
    for number in dice.sample(numbers, len(numbers)):
        under_way[number][0].wait()
    for number, (future, kept) in enumerate(under_way):
        alone, right = issue(number, quick)
        assert torch.equal(future.wait(), alone.wait()), (number, seed)
        assert all(map(torch.equal, kept, right)), (number, seed)
    return [future.wait() for future, _ in under_way]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("codec", FIRST, ids=repr)
def test_several_in_flight(pools: dict[int, RankPool], codec: Codec, world_size: int) -> None:
    """First stages end in another order on each rank; the second ones are issued in order."""
    ranks = pools[world_size].run(_in_flight, codec, random.randrange(1 << 20))
    for place, results in enumerate(zip(*ranks, strict=True)):
        if CALLS[place % len(CALLS)] is not compressed_reduce_scatter:
            assert all(torch.equal(result, results[0]) for result in results)


def test_the_error_of_the_sum_has_its_old_name_too() -> None:
    def call(rank: int) -> Tensor:
        x, error = torch.linspace(0, 1, 64), torch.full((64,), 9.0)
        compressed_all_reduce(x, BLOCKWISE, shard_error=error).wait()
        return error

    with pytest.warns(DeprecationWarning, match="shard_error is deprecated: use sum_error"):
        assert (run_ranks(call, 1)[0] != 9.0).all()


def test_ranges_of_segments() -> None:
    for codec in (example for cls in CODECS.values() for example in cls.examples()):
        for numel in (0, 1, 700, 5000):
            ranges = [segment_range(codec, numel, rank=rank, world_size=3) for rank in range(3)]
            if codec.exchange == "all_to_all":
                assert ranges[0][0] == 0 and ranges[-1][1] == numel
                assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
                counts = [segment.numel for segment in codec.segments(numel, 3)]
                assert [end - begin for begin, end in ranges] == counts
            else:
                assert ranges == [(0, 0)] * 3


# ---- what a message has lost, measured on a sample -----------------------------------------------


def _measured(codec: Codec, values: Tensor, error: Tensor | None) -> tuple[float, float]:
    """What a meter finds, and what was lost in truth."""
    meter = CallMeter()
    wanted = values.double() + (0 if error is None else error.double())
    measured = MessageError([values[:1000], values[1000:]], error)
    message = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode([values], message, error=error)
    measured.note(meter, codec, error, None)
    restored = torch.empty_like(values)
    codec.decode(message, [restored])
    lost = torch.linalg.vector_norm(wanted - restored) / torch.linalg.vector_norm(wanted)
    measured_error = _relative_error(meter)
    assert measured_error is not None
    return measured_error, float(lost)


@pytest.mark.parametrize("numel", [5_000, 20_000, 3_000_000])
@pytest.mark.parametrize("keeps_error", [False, True])
@pytest.mark.parametrize(
    "codec",
    [CODECS["blockwise"](bits=4), CODECS["fp8"](), CODECS["topk"](0.05), CODECS["sign"]()],
    ids=str,
)
def test_the_error_of_a_sample(codec: Codec, keeps_error: bool, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator)
    error = torch.randn(numel, generator=generator) if keeps_error else None
    found, truth = _measured(codec, values, error)
    assert found == pytest.approx(truth, rel=1e-5 if numel == 5_000 else 0.03)


def test_places() -> None:
    assert _places(0) == [(0, 0)]
    assert _places(16384) == [(0, 16384)]
    for numel in (16385, 20_000, 600_000, 10**8 + 1):
        places = _places(numel)
        count = sum(end - begin for begin, end in places)
        assert 16384 <= count <= 1 << 20 and count <= max(16384, numel / 32)
        ends = [0, *(end for _, end in places)]
        assert all(end <= begin for end, (begin, _) in zip(ends, places, strict=False))
        assert all(begin % 4096 == 0 for begin, _ in places) and places[-1][1] <= numel
        # They are spread over all values.
        assert places[-1][1] > 0.7 * numel


def test_values_of_several_tensors() -> None:
    tensors = [torch.arange(5), torch.arange(5, 5), torch.arange(5, 12).view(7, 1)]
    found = _values_at(tensors, [(1, 3), (4, 9), (11, 12)])
    assert found.dtype == torch.float32
    assert found.tolist() == [1, 2, 4, 5, 6, 7, 8, 11]
    assert _values_at([torch.empty(0)], [(0, 0)]).tolist() == []
    column = torch.arange(12).view(3, 4).t()
    assert _values_at([column], [(0, 3)]).tolist() == [0, 4, 8]


def test_only_what_is_due_is_measured() -> None:
    meter = CallMeter()
    due = [meter.is_due() for _ in range(201)]
    assert [number for number, is_due in enumerate(due) if is_due] == [0, 100, 200]
    assert math.isclose(sum(due), 3)
