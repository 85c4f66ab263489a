"""The global ranks of groups in Python, and what is said of groups that PyTorch does not know.

Managed groups are like torchft's: Futures complete when they are waited for; each rank is rank 0
of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from mode_cases import BUCKET_CAP_MB, batch, module
from on_ranks import on_processes, on_ranks
from rank_pool import RankPool
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch_releases import since

from torch_commhook import GradBucket, ProcessGroup, attach, codecs, collectives, hooks
from torch_commhook.codecs import CODECS
from torch_commhook.collectives.gloo_groups import group_rank
from torch_commhook.process_group import (
    CompressedProcessGroup,
    Delay,
    FaultyProcessGroup,
    Hang,
    RecordingProcessGroup,
    ThrottledProcessGroup,
    WrapperProcessGroup,
    register,
)

AROUND: dict[str, Callable[[Any], Any]] = {
    "a group": RecordingProcessGroup,
    "a wrapper": lambda group: FaultyProcessGroup(WrapperProcessGroup(group), []),
    "a wrapper that is known": lambda group: CompressedProcessGroup(_known(group), torch.bfloat16),
}


def _known(group: Any) -> Any:
    wrapper = WrapperProcessGroup(group)
    register(wrapper, "around")
    return wrapper


@on_ranks(4)
@pytest.mark.parametrize("around", AROUND)
def test_those_of_the_group_inside(rank: int, around: str) -> None:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return
    wrapper = AROUND[around](group)
    register(wrapper, "odd")
    mesh = DeviceMesh.from_group(wrapper, "cpu")
    x = torch.full((2,), float(rank))
    dist.broadcast(x, src=3, group=wrapper)
    assert mesh.mesh.tolist() == dist.get_process_group_ranks(wrapper) == [1, 3]
    assert x.tolist() == [3.0, 3.0]


@pytest.mark.usefixtures("one_rank")
def test_those_that_are_given() -> None:
    made = ProcessGroup(0, 2)
    register(made, "made", ranks=[5, 2])
    around = WrapperProcessGroup(made)
    register(around, "around")
    chosen = WrapperProcessGroup(made)
    register(chosen, "chosen", ranks=[1, 0])
    unknown = WrapperProcessGroup(ProcessGroup(0, 2))
    register(unknown, "unknown")
    groups = (made, around, chosen, unknown)
    ranks = [[5, 2], [5, 2], [1, 0], [0, 1]]
    assert [dist.get_process_group_ranks(group) for group in groups] == ranks
    for group in groups:
        dist.destroy_process_group(group)


@on_ranks(4)
def test_those_that_nobody_knows(rank: int) -> None:
    if rank not in (1, 3):
        return
    made = ProcessGroup(rank // 2, 2)
    for number, group in enumerate((made, WrapperProcessGroup(made))):
        with pytest.raises(ValueError, match="register: ranks must be given") as error:
            register(group, "by hand")
        assert f"it has rank {rank // 2} of 2 on global rank {rank}" in str(error.value)
        register(group, f"by hand {number}", ranks=[1, 3])
        assert dist.get_process_group_ranks(group) == [1, 3]
        dist.destroy_process_group(group)


ASKED: dict[str, Callable[[Any], Any]] = {
    "a mesh": lambda group: DeviceMesh.from_group(group, "cpu"),
    "a mesh of several": lambda group: DeviceMesh.from_group(
        [group, group], "cpu", torch.zeros(1, 1), mesh_dim_names=("a", "b")
    ),
    "ranks": dist.get_process_group_ranks,
    "own rank": dist.get_rank,
    "backend": dist.get_backend,
    "source": lambda group: dist.broadcast(torch.ones(1), src=0, group=group),
    "functional": lambda group: functional.all_reduce(torch.ones(1), "sum", group),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("asked", ASKED)
def test_a_group_that_is_not_registered(asked: str) -> None:
    group = CompressedProcessGroup(dist.group.WORLD, torch.bfloat16)
    named = r"CompressedProcessGroup.*(around group .* of ranks \[0\])?.*process_group\.register"
    with pytest.raises((KeyError, ValueError, RuntimeError), match=named):
        ASKED[asked](group)


@pytest.mark.usefixtures("one_rank")
def test_how_a_group_prints() -> None:
    group = WrapperProcessGroup(dist.group.WORLD)
    world = f"ProcessGroup {dist.group.WORLD.group_name!r} over gloo: rank 0 of 1, global ranks [0]"
    assert repr(group).startswith(f"<WrapperProcessGroup around {world}, which torch.distributed")
    assert "process_group.register(group, name)" in repr(group)
    register(group, "printed")
    assert repr(group) == f"<WrapperProcessGroup 'printed' around {world}>"
    dist.destroy_process_group(group)
    assert "register" in repr(group)


AS_PRINTED: dict[str, Callable[[Any], Any]] = {
    "RecordingProcessGroup": RecordingProcessGroup,
    "ThrottledProcessGroup(bandwidth=2e+08, latency=0.025)": lambda group: ThrottledProcessGroup(
        group, bandwidth=200e6, latency=0.025
    ),
    "CompressedProcessGroup(bfloat16)": CompressedProcessGroup,
    "CompressedProcessGroup(blockwise(bits=4), gathers=fp8())": lambda group: (
        CompressedProcessGroup(group, codecs.blockwise(bits=4), gathers=codecs.fp8())
    ),
    "FaultyProcessGroup(Delay, Hang)": lambda group: FaultyProcessGroup(
        group, [Delay(seconds=0.1), Hang()]
    ),
    "RecordingProcessGroup around CompressedProcessGroup(bfloat16)": lambda group: (
        RecordingProcessGroup(CompressedProcessGroup(group))
    ),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("text", AS_PRINTED)
def test_settings_are_printed(text: str) -> None:
    assert repr(AS_PRINTED[text](dist.group.WORLD)).startswith(f"<{text} around ProcessGroup ")


@on_ranks(3)
def test_how_a_simulated_group_prints(rank: int) -> None:
    own, world = dist.new_group([1, 2]), repr(dist.group.WORLD)
    assert "SimulatedProcessGroup" in world
    assert f": rank {rank} of 3, global ranks [0, 1, 2]>" in world
    assert rank == 0 or f": rank {rank - 1} of 2, global ranks [1, 2]>" in repr(own)


def test_a_group_that_cannot_tell_prints() -> None:
    class Silent(ProcessGroup):
        def size(self) -> int:
            raise RuntimeError("no quorum yet")

    assert "Silent object" in repr(Silent(0, 2))
    many = repr(ProcessGroup(3, 100))
    assert many.startswith("<ProcessGroup: rank 3 of 100, which torch.distributed does not know")


# ---- managed groups ------------------------------------------------------------------------------


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


MANAGED: dict[str, Callable[[Any], Any]] = {
    "Gloo": lambda group: group,
    "managed": ManagedGroup,
    "recorded": lambda group: RecordingProcessGroup(ManagedGroup(group)),
    "wrapping": lambda group: Wrapping(group),
    "wrapped": lambda group: RecordingProcessGroup(Wrapping(group)),
    "registered": lambda group: _placed(ManagedGroup(group)),
    "registered around": lambda group: _placed(RecordingProcessGroup(ManagedGroup(group))),
}


def _placed(group: Any) -> Any:
    register(group, "placed", ranks=[0, 1])
    return group


def _gradients(rank: int, name: str, around: str) -> list[Tensor]:
    handle, found = _steps(rank, HOOKS[name](), MANAGED[around](dist.new_group()))
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
def test_segments_over_a_group_that_does_not_tell_its_rank(
    rank: int, how: str, around: bool
) -> None:
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


def _in_segments(rank: int, how: str) -> list[Tensor]:
    group = MANAGED[how](dist.new_group())
    handle, found = _steps(rank, hooks.error_feedback(hooks.blockwise(8)), group)
    state = handle.state_dict()
    assert f"rank{rank}" in state and state["world_size"] == 2
    handle.remove()
    return found


@pytest.mark.parametrize("how", ["wrapping", "wrapped", "registered", "registered around"])
def test_segments_over_a_group_whose_rank_others_know(two_ranks: RankPool, how: str) -> None:
    want = two_ranks.run(_in_segments, "Gloo")
    got = two_ranks.run(_in_segments, how, timeout=20)
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
    group = MANAGED["registered"](dist.new_group())

    @torch.compile(backend="eager", fullgraph=True)
    def place(x: Tensor) -> Tensor:
        return x + group_rank(group)

    assert [int(place(torch.zeros(()))), group_rank(group), group.rank()] == [rank, rank, 0]
