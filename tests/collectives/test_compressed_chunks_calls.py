"""Reduce-scatters and all-gathers of messages: forms, bytes, errors, failures, compilers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunk_cases import FIRST, error_of, of_each_codec, rounding_of, values
from codec_doubles import Around
from collective_cases import COMPILED_CODECS, NO_GROUP, assert_the_bits_of_eager
from rank_pool import RankPool
from torch import Tensor, nn

from torch_commhook import GradBucket, attach
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.codecs.block_codec import BlockCodec
from torch_commhook.collectives import compressed_all_gather, compressed_reduce_scatter
from torch_commhook.collectives.compressed_chunks import chunk_sizes
from torch_commhook.metrics import CallMeter, WireMeter, counting
from torch_commhook.process_group import RecordingProcessGroup
from torch_commhook.testing import run_ranks

F64, F16, BF16 = torch.float64, torch.float16, torch.bfloat16

# ---- tensors of any form -------------------------------------------------------------------------


def _forms(rank: int, codec: Codec) -> list[Tensor]:
    """Several tensors of several dtypes, as one flat tensor of their values."""
    drawn = rounding_of(codec, rank, 3)
    tensors = [
        values(rank, 350, 1).view(7, 50).t(),
        values(rank, 33, 2).bfloat16(),
        values(rank, 0, 2),
        values(rank, 617, 3).double(),
    ]
    flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
    right = compressed_reduce_scatter(flat, codec, rounding=drawn).wait()
    out = [torch.full((10, 20), 7.0).t(), torch.full((len(right) - 200,), 7.0, dtype=BF16)]
    got = compressed_reduce_scatter(tensors, codec, out=out, rounding=drawn).wait()
    assert got is out[0]
    assert torch.equal(out[0], right[:200].view(20, 10))
    assert torch.equal(out[1], right[200:].bfloat16())
    whole = compressed_all_gather(flat, codec, rounding=drawn).wait()
    out = [torch.empty(40, 50, dtype=F64), torch.empty(10, len(whole) // 10 - 200).t()]
    got = compressed_all_gather(tensors, codec, out=out, rounding=drawn).wait()
    assert got is out[0]
    assert torch.equal(torch.cat([tensor.reshape(-1).double() for tensor in out]), whole.double())
    return [right, whole]


@of_each_codec
def test_tensors_of_any_form(codec: Codec) -> None:
    """The second all-gather's results are 2000 values and a multiple of ten."""
    run_ranks(_forms, 4, codec)


@pytest.mark.parametrize("dtype", [F64, F16, BF16], ids=str)
@pytest.mark.usefixtures("one_rank")
def test_a_result_has_the_dtype_of_the_tensors(dtype: torch.dtype) -> None:
    x = torch.randn(600).to(dtype)
    for call in (compressed_reduce_scatter, compressed_all_gather):
        assert call(x, BLOCKWISE).wait().dtype is dtype


def _in_place(rank: int, codec: Codec) -> bool:
    """Into the tensors that are sent."""
    x = values(rank, 2000, 1)
    right = compressed_reduce_scatter(x, codec).wait()
    own = x[1000 * rank : 1000 * rank + 1000]
    compressed_reduce_scatter(x, codec, out=own).wait()
    whole = compressed_all_gather(own.clone(), codec).wait()
    compressed_all_gather(own, codec, out=x).wait()
    return torch.equal(x, whole) and float((own - right).abs().max()) < 0.1


def test_results_may_go_where_the_tensors_are(two_ranks: RankPool) -> None:
    assert all(two_ranks.run(_in_place, BLOCKWISE))


