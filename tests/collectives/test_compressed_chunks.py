"""Reduce-scatters and all-gathers of messages: values, memory, forms, bytes, failures, compilers.

Values are those of the codec's own methods, called one after another by hand.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunk_cases import (
    CASES,
    LONG,
    RANKS,
    STEPS,
    Modes,
    bytes_of_value,
    counted_bytes,
    error_of,
    in_both_modes,
    options_of,
    rounding_of,
    sizes_of,
    values,
)
from codec_examples import of_each_codec
from collective_cases import COMPILED_CODECS, assert_the_bits_of_eager
from on_ranks import on_processes, on_ranks
from rank_pool import RankPool
from staged_steps import Around, Failure
from torch import Tensor, nn

from torch_commhook import GradBucket, attach
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.collectives import compressed_all_gather, compressed_reduce_scatter
from torch_commhook.collectives.compressed import chunk_sizes
from torch_commhook.collectives.compressed_call import MessageBuffers
from torch_commhook.testing import run_ranks

BLOCKWISE = CODECS["blockwise"]()
F64, F16, BF16 = torch.float64, torch.float16, torch.bfloat16

KINDS: dict[str, Callable[..., torch.futures.Future[Tensor]]] = {
    "sums": compressed_reduce_scatter,
    "gathers": compressed_all_gather,
}
of_each_kind = pytest.mark.parametrize("kind", KINDS)


def encoded(
    codec: Codec, x: Tensor, sizes: list[int], error: Tensor | None, rounding: Tensor | None
) -> list[Tensor]:
    """A message for each chunk."""
    nbytes = [part.nbytes for part in codec.chunks(sizes)]
    message = torch.empty(sum(nbytes), dtype=torch.uint8)
    codec.encode_chunks([x], message, sizes, error=error, rounding=rounding)
    return list(message.split(nbytes))


def decoded(codec: Codec, message: Tensor, numel: int, rounding: Tensor | None) -> Tensor:
    out = torch.empty(numel)
    if numel:
        codec.decode(message, [out], rounding=rounding)
    return out


# ---- against the codec's own methods -------------------------------------------------------------


def lengths(kind: str, sizes: list[int]) -> list[int]:
    """How many elements each rank gives."""
    return sizes if kind == "gathers" else [sum(sizes)] * len(sizes)


def _calls(rank: int, kind: str, codec: Codec, names: list[str], seed: int) -> list[Any]:
    """Each case, some calls after another with the same memory."""
    world_size = dist.get_world_size()
    found = []
    for name in names:
        sizes = sizes_of(name, world_size)
        numel = lengths(kind, sizes)[rank]
        options: dict[str, Any] = {"buffers": MessageBuffers()}
        if kind == "sums":
            options |= {"scale": 1 / world_size, **options_of(name, world_size)}
        elif len(set(sizes)) > 1:
            options["sizes"] = sizes
        error = error_of(codec, rank, numel, seed)
        for step in range(STEPS):
            x = values(rank, numel, seed + step)
            before = x.clone()
            drawn = rounding_of(codec, rank, seed + step)
            got = KINDS[kind](x, codec, error=error, rounding=drawn, **options).wait()
            assert torch.equal(x, before), "what is sent was written"
            found.append((got, None if error is None else error.clone()))
    return found


def by_hand(
    kind: str, codec: Codec, sizes: list[int], seed: int, errors: list[Tensor | None]
) -> list[Tensor]:
    restored = []
    for rank, numel in enumerate(lengths(kind, sizes)):
        drawn = rounding_of(codec, rank, seed)
        chunks = sizes if kind == "sums" else [numel]
        messages = encoded(codec, values(rank, numel, seed), chunks, errors[rank], drawn)
        restored.append(
            [decoded(codec, *each, drawn) for each in zip(messages, chunks, strict=True)]
        )
    if kind == "gathers":
        return [torch.cat([own for (own,) in restored])] * len(sizes)
    return [
        functools.reduce(torch.add, rows) * (1 / len(sizes)) for rows in zip(*restored, strict=True)
    ]


def check(kind: str, codec: Codec, ranks: list[list[Any]], names: list[str], seed: int) -> None:
    world_size = len(ranks)
    calls = zip(*ranks, strict=True)
    for name in names:
        sizes = sizes_of(name, world_size)
        numels = lengths(kind, sizes)
        errors = [error_of(codec, rank, numel, seed) for rank, numel in enumerate(numels)]
        for step in range(STEPS):
            right = by_hand(kind, codec, sizes, seed + step, errors)
            for rank, (got, error) in enumerate(next(calls)):
                what = f"{name} in call {step} over {world_size} ranks, seed {seed}: rank {rank}"
                assert torch.equal(got, right[rank]), what
                assert error is None or torch.equal(error, errors[rank]), f"{what}: memory"
    assert next(calls, None) is None


@pytest.mark.parametrize("world_size", RANKS)
@of_each_codec
@of_each_kind
def test_simulated(kind: str, codec: Codec, world_size: int) -> None:
    seed, names = random.randrange(1 << 20), list(CASES)
    ranks = run_ranks(_calls, world_size, kind, codec, names, seed, seed=seed)
    check(kind, codec, ranks, names, seed)


@pytest.mark.parametrize("world_size", [2, 3])
@of_each_codec
@of_each_kind
def test_on_gloo(pools: dict[int, RankPool], kind: str, codec: Codec, world_size: int) -> None:
    seed, names = random.randrange(1 << 20), [*CASES, *LONG]
    check(kind, codec, pools[world_size].run(_calls, kind, codec, names, seed), names, seed)


# ---- tensors of any form -------------------------------------------------------------------------


@on_ranks(4)
@of_each_codec
def test_tensors_of_any_form(rank: int, codec: Codec) -> None:
    """Several tensors of several dtypes, as one flat tensor of their values. The second
    all-gather's results are 2000 values and a multiple of ten."""
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


