"""Which groups share memory for their compressed sums, and how their ranks agree on it.

The ranks are processes over Gloo. Files that they map stand in for the memory of GPUs.
"""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from symmetric_ranks import CODEC, summed, with_files
from torch import nn

from torch_commhook import _C, PeerError, ProcessGroup, attach, hooks
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.collectives import symmetric
from torch_commhook.collectives.message_buffers import MessageBuffers
from torch_commhook.metrics import WireMeter, counting
from torch_commhook.step.step_group import StepGroup

CUDA = torch.device("cuda", 0)


def _sums_of_buckets(rank: int, folder: str) -> None:
    buffers = MessageBuffers()
    meters = WireMeter(), WireMeter()
    with with_files(rank, folder) as files:
        for numel in (1000, 5000, 300, 5000, 0):
            with counting(meters[0]):
                got = summed(rank, buffers, numel=numel)
            with counting(meters[1]):
                right = summed(rank, numel=numel)
            assert torch.equal(got, right), numel
        assert symmetric.obstacle_of(dist.group.WORLD) == ""
        assert next(files.numbers) == 2  # a message of 5,000 values has outgrown the first
    assert meters[0].bytes_sent == meters[1].bytes_sent > 0
    found = weakref.ref(symmetric._memories[buffers][1])
    del buffers
    gc.collect()
    assert found() is None


def test_buckets_of_several_sizes(three_ranks: RankPool, tmp_path: Path) -> None:
    three_ranks.run(_sums_of_buckets, str(tmp_path))


def _falls_back(rank: int, folder: str, options: list[dict[str, str]], reason: str) -> None:
    group = dist.new_group()
    with with_files(rank, folder, **options[rank]):
        buffers = MessageBuffers()
        for _ in range(2):
            assert torch.equal(summed(rank, buffers, group), summed(rank))
        assert buffers not in symmetric._memories
        assert symmetric.obstacle_of(group) == reason
    dist.destroy_process_group(group)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([{}, {"obstacle": "it is off"}, {}], "rank 1: it is off"),
        ([{}, {}, {"machine": "other"}], "the ranks are on several machines"),
        ([{"gpu": "a"}, {"gpu": "a"}, {}], "several ranks have one GPU"),
        ([{"torch": "1"}, {}, {}], "the ranks have different releases of torch"),
        ([{}, {}, {"link": "no NVLink"}], "rank 2: no NVLink"),
        ([{}, {"fails": "allocate"}, {}], "rank 1: MemoryError: there is none left"),
        ([{"fails": "share"}, {}, {}], "rank 0: RuntimeError: the driver shares nothing"),
    ],
)
def test_one_rank_that_cannot(
    options: list[dict[str, str]], reason: str, three_ranks: RankPool, tmp_path: Path
) -> None:
    """All ranks use collectives, and know why."""
    three_ranks.run(_falls_back, str(tmp_path), options, reason)


def _gives_up(rank: int, folder: str, fails_a_step: bool) -> None:
    group = dist.new_group()
    buffers = [MessageBuffers(), MessageBuffers()]
    step = StepGroup()
    assert step.stand_in(group, CUDA) is group  # as for a group that cannot connect anew

    step.begin()
    with with_files(rank, folder):
        assert all(summed(rank, each, group).isfinite().all() for each in buffers)
        if rank != 1:
            assert all(summed(rank, each, group).isnan().all() for each in buffers)
        elif fails_a_step:
            step.fail("something is wrong here")
        else:
            symmetric.give_up(group)
        for each in buffers:
            with pytest.raises(RuntimeError, match=r"rank [012] of the group did not reach"):
                summed(rank, each, group)
    step.fail("this step has failed")
    dist.destroy_process_group(group)


@pytest.mark.parametrize("fails_a_step", [False, True])
def test_a_rank_that_gives_up(fails_a_step: bool, three_ranks: RankPool, tmp_path: Path) -> None:
    """The others do not wait for it."""
    three_ranks.run(_gives_up, str(tmp_path), fails_a_step)


def _fails_in_its_first_step(rank: int, folder: str, models: int, fails_at: int) -> None:
    group = dist.new_group(timeout=timedelta(hours=1))  # far more than the test has
    nets = [nn.Linear(300, 30) for _ in range(models)]
    own_group = StepGroup.group_for

    def as_of_a_device(self: StepGroup, _device: torch.device) -> dist.ProcessGroup:
        return own_group(self, torch.device("meta"))  # which has no backend of Gloo

    with (
        mock.patch.object(StepGroup, "group_for", as_of_a_device),
        with_files(rank, folder),
    ):
        handles = [attach(net, hooks.blockwise(8), process_group=group) for net in nets]
        if rank == 1:
            handles[fails_at].register_prehook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError if rank == 1 else PeerError, match="division"):
            torch.stack([net(torch.ones(2, 300)).sum() for net in nets]).sum().backward()


@pytest.mark.parametrize(("models", "fails_at"), [(1, 0), (2, 0), (2, 1)])
def test_a_rank_fails_in_its_first_step(
    models: int, fails_at: int, two_ranks: RankPool, tmp_path: Path
) -> None:
    """The others ask it for its memory, and do not wait until the group's timeout."""
    two_ranks.run(_fails_in_its_first_step, str(tmp_path), models, fails_at)


class Group(ProcessGroup):
    """One of Python."""


def _may_share(rank: int) -> None:
    world = dist.group.WORLD

    def may(codec: Codec = CODEC, device: torch.device = CUDA, group: Any = world) -> bool:
        return symmetric._may_share(codec, device, group)

    assert not may()  # Gloo
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        alone = dist.new_group([0]), dist.new_group([1])
    finally:
        dist.set_debug_level(level)
    assert symmetric._sends_through_host(alone[rank], torch.device("cpu"))  # Gloo, wrapped
    compiled = mock.patch.object(
        _C, "has_compiled_backend", lambda group, _: not isinstance(group, Group)
    )
    with compiled, mock.patch.object(symmetric, "_sends_through_host", lambda *_: False):
        assert may()
        assert may(CODECS["sign"]())
        assert not may(CODECS["topk"]())
        assert not may(device=torch.device("cpu"))
        assert not may(group=alone[rank])
        assert not may(group=Group(rank, 2))
    dist.destroy_process_group(alone[rank])


def test_groups_and_codecs_that_may(two_ranks: RankPool) -> None:
    two_ranks.run(_may_share)


def test_where_this_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    place = symmetric._own_place(torch.device("cpu"))
    assert place.machine
    if not torch.ops.commhook.has_cuda_kernels():
        assert place.obstacle == "torch_commhook was built without CUDA kernels"
    monkeypatch.setenv("COMMHOOK_SYMMETRIC_MEMORY", "0")
    assert symmetric._own_place(CUDA).obstacle == "COMMHOOK_SYMMETRIC_MEMORY is 0"


def test_links(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = ["a", "b", "c"]

    class Properties:
        def __init__(self, index: int) -> None:
            self.uuid = gpus[index]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: other != 2)
    monkeypatch.setattr(symmetric, "_nvlinks", lambda: None)
    assert symmetric._missing_link(CUDA, ["a", "b"]) == ""
    assert symmetric._missing_link(CUDA, ["a", "one that is not visible here"]) == ""
    assert symmetric._missing_link(CUDA, gpus) == "GPU 0 cannot read the memory of GPU 2"
    monkeypatch.setattr(symmetric, "_nvlinks", lambda: [[0, 0, 4]] * 3)
    assert symmetric._missing_link(CUDA, ["a", "b"]) == "there is no NVLink between GPU 0 and GPU 1"
