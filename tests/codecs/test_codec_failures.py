"""What becomes of a step, of a group and of a model where a codec raises."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_processes
from rank_pool import RankPool
from staged_steps import (
    BLOCKWISE,
    Around,
    Failure,
    OwnError,
    X,
    as_long,
    backward,
    gloo_groups,
    gradients_of,
    model,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.collectives import (
    compressed_all_gather,
    compressed_all_reduce,
    compressed_reduce_scatter,
)
from torch_commhook.testing import run_ranks

TOPK_OF_ALL = CODECS["topk"](1.0)
#: Codecs, and what of them runs once messages have come.
AFTER_ENCODING = [(BLOCKWISE, "reduce"), (BLOCKWISE, "decode"), (TOPK_OF_ALL, "decode_sum")]


def _failing_steps(rank: int, kind: str, wrapped: str) -> list[tuple[Any, ...]]:
    """Every stage fails, on each rank, in the first and in another bucket."""
    world_size = dist.get_world_size()
    net: nn.Module = model()
    options: dict[str, Any] = {"bucket_cap_mb": 0.005}
    if kind == "ddp":
        net, options = DDP(net, bucket_cap_mb=0.005), {}
    failure = Failure()
    hook: Any = hooks.compressed(Around(BLOCKWISE, failure))
    if wrapped == "policy":
        hook = hooks.policy([("dim <= 1", hooks.allreduce())], hook)
    handle = attach(net, hook, **options)
    for _ in range(2):
        backward(net, rank)
    want, groups = gradients_of(net), gloo_groups()
    happened = []
    for method in ("encode", "reduce", "decode"):
        for fails in range(world_size):
            for bucket in (0, 2):
                if rank == fails:
                    failure.arm(method, bucket)
                try:
                    backward(net, rank)
                    raised = "nothing"
                except Exception as error:
                    raised = f"{type(error).__name__}: {error}"
                armed = failure.method
                backward(net, rank)
                right = all(map(torch.equal, gradients_of(net), want))
                happened.append((method, fails, bucket, raised, armed, right))
    assert gloo_groups() == groups
    buckets = len(handle.stats().buckets)
    handle.remove()
    assert buckets > 2
    return happened


@pytest.mark.parametrize(
    ("world_size", "kind", "wrapped", "long"),
    [
        (2, "ddp", "", False),
        (2, "ddp", "", True),
        (2, "module", "policy", False),
        (3, "module", "", False),
        (3, "module", "", True),
    ],
)
def test_a_codec_that_raises(
    pools: dict[int, RankPool], world_size: int, kind: str, wrapped: str, long: bool
) -> None:
    ranks = pools[world_size].run(as_long, long, _failing_steps, kind, wrapped)
    for rank, happened in enumerate(ranks):
        assert len(happened) == 6 * world_size
        for method, fails, bucket, raised, armed, right in happened:
            where = f"{method} of bucket {bucket} on rank {fails}, seen by {rank}: {raised}"
            if rank == fails:
                assert raised == "OwnError: boo", where
            else:
                assert raised.startswith("PeerError: "), where
                assert re.search(rf"on rank {fails}: .*OwnError: boo", raised, re.S), where
            assert (armed, right) == ("", True), where


def _outcome(future: Any) -> str:
    try:
        return str(future.wait().sum().item())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _fails_alone(rank: int, call: Callable[..., Any], codec: Codec, method: str) -> list[str]:
    """Called directly, where nobody tells the others."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
    failure = Failure()
    around = Around(codec, failure)
    happened = []
    for number in range(4):
        if rank == number == 1:
            failure.arm(method)
        happened.append(_outcome(call(X, around, group=group)))
    dist.destroy_process_group(group)
    return happened


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(
    ("call", "codec", "method"),
    [
        *((compressed_all_reduce, *each) for each in AFTER_ENCODING),
        (compressed_reduce_scatter, TOPK_OF_ALL, "decode_sum"),
        (compressed_all_gather, TOPK_OF_ALL, "decode"),
    ],
)
def test_a_codec_that_raises_outside_of_a_model(
    two_ranks: RankPool, call: Callable[..., Any], codec: Codec, method: str, long: bool
) -> None:
    """Its error keeps its type, also on a thread of the backend."""
    first, second = two_ranks.run(as_long, long, _fails_alone, call, codec, method)
    right = "600.0" if call is compressed_reduce_scatter else "1200.0"
    if method == "reduce":  # what the other rank waits for never comes, nor anything after it
        assert first[0] == second[0] == "1200.0"
        assert second[1:] == ["OwnError: boo"] * 3
        assert all(each.startswith("RuntimeError: ") for each in first[1:])
    else:  # what others need of this rank, it has sent
        assert first == [right] * 4
        assert second == [right, "OwnError: boo", right, right]


@pytest.mark.parametrize("method", ["encode", "reduce", "decode"])
def test_a_codec_that_raises_on_simulated_ranks(method: str) -> None:
    def run(rank: int) -> None:
        failure = Failure()
        if rank == 1:
            failure.arm(method)
        compressed_all_reduce(X, Around(BLOCKWISE, failure)).wait()

    with pytest.raises(OwnError, match="boo"):
        run_ranks(run, 3)


@on_processes
@pytest.mark.parametrize(("codec", "method"), AFTER_ENCODING, ids=repr)
def test_an_interrupt_in_a_callback(rank: int, codec: Codec, method: str) -> None:
    """Reaches the future, or it would never be complete."""
    group = dist.new_group([0, 1])
    failure = Failure()
    failure.arm(method, error=KeyboardInterrupt)
    happened = _outcome(compressed_all_reduce(X, Around(codec, failure), group=group))
    dist.destroy_process_group(group)
    assert happened == "RuntimeError: KeyboardInterrupt: boo"
