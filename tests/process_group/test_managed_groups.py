"""Groups like torchft's: Futures complete when they are waited for; each rank is rank 0 of 1."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mode_cases import BUCKET_CAP_MB, batch, module
from on_ranks import on_processes
from rank_pool import RankPool
from torch import Tensor
from torch_releases import since

from torch_commhook import GradBucket, attach, collectives, hooks
from torch_commhook.codecs import CODECS
from torch_commhook.collectives.group_place import group_rank
from torch_commhook.process_group import RecordingProcessGroup, WrapperProcessGroup, register


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
        self.own_name: str | None = None

    def size(self) -> int:
        return self.group.size()

    def getBackendName(self) -> str:  # noqa: N802
        return "managed"

    @property
    def group_name(self) -> str:
        if self.own_name is None:
            raise ValueError("ProcessGroup name not set")
        return self.own_name

    def _set_group_name(self, name: str) -> None:
        self.own_name = name

    def allreduce(self, tensors: list[Tensor], opts: Any) -> ManagedWork:
        return ManagedWork(self.group.allreduce(tensors, opts), tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> ManagedWork:
        return ManagedWork(self.group.broadcast(tensors, opts), tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> ManagedWork:
        return ManagedWork(self.group.allgather(outputs, inputs, opts), outputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> ManagedWork:
        return ManagedWork(self.group.all_gather_single(output, input, opts), output)

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


def _steps(rank: int, hook: Any, group: Any) -> tuple[Any, list[Tensor]]:
    """The hook's handle and the gradients of two steps."""
    model = module()
    handle = attach(model, hook, process_group=group, init_sync=False, bucket_cap_mb=BUCKET_CAP_MB)
    found = []
    for number in range(2):
        model.zero_grad()
        model(batch(rank, number)).square().sum().backward()
        found += [parameter.grad for parameter in model.parameters()]
    return handle, found


def _same(want: list[list[Tensor]], got: list[list[Tensor]]) -> bool:
    return all(
        all(map(torch.equal, plain, managed)) for plain, managed in zip(want, got, strict=True)
    )


AROUND: dict[str, Callable[[Any], Any]] = {
    "Gloo": lambda group: group,
    "managed": ManagedGroup,
    "recorded": lambda group: RecordingProcessGroup(ManagedGroup(group)),
    "wrapping": lambda group: Wrapping(group),
    "wrapped": lambda group: RecordingProcessGroup(Wrapping(group)),
    "registered": lambda group: _registered(ManagedGroup(group)),
    "registered around": lambda group: _registered(RecordingProcessGroup(ManagedGroup(group))),
}


def _registered(group: Any) -> Any:
    register(group, "placed", ranks=[0, 1])
    return group


def _gradients(rank: int, name: str, around: str) -> list[Tensor]:
    handle, found = _steps(rank, HOOKS[name](), AROUND[around](dist.new_group()))
    handle.remove()
    return found


@pytest.mark.parametrize("around", ["managed", "recorded"])
@pytest.mark.parametrize("name", HOOKS)
def test_futures_that_complete_when_they_are_waited_for(
    two_ranks: RankPool, name: str, around: str
) -> None:
    want = two_ranks.run(_gradients, name, "Gloo")
    got = two_ranks.run(_gradients, name, around, timeout=20)
    assert _same(want, got)


@on_processes
@pytest.mark.parametrize("around", [False, True], ids=["itself", "wrapped"])
@pytest.mark.parametrize("how", ["attach", "inside", "compressed", "hierarchical"])
def test_shards_over_a_group_that_does_not_tell_its_rank(rank: int, how: str, around: bool) -> None:
    group: dist.ProcessGroup = ManagedGroup(dist.new_group())
    if around:
        group = RecordingProcessGroup(WrapperProcessGroup(group))
    codec, x = CODECS["blockwise"](8), torch.ones(100)
    hook = hooks.error_feedback(hooks.blockwise(8, process_group=group))
    alone = dist.new_subgroups(1)[0]
    calls: dict[str, Callable[[], Any]] = {
        "attach": lambda: attach(
            module(), hooks.blockwise(8), process_group=group, init_sync=False
        ),
        "inside": lambda: attach(module(), hook),
        "compressed": lambda: collectives.compressed_all_reduce(x, codec, group=group),
        "hierarchical": lambda: collectives.hierarchical_all_reduce(
            x, codec, intra_group=alone, inter_group=group
        ),
    }
    with pytest.raises(ValueError, match="the process group must know its rank") as error:
        calls[how]()
    assert "ManagedGroup has a size() of its own, and no rank()" in str(error.value)


class Wrapping(ManagedGroup):
    """Which of the ranks this is, the group inside knows."""

    @property
    def parent(self) -> dist.ProcessGroup:
        return self.group


def _in_shards(rank: int, how: str) -> list[Tensor]:
    group = AROUND[how](dist.new_group())
    handle, found = _steps(rank, hooks.error_feedback(hooks.blockwise(8)), group)
    state = handle.state_dict()
    assert f"rank{rank}" in state and state["world_size"] == 2
    handle.remove()
    return found


@pytest.mark.parametrize("how", ["wrapping", "wrapped", "registered", "registered around"])
def test_shards_over_a_group_whose_rank_others_know(two_ranks: RankPool, how: str) -> None:
    want = two_ranks.run(_in_shards, "Gloo")
    got = two_ranks.run(_in_shards, how, timeout=20)
    assert _same(want, got)


@on_processes
def test_cpp_and_a_size_that_it_does_not_see(rank: int) -> None:
    """Parameters go to all ranks; a hook in C++ is refused."""
    model = module()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank)
    group = Wrapping(dist.new_group())
    with pytest.raises(ValueError, match=r"C\+\+ does not see it") as refused:
        attach(model, hooks.cpp("allreduce"), process_group=group, init_sync=False)
    assert "Wrapping, because Python overrides" in str(refused.value)
    attach(model, hooks.allreduce(), process_group=group).remove()
    assert not any(parameter.any() for parameter in model.parameters())


class Growing(dist.ProcessGroup):
    """Has one more rank each time that it is asked."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.ranks = 0

    def size(self) -> int:
        self.ranks += 1
        return self.ranks


def test_a_wrapper_of_a_group_whose_ranks_change() -> None:
    group = RecordingProcessGroup(Growing())  # which has asked twice
    assert [group.size(), dist.ProcessGroup.size(group), group.size()] == [3, 4, 5]


@on_processes
@since("2.12")
def test_a_rank_that_a_compiler_asks_for(rank: int) -> None:
    group = AROUND["registered"](dist.new_group())

    @torch.compile(backend="eager", fullgraph=True)
    def place(x: Tensor) -> Tensor:
        return x + group_rank(group)

    assert [int(place(torch.zeros(()))), group_rank(group), group.rank()] == [rank, rank, 0]
