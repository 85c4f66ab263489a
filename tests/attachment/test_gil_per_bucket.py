"""What DDP takes of the GIL for each bucket, alone and with PyTorch's own hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from gil_per_bucket import NOISE, GilCallsPerBucket, ddp_alone, gil_calls_per_bucket
from rank_pool import RankPool
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.usefixtures("gil_counter")


def _hook_in_python(net: nn.Module, bucket_cap_mb: float) -> DDP:
    model = ddp_alone(net, bucket_cap_mb)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return model


def _hook_in_cpp(net: nn.Module, bucket_cap_mb: float) -> DDP:
    model = ddp_alone(net, bucket_cap_mb)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return model


def _measure(
    rank: int, *makers: Callable[[nn.Module, float], DDP]
) -> tuple[GilCallsPerBucket, ...]:
    return tuple(gil_calls_per_bucket(maker) for maker in makers)


@pytest.fixture(scope="module")
def two_ranks_without_recorder() -> Iterator[RankPool]:
    """Ranks on which the flight recorder takes no stack trace of each collective."""
    pool = RankPool(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_BUFFER_SIZE", "0")  # read once, by each process
        pool.run(_nothing)
    yield pool
    pool.stop()


def _nothing(rank: int) -> None:
    pass


def test_hooks_in_python_and_in_cpp(two_ranks: RankPool) -> None:
    for ddp, python, cpp in two_ranks.run(_measure, ddp_alone, _hook_in_python, _hook_in_cpp):
        assert python.per_bucket >= ddp.per_bucket + 1
        assert abs(cpp.per_bucket - ddp.per_bucket) < NOISE, cpp


def test_without_the_recorder_ddp_takes_nothing(two_ranks_without_recorder: RankPool) -> None:
    makers = (ddp_alone, _hook_in_python, _hook_in_cpp)
    for ddp, python, cpp in two_ranks_without_recorder.run(_measure, *makers):
        assert abs(ddp.per_bucket) < NOISE, ddp
        assert python.per_bucket >= 1
        assert abs(cpp.per_bucket) < NOISE, cpp