def _in_flight(rank: int, codec: Codec, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Calls that nobody waits for until all are on their way."""
    world_size = dist.get_world_size()
    drawn = rounding_of(codec, rank, seed)
    lengths = [1500 * (number // 6 + 1) for number in range(12)]
    inputs = [values(rank, length, seed + number) for number, length in enumerate(lengths)]
    sums = [compressed_reduce_scatter(x, codec, rounding=drawn) for x in inputs]
    gathers = [compressed_all_gather(x, codec, rounding=drawn) for x in inputs]
    order = random.Random(rank).sample(range(12), 12)
    found = {number: (sums[number].wait(), gathers[number].wait()) for number in order}
    for number, x in enumerate(inputs):
        alone = compressed_reduce_scatter(x, codec, rounding=drawn).wait()
        whole = compressed_all_gather(x, codec, rounding=drawn).wait()
        assert len(whole) == world_size * len(x)
        assert torch.equal(found[number][0], alone) and torch.equal(found[number][1], whole)
    return [found[number] for number in range(12)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("codec", FIRST, ids=repr)
def test_several_in_flight(pools: dict[int, RankPool], codec: Codec, world_size: int) -> None:
    ranks = pools[world_size].run(_in_flight, codec, random.randrange(1 << 20))
    for results in itertools.zip_longest(*ranks):
        assert all(torch.equal(whole, results[0][1]) for _, whole in results)


# ---- bytes on the wire ---------------------------------------------------------------------------


def _bytes(rank: int, codec: Codec, numel: int) -> list[tuple[int, int, int]]:
    """As the library counts them, by a group that is waited for, and by the way to that."""
    drawn = rounding_of(codec, rank, 3)
    world_size = dist.get_world_size()
    found = []
    for call, length in (
        (compressed_reduce_scatter, numel),
        (compressed_all_gather, -(-numel // world_size)),
    ):
        own, through = WireMeter(), WireMeter()
        x = torch.randn(length)
        with counting(own):
            call(x, codec, rounding=drawn).wait()
        group = RecordingProcessGroup(dist.group.WORLD)
        with counting(through):
            call(x, codec, rounding=drawn, group=group).wait()
        found.append((own.bytes_sent, through.bytes_sent, group.total.bytes_sent))
    return found


def bytes_of_value(codec: Codec) -> float:
    if isinstance(codec, BlockCodec):
        form = codec._form
        return form.bits / 8 + 4 * form.parameters / form.block_size
    return codec.nbytes(1 << 20) / (1 << 20)  # of which nothing is known but what it says


def check_bytes(codec: Codec, numel: int, ranks: list[list[tuple[int, int, int]]]) -> None:
    """``b (W - 1) / W`` of each unsharded value, b bytes of a value on the wire."""
    world_size = len(ranks)
    formula = bytes_of_value(codec) * numel * (world_size - 1) / world_size
    # A chunk's last block has all its parameters. These and its values fill up 16 bytes each. Of
    # few values at least one is sent.
    padding = (world_size - 1) * (bytes_of_value(codec) + 8 + 27)
    if isinstance(codec, CODECS["chunk_topk"]):  # a short chunk sends as many values as a whole one
        padding += (world_size - 1) * codec.nbytes(4096)
    sizes = chunk_sizes(numel, world_size)
    for rank, counts in enumerate(ranks):
        others = [codec.nbytes(size) for other, size in enumerate(sizes) if other != rank]
        right = sum(others), codec.nbytes(sizes[0]) * (world_size - 1)
        for sent, exact in zip(counts, right, strict=True):
            assert sent == (exact,) * 3
            assert abs(exact - formula) <= padding + bytes_of_value(codec) * world_size


@pytest.mark.parametrize("numel", [1 << 16, 10_001])
@of_each_codec
def test_bytes(codec: Codec, numel: int) -> None:
    for world_size in range(2, 9):
        check_bytes(codec, numel, run_ranks(_bytes, world_size, codec, numel))


@pytest.mark.parametrize(
    ("ranks", "int8", "int4"), [(2, 0.51, 0.26), (4, 0.76, 0.39), (8, 0.89, 0.45)]
)
def test_bytes_are_those_of_the_formulas(ranks: int, int8: float, int4: float) -> None:
    """``(1 + 4 / B) (W - 1) / W`` and ``(0.5 + 4 / B) (W - 1) / W``, to two digits."""
    for bits, figure in ((8, int8), (4, int4)):
        for counts in run_ranks(_bytes, ranks, CODECS["blockwise"](bits=bits), 1 << 16):
            assert [round(sent[0] / (1 << 16), 2) for sent in counts] == [figure] * 2


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("numel", [20_000, 600_000])
def test_bytes_on_gloo(pools: dict[int, RankPool], numel: int, world_size: int) -> None:
    """Also point to point."""
    codec = CODECS["blockwise"]()
    check_bytes(codec, numel, pools[world_size].run(_bytes, codec, numel))


# ---- the time of its stages ----------------------------------------------------------------------


def _metered(rank: int, codec: Codec) -> list[tuple[dict[str, float], float | None]]:
    found = []
    for call in (compressed_reduce_scatter, compressed_all_gather):
        meter = CallMeter()
        call(torch.randn(3001), codec, meter=meter).wait()
        found.append((meter.seconds, meter.relative_error))
    return found


@pytest.mark.parametrize("codec", [CODECS["blockwise"](bits=4), CODECS["topk"]()], ids=repr)
def test_a_meter_is_told(two_ranks: RankPool, codec: Codec) -> None:
    for found in [*two_ranks.run(_metered, codec), *run_ranks(_metered, 2, codec)]:
        for seconds, error in found:
            assert set(seconds) == {"encode", "wire", "decode"}
            assert all(each > 0 for each in seconds.values())
            assert error is not None and 0.01 < error < 1


# ---- arguments -----------------------------------------------------------------------------------

BLOCKWISE = CODECS["blockwise"]()
STOCHASTIC = CODECS["blockwise"](rounding="stochastic")
UNBIASED = CODECS["randomk"](0.1, unbiased=True)
X = torch.ones(600)
SEED = torch.ones(2, dtype=torch.int64)

Call = Callable[..., Any]
ERRORS: dict[str, tuple[Callable[[Call], Any], type[Exception], str]] = {
    "no codec": (
        lambda call: call(X, "blockwise"),
        TypeError,
        "codec must be a Codec, got str",
    ),
    "nothing": (
        lambda call: call([], BLOCKWISE),
        ValueError,
        "tensors must hold at least one tensor, got none",
    ),
    "no tensors at all": (
        lambda call: call(None, BLOCKWISE),
        TypeError,
        "tensors must be a tensor or a list of tensors, got NoneType",
    ),
    "integers": (
        lambda call: call(X.long(), BLOCKWISE),
        TypeError,
        r"tensors\[0\] must be of dtype",
    ),
    "sparse": (lambda call: call(X.to_sparse(), BLOCKWISE), TypeError, "must be dense"),
    "sparse, of a codec without an operator": (
        lambda call: call(X.to_sparse(), CODECS["topk"]()),
        TypeError,
        "must be dense",
    ),
    "several devices": (
        lambda call: call([X, torch.zeros(3, device="meta")], BLOCKWISE),
        ValueError,
        r"tensors\[1\] must be on the device of tensors\[0\], cpu, got meta",
    ),
    "too little to write": (
        lambda call: call(X, BLOCKWISE, out=[X[:300], X[:299]]),
        ValueError,
        "out must hold 600 elements, as many as (this rank's chunk|the chunks of all ranks), got "
        "599",
    ),
    "one place to write": (
        lambda call: call(X, BLOCKWISE, out=torch.ones(1).expand(600)),
        ValueError,
        "must reach each of its elements once",
    ),
    "sizes of more ranks": (
        lambda call: call(X, BLOCKWISE, sizes=[300, 300]),
        ValueError,
        r"sizes must be 1 numbers of at least 0, one for each rank, got \[300, 300\]",
    ),
    "a size below 0": (
        lambda call: call(X, BLOCKWISE, sizes=[-1]),
        ValueError,
        r"sizes must be 1 numbers of at least 0, one for each rank, got \[-1\]",
    ),
    "sizes of other tensors": (
        lambda call: call(X, BLOCKWISE, sizes=[599]),
        ValueError,
        r"sizes must (add up to 600, as tensors have|give rank 0 the 600 elements of its tensors), "
        r"got \[599\]",
    ),
    "sizes that are no numbers": (
        lambda call: call(X, BLOCKWISE, sizes=["600"]),
        TypeError,
        r"sizes must be a list of ints, got \['600'\]",
    ),
    "a number as sizes": (
        lambda call: call(X, BLOCKWISE, sizes=600),
        TypeError,
        "sizes must be a list of ints, got 600",
    ),
    "no random numbers": (
        lambda call: call(X, STOCHASTIC),
        ValueError,
        r"rounding must be of shape \(2,\) for blockwise\(rounding='stochastic'\), seed and step, "
        "got None",
    ),
    "two rows of random numbers": (
        lambda call: call(X, STOCHASTIC, rounding=torch.stack([SEED, SEED])),
        ValueError,
        r"rounding must be of shape \(2,\) .*got \[2, 2\]",
    ),
    "random floats": (
        lambda call: call(X, STOCHASTIC, rounding=SEED.float()),
        TypeError,
        "rounding must be of dtype torch.int64, got torch.float32",
    ),
    "short error": (
        lambda call: call(X, BLOCKWISE, error=torch.zeros(599)),
        ValueError,
        "error must be flat and hold 600 elements",
    ),
    "error in float64": (
        lambda call: call(X, BLOCKWISE, error=torch.zeros(600).double()),
        TypeError,
        "error must be of dtype torch.float32 or torch.bfloat16, got torch.float64",
    ),
    "an error of a codec that scales": (
        lambda call: call(X, UNBIASED, error=torch.zeros(600), rounding=SEED),
        ValueError,
        "error must be None for an unbiased codec",
    ),
    "buffers that are none": (
        lambda call: call(X, BLOCKWISE, buffers={}),
        TypeError,
        "buffers must be a MessageBuffers or None, got dict",
    ),
    "a meter that is none": (
        lambda call: call(X, BLOCKWISE, meter=3),
        TypeError,
        "meter must be a CallMeter or None, got int",
    ),
    "a timeout in seconds": (
        lambda call: call(X, BLOCKWISE, timeout=3),
        TypeError,
        "timeout must be a timedelta or None, got int",
    ),
    "no group": (lambda call: call(X, BLOCKWISE, group=3), *NO_GROUP),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("call", [compressed_reduce_scatter, compressed_all_gather])
@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str, call: Call) -> None:
    wrong, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        wrong(call).wait()
    call(X, BLOCKWISE).wait()  # the group is as good as before


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("scale", [None, "a", 10**400])
def test_a_scale_that_is_none(scale: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="scale must be a number"):
        compressed_reduce_scatter(X, BLOCKWISE, scale=scale)


@pytest.mark.parametrize("call", [compressed_reduce_scatter, compressed_all_gather])
def test_no_group_at_all(call: Call) -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="a process group is needed"):
        call(X, BLOCKWISE)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("call", [compressed_reduce_scatter, compressed_all_gather])
def test_tensors_that_require_grad(call: Call) -> None:
    """Nothing is recorded."""
    x = torch.randn(600, requires_grad=True)
    for codec in FIRST:
        result = call(x, codec, rounding=rounding_of(codec, 0, 1)).wait()
        assert not result.requires_grad
        assert torch.equal(
            result, call(x.detach(), codec, rounding=rounding_of(codec, 0, 1)).wait()
        )


def test_chunks_are_cut_as_torch_cuts() -> None:
    for numel, ranks in itertools.product((0, 1, 5, 8, 1000, 1001), (1, 2, 3, 4, 7, 8)):
        chunks = [len(chunk) for chunk in torch.zeros(numel).chunk(ranks)]
        assert chunk_sizes(numel, ranks) == chunks + [0] * (ranks - len(chunks))


# ---- a rank that fails ---------------------------------------------------------------------------


class OwnError(Exception):
    """What a codec raises in a test."""


class Flaky:
    """Averages by a reduce-scatter and an all-gather through a codec that fails when told to."""

    def __init__(self) -> None:
        self.fails_in: str | None = None
        self.codec = Around(CODECS["topk"](1.0), self._before)

    def _before(self, method: str) -> None:
        if method == self.fails_in:
            raise OwnError(method)

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        group, buffer = bucket.process_group(), bucket.buffer()
        numel, ranks = buffer.numel(), group.size()
        own = compressed_reduce_scatter(buffer, self.codec, scale=1 / ranks, group=group).wait()
        sizes = chunk_sizes(numel, ranks)
        return compressed_all_gather(own, self.codec, sizes=sizes, group=group)


def _fails(rank: int, method: str) -> list[Any]:
    torch.manual_seed(0)
    model, hook = nn.Linear(3, 5), Flaky()
    handle = attach(model, hook)
    found: list[Any] = []
    for step in range(3):
        model.zero_grad()
        hook.fails_in = method if rank == 0 and step == 1 else None
        try:
            model(torch.full((2, 3), rank + 1.0)).sum().backward()
            found.append(model.weight.grad.tolist())
        except Exception as error:
            found.append(type(error).__name__)
    handle.remove()
    return found


@pytest.mark.parametrize("method", ["encode", "decode", "decode_sum"])
def test_a_rank_that_fails(two_ranks: RankPool, method: str) -> None:
    """All ranks raise in the same step, and the next one works: nothing is left under way."""
    for rank, found in enumerate(two_ranks.run(_fails, method)):
        assert found == [[[3.0] * 3] * 5, ("OwnError", "PeerError")[rank], [[3.0] * 3] * 5]


def _decoding_fails(rank: int, call_name: str) -> list[str]:
    """What is raised on a thread of the backend keeps its type, and the group goes on."""
    call = {"sum": compressed_reduce_scatter, "gather": compressed_all_gather}[call_name]
    hook = Flaky()
    hook.fails_in = "decode_sum" if call_name == "sum" else "decode"
    found = []
    try:
        call(torch.ones(600), hook.codec).wait()
    except Exception as error:
        found.append(type(error).__name__)
    hook.fails_in = None
    found.append(str(float(call(torch.ones(600), hook.codec).wait()[0])))
    return found


@pytest.mark.parametrize(("call_name", "value"), [("sum", "2.0"), ("gather", "1.0")])
def test_a_codec_that_fails_to_decode(two_ranks: RankPool, call_name: str, value: str) -> None:
    assert two_ranks.run(_decoding_fails, call_name) == [["OwnError", value]] * 2


# ---- compiled ------------------------------------------------------------------------------------


def _compiled(rank: int, codec: Codec, backend: str) -> tuple[list[Tensor], list[Tensor], int]:
    """What both give in eager, and compiled; and the graphs that this took."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    world_size = dist.get_world_size()

    def call(x: Tensor, y: Tensor, error: Any, lost: Any, rounding: Any) -> Tensor:
        summed = compressed_reduce_scatter(
            [x * 2, y.t() * 3], codec, scale=0.5, error=error, rounding=rounding
        )
        own = summed.then(lambda done: done.value() + 1).wait()
        sizes = chunk_sizes(1301, world_size)
        whole = compressed_all_gather(own, codec, sizes=sizes, error=lost, rounding=rounding)
        return whole.wait() * 3

    results: list[list[Tensor]] = []
    for function in (call, torch.compile(call, backend=backend, fullgraph=True)):
        own = chunk_sizes(1301, world_size)[rank]
        memories = [error_of(codec, rank, numel, 2) for numel in (1301, own)]
        found = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x, y = torch.randn(301, generator=generator), torch.randn(100, 10, generator=generator)
            found.append(function(x, y, *memories, rounding_of(codec, rank, step)))
        results.append([*found, *(each for each in memories if each is not None)])
    return results[0], results[1], torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("backend", "codec"), COMPILED_CODECS, ids=repr)
def test_compiled(two_ranks: RankPool, backend: str, codec: Codec) -> None:
    assert_the_bits_of_eager(two_ranks.run(_compiled, codec, backend, timeout=180))
