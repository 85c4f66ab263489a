"""What a call of the compressed sum refuses, and what it takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from codec_doubles import Around
from collective_cases import NO_GROUP

from torch_commhook.codecs import CODECS
from torch_commhook.collectives import compressed_all_reduce
from torch_commhook.collectives.sum_arguments import shard_range


class Elsewhere(Around):
    """A codec with an exchange that nobody knows."""

    exchange = "by_post"  # type: ignore[assignment]


BLOCKWISE = CODECS["blockwise"]()
STOCHASTIC = CODECS["blockwise"](rounding="stochastic")
TOPK = CODECS["topk"]()
X = torch.ones(600)
ROUNDING = torch.ones(2, 2, dtype=torch.int64)

ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no codec": (
        lambda: compressed_all_reduce(X, "blockwise"),  # type: ignore[arg-type]
        TypeError,
        "codec must be a Codec, got str",
    ),
    "a codec's class": (
        lambda: compressed_all_reduce(X, CODECS["topk"]),  # type: ignore[arg-type]
        TypeError,
        "codec must be a Codec, got ABCMeta",
    ),
    "nothing": (
        lambda: compressed_all_reduce([], BLOCKWISE),
        ValueError,
        "tensors must hold at least one tensor, got none",
    ),
    "no tensor": (
        lambda: compressed_all_reduce([X, 3], BLOCKWISE),  # type: ignore[list-item]
        TypeError,
        r"tensors\[1\] must be a tensor, got int",
    ),
    "integers": (
        lambda: compressed_all_reduce(X.long(), BLOCKWISE),
        TypeError,
        r"tensors\[0\] must be of dtype float64, float32, float16 or bfloat16, got torch\.int64",
    ),
    "sparse": (lambda: compressed_all_reduce(X.to_sparse(), BLOCKWISE), TypeError, "must be dense"),
    "nothing to write": (
        lambda: compressed_all_reduce(X, BLOCKWISE, out=[]),
        ValueError,
        "out must hold at least one tensor, got none",
    ),
    "too little to write": (
        lambda: compressed_all_reduce(X, BLOCKWISE, out=[X[:300], X[:299]]),
        ValueError,
        "out must hold 600 elements, as many as tensors, got 599",
    ),
    "integers to write": (
        lambda: compressed_all_reduce(X, BLOCKWISE, out=X.long()),
        TypeError,
        r"out\[0\] must be of dtype",
    ),
    "one place to write": (
        lambda: compressed_all_reduce(X, BLOCKWISE, out=torch.ones(1).expand(600)),
        ValueError,
        "must reach each of its elements once",
    ),
    "no random numbers": (
        lambda: compressed_all_reduce(X, STOCHASTIC),
        ValueError,
        r"rounding must be of shape \(2, 2\) for blockwise\(rounding='stochastic'\), rows of seed "
        "and step, got None",
    ),
    "a row of random numbers": (
        lambda: compressed_all_reduce(X, STOCHASTIC, rounding=ROUNDING[0]),
        ValueError,
        r"rounding must be of shape \(2, 2\) .*got \[2\]",
    ),
    "random floats": (
        lambda: compressed_all_reduce(X, STOCHASTIC, rounding=ROUNDING.float()),
        TypeError,
        "rounding must be of dtype torch.int64, got torch.float32",
    ),
    "short error": (
        lambda: compressed_all_reduce(X, BLOCKWISE, error=torch.zeros(599)),
        ValueError,
        "compressed_all_reduce: error must be flat and hold 600 elements",
    ),
    "error in float64": (
        lambda: compressed_all_reduce(X, TOPK, error=torch.zeros(600).double()),
        TypeError,
        "error must be of dtype torch.float32 or torch.bfloat16, got torch.float64",
    ),
    "short error of the shard": (
        lambda: compressed_all_reduce(X, BLOCKWISE, shard_error=torch.zeros(599)),
        ValueError,
        "compressed_all_reduce: shard_error must be flat and hold 600 elements",
    ),
    "an error of the shard that is none": (
        lambda: compressed_all_reduce(X, BLOCKWISE, shard_error=[0.0] * 600),
        TypeError,
        "shard_error must be a tensor, got list",
    ),
    "error elsewhere": (
        lambda: compressed_all_reduce(X, BLOCKWISE, error=torch.zeros(600, device="meta")),
        ValueError,
        "error must be on the tensors' device, cpu, got meta",
    ),
    "error of the shard elsewhere": (
        lambda: compressed_all_reduce(X, BLOCKWISE, shard_error=torch.zeros(600, device="meta")),
        ValueError,
        "shard_error must be on the tensors' device, cpu, got meta",
    ),
    "error of the shard in steps": (
        lambda: compressed_all_reduce(X, BLOCKWISE, shard_error=torch.zeros(1200)[::2]),
        ValueError,
        r"shard_error must be contiguous, got strides \[2\]",
    ),
    "an error that is sparse": (
        lambda: compressed_all_reduce(X, BLOCKWISE, error=torch.zeros(600).to_sparse()),
        ValueError,
        "error must be dense and flat",
    ),
    "a scale past all floats": (
        lambda: compressed_all_reduce(X, BLOCKWISE, scale=10**400),
        ValueError,
        "scale must be a number that a float can hold",
    ),
    "no tensors at all": (
        lambda: compressed_all_reduce(None, BLOCKWISE),
        TypeError,
        "tensors must be a tensor or a list of tensors, got NoneType",
    ),
    "a scale that is none": (
        lambda: compressed_all_reduce(X, BLOCKWISE, scale="a"),
        TypeError,
        "scale must be a number, got str",
    ),
    "no scale": (
        lambda: compressed_all_reduce(X, BLOCKWISE, scale=None),
        TypeError,
        "scale must be a number, got NoneType",
    ),
    "rounding in a list": (
        lambda: compressed_all_reduce(X, BLOCKWISE, rounding=[[1, 2], [3, 4]]),
        TypeError,
        "rounding must be a tensor, got list",
    ),
    "buffers that are none": (
        lambda: compressed_all_reduce(X, BLOCKWISE, buffers={}),
        TypeError,
        "buffers must be a MessageBuffers or None, got dict",
    ),
    "a meter that is none": (
        lambda: compressed_all_reduce(X, BLOCKWISE, meter=3),
        TypeError,
        "meter must be a CallMeter or None, got int",
    ),
    "a timeout in seconds": (
        lambda: compressed_all_reduce(X, BLOCKWISE, timeout=3),
        TypeError,
        "timeout must be a timedelta or None, got int",
    ),
    "several devices": (
        lambda: compressed_all_reduce([X, torch.zeros(3, device="meta")], BLOCKWISE),
        ValueError,
        r"tensors\[1\] must be on the device of tensors\[0\], cpu, got meta",
    ),
    "another exchange": (
        lambda: compressed_all_reduce(X, Elsewhere(BLOCKWISE, lambda method: None)),
        ValueError,
        "the codec's exchange must be 'all_to_all', 'all_gather' or 'all_reduce', got 'by_post'",
    ),
    "no group": (lambda: compressed_all_reduce(X, BLOCKWISE, group=3), *NO_GROUP),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call().wait()
    compressed_all_reduce(X, BLOCKWISE).wait()  # the group is as good as before


def test_no_group_at_all() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="a process group is needed"):
        compressed_all_reduce(X, BLOCKWISE)


@pytest.mark.usefixtures("one_rank")
def test_tensors_that_require_grad() -> None:
    """Nothing is recorded."""
    x = torch.randn(600, requires_grad=True)
    result = compressed_all_reduce(x, BLOCKWISE).wait()
    assert not result.requires_grad
    assert torch.equal(result, compressed_all_reduce(x.detach(), BLOCKWISE).wait())


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
