"""Errors that codecs remember in bfloat16: those of float32, rounded once in each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from codec_examples import EXAMPLES, LARGEST, encode, restore, rounding_for
from ops_reference import LEVELS, cpu_level
from staged_steps import Around
from torch import Tensor

from torch_commhook import collectives
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.collectives.sum_arguments import shard_range
from torch_commhook.testing import run_ranks

WITH_ERROR = [codec for codec in EXAMPLES if codec.takes_error]
BLOCKS = [codec for codec in WITH_ERROR if codec.exchange == "all_to_all"]
SPARSE = [codec for codec in WITH_ERROR if codec.exchange != "all_to_all"]
of_each_sparse = pytest.mark.parametrize("codec", SPARSE, ids=repr)

NUMEL = 20_000  # more than topk looks at in one piece


def drawn(step: int = 0) -> Tensor:
    return torch.tensor([7, step])


def with_both(codec: Codec, tensors: list[Tensor], error: Tensor, **options: Any) -> list[Tensor]:
    """Message and error of float32 memory, then of bfloat16."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        lost = error.to(dtype, copy=True)
        found += [encode(codec, tensors, error=lost, **options), lost]
    return found


@pytest.mark.parametrize("codec", BLOCKS, ids=repr)
def test_the_same_message_and_the_error_rounded(codec: Codec) -> None:
    x, error = torch.randn(NUMEL), (torch.randn(NUMEL) * 0.1).bfloat16()
    wide, lost, message, kept = with_both(codec, [x], error, shards=3, scale=0.5)
    assert torch.equal(message, wide)
    assert torch.equal(kept, lost.bfloat16())
    assert not torch.equal(kept.float(), lost), "nothing was rounded, so that this shows nothing"


@of_each_sparse
def test_a_sparse_message_and_an_error_beside_what_is_lost(codec: Codec) -> None:
    x, error = torch.randn(NUMEL), (torch.randn(NUMEL) * 0.1).bfloat16()
    wide, lost, message, kept = with_both(codec, [x], error, rounding=drawn())
    assert torch.equal(message, wide)
    bits, halves = lost.view(torch.int32), kept.float().view(torch.int32)
    below = bits & ~0xFFFF
    assert ((halves == below) | (halves == below + 0x10000)).all()
    assert torch.equal(halves == 0, bits == 0)  # what was sent
    above = (halves != below).double().mean().item()
    assert above == pytest.approx(((bits & 0xFFFF).double() / 0x10000).mean().item(), abs=0.02)


def test_without_random_numbers_topk_rounds_to_the_nearest() -> None:
    x, error = torch.randn(NUMEL), torch.zeros(NUMEL, dtype=torch.bfloat16)
    _, lost, _, kept = with_both(CODECS["topk"](), [x], error)
    assert torch.equal(kept, lost.bfloat16())


@pytest.mark.parametrize("codec", [codec for codec in SPARSE if codec.exchange == "all_gather"])
@pytest.mark.parametrize("guess", ["right", "wrong"])
def test_all_kernels_sort_out_many_values(codec: Codec, guess: str) -> None:
    """A sample says which values may be sent; where it was wrong, they are read again."""
    x, error = torch.randn(100_000), (torch.randn(100_000) * 0.1).bfloat16()
    if guess == "wrong":
        x.fill_(1.0)  # nearly all of one rank, as far as the sample looks
        error *= 1e-2
    found = []
    for level in LEVELS:
        with cpu_level(level):
            found.append(with_both(codec, [x], error, rounding=drawn()))
    assert all(torch.equal(each[0], each[2]) for each in found)
    assert all(torch.equal(each[3], found[0][3]) for each in found)


@of_each_sparse
def test_small_gradients_are_not_lost_for_good(codec: Codec) -> None:
    """Errors grow to a multiple of the gradients, of which one is less than the error's last bit.

    Over so many steps that rounding to the nearest would have lost more than half of them.
    """
    torch.manual_seed(0)
    numel, steps = 300, 3000
    x = torch.full((numel,), 1 / 1024)
    x[: codec.entries(numel)] = 16.0  # in each step, of topk, so that the others wait
    error = torch.ones(numel, dtype=torch.bfloat16)  # as left by steps before
    sent = torch.zeros(numel, dtype=torch.float64)
    for step in range(steps):
        sent += restore(codec, x, error=error, rounding=drawn(step))
    small = slice(codec.entries(numel), None)
    observed = steps * x[small].double().sum() + numel - codec.entries(numel)
    found = sent[small].sum() + error[small].double().sum()
    assert found.item() == pytest.approx(observed.item(), rel=0.05)


# ---- codecs of one's own -------------------------------------------------------------------------


def _summed(rank: int, codec: Codec, dtype: torch.dtype) -> list[Tensor]:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(rank))
    begin, end = shard_range(codec, 3000, rank=rank, world_size=2)
    error = torch.full((3000,), 0.25, dtype=dtype)
    shard_error = torch.full((end - begin,), -0.5, dtype=dtype)
    summed = collectives.compressed_all_reduce(x, codec, error=error, shard_error=shard_error)
    result = summed.wait()
    chunk_error = torch.full((3000,), 0.25, dtype=dtype)
    chunk = collectives.compressed_reduce_scatter(x, codec, error=chunk_error).wait()
    return [result, chunk, error, shard_error, chunk_error]


@pytest.mark.parametrize("codec", [codec for codec in BLOCKS if not codec.is_random], ids=repr)
def test_a_codec_that_takes_float32_alone_gets_a_copy(codec: Codec) -> None:
    own = Around(codec, lambda method: None)
    assert list(own.error_dtypes) == [torch.float32]
    found = run_ranks(_summed, 2, own, torch.bfloat16)
    wanted = run_ranks(_summed, 2, codec, torch.bfloat16)
    for got, want in zip(found, wanted, strict=True):
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))
        before = zip(got[2:], (0.25, -0.5, 0.25), strict=True)
        assert not any(error.eq(value).all() for error, value in before)


def test_its_largest_error_stays_finite() -> None:
    class Nothing(Around):
        def encode(self, tensors: Any, message: Tensor, *, error: Tensor, **options: Any) -> None:
            message.zero_()
            error.fill_(LARGEST)

    error = torch.zeros(8, dtype=torch.bfloat16)

    def lose(rank: int) -> None:
        codec = Nothing(CODECS["topk"](), lambda method: None)
        collectives.compressed_reduce_scatter(torch.ones(8), codec, error=error).wait()

    run_ranks(lose, 1)
    assert (error == torch.finfo(torch.bfloat16).max).all()


def test_other_dtypes_are_refused() -> None:
    codec = CODECS["sign"]()
    with pytest.raises(TypeError, match="error must be of dtype float32 or bfloat16, got"):
        encode(codec, [torch.ones(600)], error=torch.zeros(600, dtype=torch.float16))
    for random_codec in SPARSE:
        rounding = rounding_for(random_codec)
        with pytest.raises(TypeError, match="error must be of dtype float32 or bfloat16, got"):
            error = torch.zeros(600, dtype=torch.float64)
            encode(random_codec, [torch.ones(600)], error=error, rounding=rounding)
