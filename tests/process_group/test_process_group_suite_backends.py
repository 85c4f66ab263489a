"""PyTorch's tests of backends in Python, and of groups of several ranks, on classes of ours."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_doubles import (
    TORCH,
    CoalescingGroup,
    MarkingGroup,
    around_gloo,
    default_group,
    registered,
)
from on_ranks import of_all_ranks, on_processes
from torch.distributed import distributed_c10d

from torch_commhook.process_group import WrapperProcessGroup, register

SEVEN = torch.full((2, 2), 7.0)


# ---- the registry --------------------------------------------------------------------------------


def test_the_name_of_a_group() -> None:
    group = MarkingGroup(None, 0, 1)
    assert group.name() == dist.ProcessGroup.name(group) == "marking"


def test_what_the_registry_has() -> None:
    known: Any = dist.Backend
    assert not dist.is_backend_available("own_backend")
    with registered(MarkingGroup, "own_backend"):
        assert known.OWN_BACKEND == "own_backend"
        assert dist.is_backend_available("own_backend")
        made = known._plugins["OWN_BACKEND"].creator_fn(
            dist.HashStore(), 1, 3, timedelta(seconds=1)
        )
        assert isinstance(made, MarkingGroup)
        assert (made.rank(), made.size()) == (1, 3)
    assert not dist.is_backend_available("own_backend")


@pytest.mark.parametrize("devices", [["own_device"], ("own_device",), "own_device"], ids=repr)
def test_the_devices_of_a_backend(devices: Any) -> None:
    before = dict(dist.Backend.default_device_backend_map)
    with registered(MarkingGroup, "own_backend", devices=devices):
        assert dist.Backend.backend_capability["own_backend"] == ["own_device"]
        now = {**before, "own_device": "own_backend"}
        assert dist.Backend.default_device_backend_map == now
    assert dist.Backend.default_device_backend_map == before


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("own_backend", "cpu:own_backend,cuda:own_backend"),
        ("OWN_BACKEND", "cpu:own_backend,cuda:own_backend"),
        ("cpu:own_backend,cuda:own_backend", "cpu:own_backend,cuda:own_backend"),
        ("cpu:own_backend,cuda:nccl", "cpu:own_backend,cuda:nccl"),
        ("cpu:gloo,cuda:own_backend", "cpu:gloo,cuda:own_backend"),
    ],
)
def test_backends_by_device(asked: str, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The newest torch leaves out devices of which there is none.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with registered(MarkingGroup, "own_backend"):
        config: Any = dist.BackendConfig(asked)  # type: ignore[arg-type]
        assert str(config) == given


@pytest.mark.parametrize(
    "asked", ["cpu:gloo,cuda:own_backend,", "cpu:gloo,cuda:own_backend,cpu:own_backend"]
)
def test_backends_by_device_that_are_wrong(asked: str) -> None:
    with registered(MarkingGroup, "own_backend"), pytest.raises(ValueError):
        dist.BackendConfig(asked)  # type: ignore[arg-type]


# ---- the default group ---------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, "cpu:own_backend,cuda:own_backend"])
def test_collectives_of_the_default_group(asked: str | None) -> None:
    with default_group(MarkingGroup, asked=asked) as group:
        assert isinstance(group, MarkingGroup)
        outputs = [torch.zeros(2, 2) for _ in range(2)]
        dist.all_gather(outputs, SEVEN)
        assert all(torch.equal(output, SEVEN) for output in outputs)
        x = SEVEN.clone()
        dist.all_reduce(x)
        assert torch.equal(x, SEVEN + 2)
        x = SEVEN.clone()
        work = dist.broadcast(x, 0, async_op=True)
        assert work is not None and work.wait()
        assert torch.equal(x, SEVEN + 1)
        output = torch.zeros(2, 2)
        dist.reduce_scatter(output, [SEVEN, SEVEN + 1])
        assert torch.equal(output, SEVEN)
        dist.barrier()
        expected = ["allgather", "allreduce", "broadcast", "reduce_scatter", "barrier"]
        assert group.called == expected


def test_send_and_recv_of_the_default_group() -> None:
    with default_group(MarkingGroup):
        x = torch.zeros(2)
        dist.send(x, 1)
        assert x.tolist() == [4, 4]
        for options in ({"dst": 0}, {"group_dst": 0}, {"dst": 0, "group_dst": 0}, {}):
            with pytest.raises(ValueError):
                dist.send(x, **options)
        x = torch.zeros(2)
        assert dist.recv(x, 1) == 1
        assert x.tolist() == [5, 5]
        with pytest.raises(ValueError):
            dist.recv(x, src=0, group_src=0)


def _around(kind: Any) -> Any:
    return lambda store, rank, size: WrapperProcessGroup(kind(store, rank, size))


@pytest.mark.parametrize("make", [MarkingGroup, _around(MarkingGroup)], ids=["plain", "wrapped"])
def test_it_is_shut_down(make: Any) -> None:
    with default_group(make) as group:
        marking = getattr(group, "parent", group)
        assert not marking.was_shut_down
        dist.destroy_process_group()
        assert marking.was_shut_down


class WithItsBackend(MarkingGroup):
    """Says that it is its own backend."""

    def get_backend(self, device: torch.device) -> Any:
        return self

    _get_backend = get_backend


@pytest.mark.parametrize(
    "make",
    [MarkingGroup, WithItsBackend, _around(MarkingGroup)],
    ids=["plain", "with its backend", "wrapped"],
)
def test_it_is_aborted(make: Any) -> None:
    with default_group(make) as group:
        distributed_c10d._abort_process_group()
        assert getattr(group, "parent", group).was_aborted
        assert not dist.is_initialized()


def test_the_implementation_of_the_backend() -> None:
    if not hasattr(dist, "get_backend_impl"):
        pytest.skip("this torch cannot be asked")
    functions: Any = dist
    with default_group(WithItsBackend) as group:
        cpu = torch.device("cpu")
        for backend in (
            functions.get_backend_impl(),
            functions.get_backend_impl(device=cpu),
            functions.get_backend_impl(str(group.group_name)),
            group.get_backend(cpu),
        ):
            assert backend is group


def test_ranks_of_a_group_that_is_larger_than_the_default_one() -> None:
    canonicalize = distributed_c10d._canonicalize_group_rank
    with default_group(MarkingGroup):
        group = MarkingGroup(None, 0, 124)
        assert canonicalize(group, group_rank=123, return_global=False) == 123
        assert canonicalize(group, global_rank=0, return_global=True) == 0
        with pytest.raises(ValueError, match="is not registered"):
            canonicalize(group, group_rank=123, return_global=True)
        register(group, "larger", ranks=range(1000, 1124))
        assert canonicalize(group, group_rank=123, return_global=True) == 1123


@pytest.mark.parametrize("backend", [None, "cpu:own_backend,cuda:own_backend"])
@pytest.mark.parametrize("member", [True, False])
def test_new_group_asks_the_default_group(backend: str | None, member: bool) -> None:
    asked: list[Any] = []

    class Own(MarkingGroup):
        def new_group(self, ranks: list[int], **options: Any) -> Any:
            asked.append((list(ranks), options.get("backend", "not told")))
            return MarkingGroup(None, 0, len(ranks)) if member else None

    with default_group(Own):
        group = dist.new_group([0], backend=backend)
        if not asked:
            pytest.skip("this torch does not ask")
        ((ranks, told),) = asked
        assert ranks == [0]
        assert told in ("not told", backend or "own_backend")
        if not member:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            return
        assert isinstance(group, MarkingGroup)
        x = torch.zeros(2)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2, 2]


# ---- batches of sends ----------------------------------------------------------------------------


def _batch() -> tuple[list[Any], torch.Tensor, torch.Tensor]:
    sent, received = torch.zeros(2), torch.zeros(2)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, 1), dist.P2POp(dist.irecv, received, 1)]
    )
    for work in works:
        work.wait()
    return works, sent, received


@pytest.mark.parametrize(
    "make", [WithItsBackend, _around(WithItsBackend)], ids=["plain", "wrapped"]
)
def test_a_batch_is_sent_one_by_one(make: Any) -> None:
    with default_group(make) as group:
        works, sent, received = _batch()
        assert (sent.tolist(), received.tolist()) == ([4, 4], [5, 5])
        assert getattr(group, "parent", group).called == ["send", "recv"]
        assert len(works) == 2


class CoalescingBackend(CoalescingGroup):
    """Says that it is its own backend, which coalesces."""

    get_backend = _get_backend = WithItsBackend.get_backend


@pytest.mark.skipif(TORCH < (2, 14), reason="this torch coalesces on its own groups alone")
def test_a_batch_is_coalesced() -> None:
    with default_group(CoalescingBackend) as group:
        works, sent, received = _batch()
        assert (sent.tolist(), received.tolist()) == ([4, 4], [5, 5])
        assert (group.started, group.ended, len(works)) == (1, 1, 1)


# ---- around Gloo, one rank -----------------------------------------------------------------------


def test_groups_of_each_backend() -> None:
    makes: dict[str, Any] = {"own_backend": MarkingGroup, "around_gloo": around_gloo}
    for backend, name in (("own_backend", "marking"), ("around_gloo", "custom")):
        with default_group(makes[backend], backend, size=1) as group:
            assert (group.rank(), group.size(), group.name()) == (0, 1, name)
            assert dist.get_backend() == backend


def test_a_rank_alone_around_gloo() -> None:
    x = torch.zeros(2, 2)
    calls: list[Callable[[], Any]] = [
        lambda: dist.reduce(x, 0),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_reduce(x),
        lambda: dist.all_gather([x], x),
        lambda: dist.barrier(),
        lambda: dist.scatter(x, [x]),
        lambda: dist.gather(x, [x]),
    ]
    with default_group(around_gloo, size=1) as group:
        assert isinstance(group, WrapperProcessGroup)
        for call in calls:
            call()
        ones = [torch.ones(10, 10)]
        dist.all_reduce_coalesced(ones, dist.ReduceOp.SUM)
        assert ones[0].eq(1).all()
        output = torch.zeros(2, 2)
        dist.all_to_all_single(output, torch.ones(2, 2))
        assert output.eq(1).all()
        with pytest.raises(ValueError, match="Tensors must be contiguous"):
            dist.all_to_all_single(output, torch.ones(2, 2).t())


@pytest.mark.skipif(TORCH < (2, 14), reason="this torch has it for the name `gloo` alone")
def test_a_monitored_barrier_around_gloo() -> None:
    with default_group(around_gloo, size=1):
        dist.monitored_barrier()


# ---- several ranks -------------------------------------------------------------------------------


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
