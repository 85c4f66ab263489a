"""The global ranks of groups in Python, and what is said of groups that PyTorch does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from on_ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh

from torch_commhook import ProcessGroup, codecs
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
