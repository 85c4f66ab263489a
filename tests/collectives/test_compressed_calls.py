"""Sums, reduce-scatters and all-gathers of messages: what calls refuse, take and measure."""

from __future__ import annotations

import itertools
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
from rank_pool import RankPool
from staged_steps import Around
from torch import Tensor

from torch_commhook.codecs import CODECS, Codec
from torch_commhook.collectives import (
    compressed_all_gather,
    compressed_all_reduce,
    compressed_reduce_scatter,
)
from torch_commhook.collectives.sum_arguments import shard_range
from torch_commhook.metrics import CallMeter
from torch_commhook.testing import run_ranks

Call = Callable[..., Any]
SUMS: list[Call] = [compressed_all_reduce]
CHUNKS: list[Call] = [compressed_reduce_scatter, compressed_all_gather]
CALLS = SUMS + CHUNKS
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

#: What differs from a good call, and its message.
Wrong = dict[str, tuple[dict[str, Any], str]]

TYPES: Wrong = {
    "no codec": ({"codec": "blockwise"}, "codec must be a Codec, got str"),
    "a codec's class": ({"codec": CODECS["topk"]}, "codec must be a Codec, got ABCMeta"),
    "no tensor": ({"tensors": [X, 3]}, r"tensors\[1\] must be a tensor, got int"),
    "no tensors at all": ({"tensors": None}, "tensors must be a tensor or a list of tensors, got "),
    "integers": (
        {"tensors": X.long()},
        r"tensors\[0\] must be of dtype float64, float32, float16 or bfloat16, got torch\.int64",
    ),
    "sparse": ({"tensors": X.to_sparse()}, "must be dense"),
    "sparse, of a codec without an operator": (
        {"tensors": X.to_sparse(), "codec": CODECS["topk"]()},
        "must be dense",
    ),
    "integers to write": ({"out": X.long()}, r"out\[0\] must be of dtype"),
    "error in float64": (
        {"error": ZEROS.double()},
        "error must be of dtype torch.float32 or torch.bfloat16, got torch.float64",
    ),
    "rounding in a list": ({"rounding": [[1, 2], [3, 4]]}, "rounding must be a tensor, got list"),
    "buffers that are none": (
        {"buffers": {}},
        "buffers must be a MessageBuffers or None, got dict",
    ),
    "a meter that is none": ({"meter": 3}, "meter must be a CallMeter or None, got int"),
    "a timeout in seconds": ({"timeout": 3}, "timeout must be a timedelta or None, got int"),
    "no group": ({"group": 3}, NO_GROUP[1]),
}
VALUES: Wrong = {
    "nothing": ({"tensors": []}, "tensors must hold at least one tensor, got none"),
    "several devices": (
        {"tensors": [X, META]},
        r"tensors\[1\] must be on the device of tensors\[0\], cpu, got meta",
    ),
    "nothing to write": ({"out": []}, "out must hold at least one tensor, got none"),
    "too little to write": (
        {"out": [X[:300], X[:299]]},
        "out must hold 600 elements, as many as "
        "(tensors|this rank's chunk|the chunks of all ranks), got 599",
    ),
    "one place to write": ({"out": EXPANDED}, "must reach each of its elements once"),
    "short error": ({"error": ZEROS[:599]}, "^{call}: error must be flat and hold 600 elements"),
    "error elsewhere": ({"error": META}, "error must be on the tensors' device, cpu, got meta"),
    "an error that is sparse": ({"error": ZEROS.to_sparse()}, "error must be dense and flat"),
}

# ---- of sums over all ranks ----------------------------------------------------------------------

SHARD_TYPES: Wrong = {
    "an error of the shard that is none": (
        {"shard_error": [0.0] * 600},
        "shard_error must be a tensor, got list",
    ),
    "random floats": (
        {"codec": STOCHASTIC, "rounding": torch.ones(2, 2)},
        "rounding must be of dtype torch.int64, got torch.float32",
    ),
}
SHARD_VALUES: Wrong = {
    "short error of the shard": (
        {"shard_error": ZEROS[:599]},
        "compressed_all_reduce: shard_error must be flat and hold 600 elements",
    ),
    "error of the shard elsewhere": (
        {"shard_error": META},
        "shard_error must be on the tensors' device, cpu, got meta",
    ),
    "error of the shard in steps": (
        {"shard_error": torch.zeros(1200)[::2]},
        r"shard_error must be contiguous, got strides \[2\]",
    ),
    "no random numbers": (
        {"codec": STOCHASTIC},
        r"rounding must be of shape \(2, 2\) for blockwise\(rounding='stochastic'\), rows of seed "
        "and step, got None",
    ),
    "a row of random numbers": (
        {"codec": STOCHASTIC, "rounding": SEED},
        r"rounding must be of shape \(2, 2\) .*got \[2\]",
    ),
    "another exchange": (
        {"codec": ELSEWHERE},
        "the codec's exchange must be 'all_to_all', 'all_gather' or 'all_reduce', got 'by_post'",
    ),
}
SCALE_TYPES: Wrong = {
    "a scale that is none": ({"scale": "a"}, "scale must be a number, got str"),
    "no scale": ({"scale": None}, "scale must be a number, got NoneType"),
}
SCALE_VALUES: Wrong = {
    "a scale past all floats": ({"scale": 10**400}, "scale must be a number that a float can hold"),
}

