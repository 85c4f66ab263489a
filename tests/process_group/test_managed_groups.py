"""Groups like torchft's: Futures complete when they are waited for; each rank is rank 0 of 1."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mode_cases import batch, module
from modes import BUCKET_CAP_MB
from rank_pool import RankPool
from torch import Tensor

from torch_commhook import GradBucket, attach, collectives, hooks
from torch_commhook.codecs import CODECS
from torch_commhook.process_group import RecordingProcessGroup


class ManagedFuture(torch.futures.Future):
    """Callbacks run when the Work is waited for; of itself it never completes."""

    def __init__(self, work: ManagedWork) -> None:
        super().__init__()
        self.work = work

    def wait(self) -> Any:
        assert self.work.is_over, "the Work must have been waited for"
        return self.work.value

    def then(self, callback: Any) -> Any:
        self.work.callbacks.append(callback)
        return self


class ManagedWork(dist._Work):
    """Over another Work."""

    def __init__(self, work: Any, value: Any) -> None:
        super().__init__()
        self.work, self.value = work, value
        self.callbacks: list[Any] = []
        self.is_over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.work.wait()
        self.is_over = True
        for callback in self.callbacks:
            self.value = callback(self)
        return True

    def get_future(self) -> Any:
        return ManagedFuture(self)


class ManagedGroup(dist.ProcessGroup):
    """Over another group; it knows its size alone."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(0, 1)
        self.group = group

    def size(self) -> int:
        return self.group.size()

    def getBackendName(self) -> str:  # noqa: N802
        return "managed"

    @property
    def group_name(self) -> str:
        raise ValueError("ProcessGroup name not set")

    def allreduce(self, tensors: list[Tensor], opts: Any) -> ManagedWork:
        return ManagedWork(self.group.allreduce(tensors, opts), tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> ManagedWork:
        return ManagedWork(self.group.broadcast(tensors, opts), tensors)

    def alltoall_base(self, output: Tensor, input: Tensor, *args: Any) -> ManagedWork:
        return ManagedWork(self.group.alltoall_base(output, input, *args), output)


def of_torch_style(state: object, bucket: GradBucket) -> Any:
    """Waits for the Work, as torchft's own hook, and gives its Future."""
    group = bucket.process_group()
    work = group.allreduce([bucket.buffer().div_(group.size())], dist.AllreduceOptions())
    work.wait()
    return work.get_future()


HOOKS = {
    "allreduce": hooks.allreduce,
    "cast": hooks.cast,
    "powersgd": lambda: hooks.powersgd(2),
    "randomk": lambda: hooks.randomk(0.2),
    "torch's style": lambda: of_torch_style,
}


def _gradients(rank: int, name: str, around: str) -> list[Tensor]:
    group: Any = dist.new_group()
    if around != "Gloo":
        group = ManagedGroup(group)
    if around == "recorded":
        group = RecordingProcessGroup(group)
    model = module()
    handle = attach(
        model, HOOKS[name](), process_group=group, init_sync=False, bucket_cap_mb=BUCKET_CAP_MB
    )
    for number in range(2):
        model.zero_grad()
        model(batch(rank, number)).square().sum().backward()
    handle.remove()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("around", ["managed", "recorded"])
@pytest.mark.parametrize("name", HOOKS)
def test_futures_that_complete_when_they_are_waited_for(
    two_ranks: RankPool, name: str, around: str
) -> None:
    want = two_ranks.run(_gradients, name, "Gloo")
    got = two_ranks.run(_gradients, name, around, timeout=20)
    for plain, managed in zip(want, got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, managed, strict=True))


def _shards(rank: int, how: str) -> str:
    group = ManagedGroup(dist.new_group())
    codec = CODECS["blockwise"](8)
    with pytest.raises(ValueError, match="the process group must tell its rank") as error:
        if how == "attach":
            attach(module(), hooks.blockwise(8), process_group=group, init_sync=False)
        elif how == "inside":
            hook = hooks.error_feedback(hooks.blockwise(8, process_group=group))
            attach(module(), hook)
        elif how == "compressed":
            collectives.compressed_all_reduce(torch.ones(100), codec, group=group)
        else:
            alone = dist.new_subgroups(1)[0]
            collectives.hierarchical_all_reduce(
                torch.ones(100), codec, intra_group=alone, inter_group=group
            )
    return str(error.value)


@pytest.mark.parametrize("how", ["attach", "inside", "compressed", "hierarchical"])
def test_shards_over_a_group_that_does_not_tell_its_rank(two_ranks: RankPool, how: str) -> None:
    for said in two_ranks.run(_shards, how, timeout=20):
        assert "ManagedGroup has a size() of its own, and no rank()" in said