@pytest.mark.parametrize("dtype", [F64, F16, BF16], ids=str)
@pytest.mark.usefixtures("one_rank")
def test_a_result_has_the_dtype_of_the_tensors(dtype: torch.dtype) -> None:
    x = torch.randn(600).to(dtype)
    for call in (compressed_reduce_scatter, compressed_all_gather):
        assert call(x, BLOCKWISE).wait().dtype is dtype


@on_processes
def test_results_may_go_where_the_tensors_are(rank: int) -> None:
    x = values(rank, 2000, 1)
    right = compressed_reduce_scatter(x, BLOCKWISE).wait()
    own = x[1000 * rank : 1000 * rank + 1000]
    compressed_reduce_scatter(x, BLOCKWISE, out=own).wait()
    whole = compressed_all_gather(own.clone(), BLOCKWISE).wait()
    compressed_all_gather(own, BLOCKWISE, out=x).wait()
    assert torch.equal(x, whole) and float((own - right).abs().max()) < 0.1


# ---- bytes on the wire ---------------------------------------------------------------------------


def _bytes(rank: int, codec: Codec, numel: int) -> list[tuple[int, int, int]]:
    drawn, own = rounding_of(codec, rank, 3), -(-numel // dist.get_world_size())
    return [
        counted_bytes(compressed_reduce_scatter, numel, codec, drawn),
        counted_bytes(compressed_all_gather, own, codec, drawn),
    ]


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


def test_chunks_are_cut_as_torch_cuts() -> None:
    for numel, ranks in itertools.product((0, 1, 5, 8, 1000, 1001), (1, 2, 3, 4, 7, 8)):
        chunks = [len(chunk) for chunk in torch.zeros(numel).chunk(ranks)]
        assert chunk_sizes(numel, ranks) == chunks + [0] * (ranks - len(chunks))


# ---- a rank that fails ---------------------------------------------------------------------------


class Flaky:
    """Averages by a reduce-scatter and an all-gather through a codec that fails when told to."""

    def __init__(self) -> None:
        self.failure = Failure()
        self.codec = Around(CODECS["topk"](1.0), self.failure)

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        group, buffer = bucket.process_group(), bucket.buffer()
        numel, ranks = buffer.numel(), group.size()
        own = compressed_reduce_scatter(buffer, self.codec, scale=1 / ranks, group=group).wait()
        sizes = chunk_sizes(numel, ranks)
        return compressed_all_gather(own, self.codec, sizes=sizes, group=group)


@on_processes
@pytest.mark.parametrize("method", ["encode", "decode", "decode_sum"])
def test_a_rank_that_fails(rank: int, method: str) -> None:
    """All ranks raise in the same step, and the next one works: nothing is left under way."""
    torch.manual_seed(0)
    model, hook = nn.Linear(3, 5), Flaky()
    handle = attach(model, hook)
    found: list[Any] = []
    for step in range(3):
        model.zero_grad()
        if rank == 0 and step == 1:
            hook.failure.arm(method)
        try:
            model(torch.full((2, 3), rank + 1.0)).sum().backward()
            found.append(model.weight.grad.tolist())
        except Exception as error:
            found.append(type(error).__name__)
    handle.remove()
    assert found == [[[3.0] * 3] * 5, ("OwnError", "PeerError")[rank], [[3.0] * 3] * 5]


# ---- compiled ------------------------------------------------------------------------------------


def _compiled(rank: int, codec: Codec, backend: str) -> Modes:
    sizes = chunk_sizes(1301, dist.get_world_size())

    def call(x: Tensor, y: Tensor, error: Any, lost: Any, rounding: Any) -> Tensor:
        summed = compressed_reduce_scatter(
            [x * 2, y.t() * 3], codec, scale=0.5, error=error, rounding=rounding
        )
        own = summed.then(lambda done: done.value() + 1).wait()
        whole = compressed_all_gather(own, codec, sizes=sizes, error=lost, rounding=rounding)
        return whole.wait() * 3

    def memory() -> list[Tensor | None]:
        return [error_of(codec, rank, numel, 2) for numel in (1301, sizes[rank])]

    return in_both_modes(rank, backend, call, memory, lambda step: rounding_of(codec, rank, step))


@pytest.mark.parametrize(("backend", "codec"), COMPILED_CODECS, ids=repr)
def test_compiled(two_ranks: RankPool, backend: str, codec: Codec) -> None:
    assert_the_bits_of_eager(two_ranks.run(_compiled, codec, backend, timeout=180))
