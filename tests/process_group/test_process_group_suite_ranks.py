"""PyTorch's tests of groups of several ranks, on wrappers around Gloo that ``new_group`` makes."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_doubles import MarkingGroup, around_gloo
from on_ranks import of_all_ranks, on_processes

from torch_commhook.process_group import WrapperProcessGroup, register

BACKEND = "around_gloo"


def _new_group(ranks: list[int] | None = None, **options: Any) -> Any:
    if not dist.is_backend_available(BACKEND):
        register(around_gloo, BACKEND)
    group = dist.new_group(ranks, backend=BACKEND, **options)
    if group is None:  # what older releases give to who is no member, with local synchronization
        return dist.GroupMember.NON_GROUP_MEMBER
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        assert isinstance(group, WrapperProcessGroup)
    return group


def _gathered(group: Any, value: int) -> list[int]:
    outputs = [torch.tensor([-1]) for _ in range(group.size())]
    dist.all_gather(outputs, torch.tensor([value]), group=group)
    return [int(output) for output in outputs]


# ---- sequence numbers ----------------------------------------------------------------------------


@on_processes
def test_each_collective_counts(rank: int) -> None:
    group = _new_group()
    first = group._get_sequence_number_for_group()
    for number in range(1, 4):
        dist.all_reduce(torch.ones(1), group=group)
        assert group._get_sequence_number_for_group() == first + number
    assert of_all_ranks(first) == [first, first]


# ---- members -------------------------------------------------------------------------------------


@on_processes
def test_who_is_in_a_group(rank: int) -> None:
    """Only a member knows the ranks of a group."""
    group = _new_group([1])
    if rank == 0:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        return
    ours: Any = MarkingGroup(None, 0, 2)
    assert (dist.get_group_rank(group, 1), dist.get_global_rank(group, 0)) == (0, 1)
    assert dist.get_process_group_ranks(group) == [1]
    for call, each, number, message in (
        (dist.get_group_rank, group, 0, "not part of group"),
        (dist.get_global_rank, group, 1, "not part of group"),
        (dist.get_group_rank, ours, 0, "is not registered"),
        (dist.get_global_rank, ours, 0, "is not registered"),
    ):
        with pytest.raises(ValueError, match=message):
            call(each, number)


@on_processes
def test_a_rank_outside_is_warned(rank: int) -> None:
    group: Any = _new_group([0])
    x = torch.zeros(2)
    for call in (
        lambda: dist.all_gather([x], x, group=group),
        lambda: dist.all_reduce(x, group=group),
        lambda: dist.barrier(group=group),
        lambda: dist.broadcast(x, src=0, group=group),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        warned = [each for each in caught if "does not belong to" in str(each.message)]
        assert [each.category for each in warned] == [UserWarning] * rank


# ---- making groups -------------------------------------------------------------------------------


@on_processes
def test_groups_made_by_their_members_alone(rank: int) -> None:
    # All are kept until the last is there: PyTorch would give its name to the next one.
    groups = [
        _new_group(ranks, use_local_synchronization=True)
        for ranks in ([rank], [rank], [0, 1], [1, 0])
    ]
    for group, ranks in zip(groups, ([rank], [rank], [0, 1], [0, 1]), strict=True):
        assert group.rank() == ranks.index(rank)
        assert dist.get_process_group_ranks(group) == _gathered(group, rank) == ranks
    for group in groups:
        dist.destroy_process_group(group)
    other = _new_group([1 - rank], use_local_synchronization=True)
    assert other is dist.GroupMember.NON_GROUP_MEMBER


@on_processes
@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch sorts the ranks of a group",
)
def test_the_order_of_ranks(rank: int) -> None:
    group = _new_group([1, 0], sort_ranks=False)
    assert dist.get_process_group_ranks(group) == _gathered(group, rank) == [1, 0]
    assert group.rank() == 1 - rank


# ---- dtypes --------------------------------------------------------------------------------------


@on_processes
def test_dtypes_that_differ(rank: int) -> None:
    group = _new_group()
    x, half = torch.ones(2, 2), torch.ones(2, 2).half()
    plain, mixed = [torch.zeros(2, 2), torch.zeros(2, 2)], [torch.zeros(2, 2), half]
    for call, *arguments in (
        (dist.all_gather, mixed, x),
        (dist.all_gather, plain, half),
        (dist.all_reduce_coalesced, mixed),
        (dist.reduce_scatter, x, mixed),
        (dist.reduce_scatter, half, plain),
        (dist.all_to_all_single, half, x),
        (dist.all_to_all, mixed, plain),
        (dist.scatter, x, mixed),
        (dist.gather, half, plain),
    ):
        with pytest.raises(ValueError, match="tensors with different dtypes"):
            call(*arguments, group=group)


@on_processes
def test_complex_and_boolean_tensors(rank: int) -> None:
    group = _new_group()
    x = torch.tensor([1 + 2j, 3 - 4j]) * (rank + 1)
    outputs = [torch.zeros_like(x) for _ in range(2)]
    dist.all_gather(outputs, x, group=group)
    assert torch.equal(outputs[1], 2 * outputs[0]) and outputs[0].imag.all()
    truth = torch.tensor([True, False, True])
    got = truth.clone() if rank == 0 else torch.zeros(3, dtype=torch.bool)
    dist.broadcast(got, src=0, group=group)
    assert torch.equal(got, truth)
