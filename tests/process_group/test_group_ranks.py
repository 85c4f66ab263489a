"""The global ranks of groups in Python, and what is said of groups that PyTorch does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
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
from torch_commhook.testing import run_ranks

AROUND: dict[str, Callable[[Any], Any]] = {
    "a group": RecordingProcessGroup,
    "a wrapper": lambda group: FaultyProcessGroup(WrapperProcessGroup(group), []),
    "a wrapper that is known": lambda group: CompressedProcessGroup(_known(group), torch.bfloat16),
}


def _known(group: Any) -> Any:
    wrapper = WrapperProcessGroup(group)
    register(wrapper, "around")
    return wrapper


def _mesh_of_odd_ranks(rank: int, around: str) -> tuple[list[int], list[int], list[float]] | None:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    wrapper = AROUND[around](group)
    register(wrapper, "odd")
    mesh = DeviceMesh.from_group(wrapper, "cpu")
    x = torch.full((2,), float(rank))
    dist.broadcast(x, src=3, group=wrapper)
    return mesh.mesh.tolist(), dist.get_process_group_ranks(wrapper), x.tolist()


@pytest.mark.parametrize("around", AROUND)
def test_those_of_the_group_inside(around: str) -> None:
    for found in run_ranks(_mesh_of_odd_ranks, 4, around)[1::2]:
        assert found == ([1, 3], [1, 3], [3.0, 3.0])


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


def _by_hand(rank: int) -> list[str]:
    if rank not in (1, 3):
        return []
    said = []
    made = ProcessGroup(rank // 2, 2)
    for group in (made, WrapperProcessGroup(made)):
        with pytest.raises(ValueError, match="register: ranks must be given") as error:
            register(group, "by hand")
        said.append(str(error.value))
        register(group, f"by hand {len(said)}", ranks=[1, 3])
        assert dist.get_process_group_ranks(group) == [1, 3]
        dist.destroy_process_group(group)
    return said


def test_those_that_nobody_knows() -> None:
    for place, found in enumerate(run_ranks(_by_hand, 4)[1::2]):
        assert len(found) == 2
        for said in found:
            assert f"it has rank {place} of 2 on global rank {2 * place + 1}" in said


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


def test_how_a_simulated_group_prints() -> None:
    def printed(rank: int) -> list[str]:
        own = dist.new_group([1, 2])
        world = repr(dist.group.WORLD)
        return [world, repr(own)] if rank in (1, 2) else [world]

    for rank, found in enumerate(run_ranks(printed, 3)):
        assert "SimulatedProcessGroup" in found[0]
        assert f": rank {rank} of 3, global ranks [0, 1, 2]>" in found[0]
        if len(found) > 1:
            assert f": rank {rank - 1} of 2, global ranks [1, 2]>" in found[1]


def test_a_group_that_cannot_tell_prints() -> None:
    class Silent(ProcessGroup):
        def size(self) -> int:
            raise RuntimeError("no quorum yet")

    assert "Silent object" in repr(Silent(0, 2))
    many = repr(ProcessGroup(3, 100))
    assert many.startswith("<ProcessGroup: rank 3 of 100, which torch.distributed does not know")