# ---- of chunks -----------------------------------------------------------------------------------

CHUNK_TYPES: Wrong = {
    "sizes that are no numbers": (
        {"sizes": ["600"]},
        r"sizes must be a list of ints, got \['600'\]",
    ),
    "a number as sizes": ({"sizes": 600}, "sizes must be a list of ints, got 600"),
    "random floats": (
        {"codec": STOCHASTIC, "rounding": SEED.float()},
        "rounding must be of dtype torch.int64, got torch.float32",
    ),
}
CHUNK_VALUES: Wrong = {
    "sizes of more ranks": (
        {"sizes": [300, 300]},
        r"sizes must be 1 numbers of at least 0, one for each rank, got \[300, 300\]",
    ),
    "a size below 0": (
        {"sizes": [-1]},
        r"sizes must be 1 numbers of at least 0, one for each rank, got \[-1\]",
    ),
    "sizes of other tensors": (
        {"sizes": [599]},
        r"sizes must (add up to 600, as tensors have|give rank 0 the 600 elements of its tensors), "
        r"got \[599\]",
    ),
    "no random numbers": (
        {"codec": STOCHASTIC},
        r"rounding must be of shape \(2,\) for blockwise\(rounding='stochastic'\), seed and step, "
        "got None",
    ),
    "two rows of random numbers": (
        {"codec": STOCHASTIC, "rounding": torch.stack([SEED, SEED])},
        r"rounding must be of shape \(2,\) .*got \[2, 2\]",
    ),
    "an error of a codec that scales": (
        {"codec": UNBIASED, "error": ZEROS, "rounding": SEED},
        "error must be None for an unbiased codec",
    ),
}

SCALED = [compressed_all_reduce, compressed_reduce_scatter]
ERRORS = [
    pytest.param(call, given, error, message, id=f"{name}-{call.__name__}")
    for calls, error, table in [
        (CALLS, TypeError, TYPES),
        (CALLS, ValueError, VALUES),
        (SUMS, TypeError, SHARD_TYPES),
        (SUMS, ValueError, SHARD_VALUES),
        (SCALED, TypeError, SCALE_TYPES),
        (SCALED, ValueError, SCALE_VALUES),
        (CHUNKS, TypeError, CHUNK_TYPES),
        (CHUNKS, ValueError, CHUNK_VALUES),
    ]
    for name, (given, message) in table.items()
    for call in calls
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("call", "given", "error", "message"), ERRORS)
def test_errors(call: Call, given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.format(call=call.__name__)):
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


def _in_inference_mode(rank: int, codec: Codec) -> bool:
    """Results are made on other threads, whose mode is another."""
    drawn = rounding_of(codec, rank, 3)
    same = []
    for call in CALLS if drawn is None else CHUNKS:
        right = call(values(rank, 700, 1), codec, rounding=drawn).wait().clone()
        with torch.inference_mode():
            got = call(values(rank, 700, 1), codec, rounding=drawn).wait()
            same.append(got.is_inference() and torch.equal(got, right))
    return all(same)


@of_each_codec
def test_inference_mode(two_ranks: RankPool, codec: Codec) -> None:
    assert two_ranks.run(_in_inference_mode, codec) == [True, True]


def _metered(rank: int, codec: Codec) -> list[tuple[dict[str, float], float | None]]:
    meters = []
    for call in CALLS:
        meters.append(CallMeter())
        call(torch.randn(3001), codec, meter=meters[-1]).wait()
    return [(meter.seconds, meter.relative_error) for meter in meters]


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
            begin, end = shard_range(codec, numel, rank=rank, world_size=world_size)
            lost = options["error"] is not None and codec.exchange == "all_to_all"
            options["shard_error"] = torch.full((end - begin,), 0.01) if lost else None
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


def test_ranges_of_shards() -> None:
    for codec in (example for cls in CODECS.values() for example in cls.examples()):
        for numel in (0, 1, 700, 5000):
            ranges = [shard_range(codec, numel, rank=rank, world_size=3) for rank in range(3)]
            if codec.exchange == "all_to_all":
                assert ranges[0][0] == 0 and ranges[-1][1] == numel
                assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
                counts = [shard.numel for shard in codec.shards(numel, 3)]
                assert [end - begin for begin, end in ranges] == counts
            else:
                assert ranges == [(0, 0)] * 3
