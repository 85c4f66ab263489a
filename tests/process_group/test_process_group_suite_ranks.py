"""PyTorch's tests of groups of several ranks, on wrappers around Gloo that ``new_group`` makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_doubles import MarkingGroup, around_gloo
from rank_pool import RankPool

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


def _message(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


# ---- sequence numbers ----------------------------------------------------------------------------


def _sequence(rank: int) -> list[int]:
    group = _new_group()
    numbers = [group._get_sequence_number_for_group()]
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)
        numbers.append(group._get_sequence_number_for_group())
    return numbers


def test_each_collective_counts(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_sequence)
    assert first == second == list(range(first[0], first[0] + 4))


# ---- members -------------------------------------------------------------------------------------


def _members(rank: int) -> tuple[list[int], list[str]] | None:
    """Only a member knows the ranks of a group."""
    group = _new_group([1])
    if rank == 0:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        return None
    ours: Any = MarkingGroup(None, 0, 2)
    found = [dist.get_group_rank(group, 1), dist.get_global_rank(group, 0)]
    messages = [
        _message(ValueError, lambda: dist.get_group_rank(group, 0)),
        _message(ValueError, lambda: dist.get_global_rank(group, 1)),
        _message(ValueError, lambda: dist.get_group_rank(ours, 0)),
        _message(ValueError, lambda: dist.get_global_rank(ours, 0)),
    ]
    return [*found, *dist.get_process_group_ranks(group)], messages


def test_who_is_in_a_group(two_ranks: RankPool) -> None:
    _, (found, messages) = two_ranks.run(_members)
    assert found == [0, 1, 1]
    assert all("not part of group" in message for message in messages[:2])
    assert all("is not registered" in message for message in messages[2:])


def _outside(rank: int) -> list[str]:
    group: Any = _new_group([0])
    x = torch.zeros(2)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_gather([x], x, group=group),
        lambda: dist.all_reduce(x, group=group),
        lambda: dist.barrier(group=group),
        lambda: dist.broadcast(x, src=0, group=group),
    ]
    warned = []
    for call in calls:
        if rank == 0:
            call()
            continue
        with pytest.warns(UserWarning, match="does not belong to") as warnings:
            call()
        warned += [str(warning.message) for warning in warnings]
    return warned


def test_a_rank_outside_is_warned(two_ranks: RankPool) -> None:
    inside, outside = two_ranks.run(_outside)
    assert inside == []
    assert len(outside) == 4


# ---- making groups -------------------------------------------------------------------------------


def _halves(rank: int) -> list[Any]:
    # All are kept until the last is there: PyTorch would give its name to the next one.
    groups = [
        _new_group(ranks, use_local_synchronization=True)
        for ranks in ([rank], [rank], [0, 1], [1, 0])
    ]
    gathered: list[Any] = []
    for group in groups:
        assert group.rank() == dist.get_process_group_ranks(group).index(rank)
        gathered.append((dist.get_process_group_ranks(group), _gathered(group, rank)))
    for group in groups:
        dist.destroy_process_group(group)
    other = _new_group([1 - rank], use_local_synchronization=True)
    gathered.append(other is dist.GroupMember.NON_GROUP_MEMBER)
    return gathered


def test_groups_made_by_their_members_alone(two_ranks: RankPool) -> None:
    for rank, gathered in enumerate(two_ranks.run(_halves)):
        alone, both = ([rank], [rank]), ([0, 1], [0, 1])
        assert gathered == [alone, alone, both, both, True]


def _ordered(rank: int) -> tuple[list[int], list[int], int]:
    group = _new_group([1, 0], sort_ranks=False)
    return dist.get_process_group_ranks(group), _gathered(group, rank), group.rank()


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch sorts the ranks of a group",
)
def test_the_order_of_ranks(two_ranks: RankPool) -> None:
    found = two_ranks.run(_ordered)
    assert found == [([1, 0], [1, 0], 1), ([1, 0], [1, 0], 0)]


# ---- dtypes --------------------------------------------------------------------------------------


def _mismatches(rank: int) -> list[str]:
    group = _new_group()
    x, half = torch.ones(2, 2), torch.ones(2, 2).half()
    plain, mixed = [torch.zeros(2, 2), torch.zeros(2, 2)], [torch.zeros(2, 2), half]
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_gather(mixed, x, group=group),
        lambda: dist.all_gather(plain, half, group=group),
        lambda: dist.all_reduce_coalesced(mixed, group=group),
        lambda: dist.reduce_scatter(x, mixed, group=group),
        lambda: dist.reduce_scatter(half, plain, group=group),
        lambda: dist.all_to_all_single(half, x, group=group),
        lambda: dist.all_to_all(mixed, plain, group=group),
        lambda: dist.scatter(x, mixed, group=group),
        lambda: dist.gather(half, plain, group=group),
    ]
    return [_message(ValueError, call) for call in calls]


def test_dtypes_that_differ(two_ranks: RankPool) -> None:
    for messages in two_ranks.run(_mismatches):
        assert len(messages) == 9
        assert all("tensors with different dtypes" in message for message in messages)


def _dtypes(rank: int) -> tuple[bool, bool]:
    group = _new_group()
    x = torch.tensor([1 + 2j, 3 - 4j]) * (rank + 1)
    outputs = [torch.zeros_like(x) for _ in range(2)]
    dist.all_gather(outputs, x, group=group)
    complex_ones = torch.equal(outputs[1], 2 * outputs[0]) and bool(outputs[0].imag.all())
    truth = torch.tensor([True, False, True])
    got = truth.clone() if rank == 0 else torch.zeros(3, dtype=torch.bool)
    dist.broadcast(got, src=0, group=group)
    return complex_ones, torch.equal(got, truth)


def test_complex_and_boolean_tensors(two_ranks: RankPool) -> None:
    assert two_ranks.run(_dtypes) == [(True, True)] * 2
