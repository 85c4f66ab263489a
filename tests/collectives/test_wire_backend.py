"""The backend "commhook": each collective against plain computations; errors, and their ends."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gloo_threads import in_threads
from torch import Tensor, nn
from torch._C import _distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from wire_ranks import StoreOfRank, Way, WireRanks, through

from torch_commhook import _C
from torch_commhook.collectives import wire

#: Ranks up to 16 send each other messages directly.
SIZES = [1, 2, 3, 5, 20]
#: Of elements. The largest takes more than one round, or a ring.
NUMELS = [0, 1, 10, 90_001]
OPS = dist.ReduceOp
DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], WireRanks]]:
    """The ranks that tests without errors share, by their number."""
    made: dict[int, WireRanks] = {}

    def world(size: int) -> WireRanks:
        if size not in made:
            made[size] = WireRanks(size)
        return made[size]

    yield world
    for each in made.values():
        each.close()


@pytest.fixture
def fresh() -> Iterator[Callable[..., WireRanks]]:
    """Makes ranks that may fail."""
    made: list[WireRanks] = []

    def make(size: int, **options: Any) -> WireRanks:
        made.append(WireRanks(size, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers: their sums are exact in each dtype."""
    return ((torch.arange(numel) * 7 + 3 * rank) % 5).to(dtype)


def _options(kind: str, **values: Any) -> Any:
    options = getattr(_distributed_c10d, f"{kind}Options")()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _reduced(inputs: list[Tensor], op: OPS.RedOpType) -> Tensor:
    functions: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
        OPS.SUM: torch.add, OPS.AVG: torch.add, OPS.PRODUCT: torch.mul,
        OPS.MIN: torch.minimum, OPS.MAX: torch.maximum, OPS.BAND: torch.bitwise_and,
        OPS.BOR: torch.bitwise_or, OPS.BXOR: torch.bitwise_xor,
    }  # fmt: skip
    result = inputs[0].clone()
    for each in inputs[1:]:
        result = functions[op](result, each)
    if op == OPS.AVG:
        rounding = None if result.is_floating_point() or result.is_complex() else "trunc"
        result = torch.div(result, len(inputs), rounding_mode=rounding)
    return result


# ---- collectives: (rank, size, numel, group) -> (what the rank has got, what it should) ----------


def _broadcast(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    root, x = size // 2, _values(rank, numel)
    group.broadcast([x], _options("Broadcast", rootRank=root)).wait()
    return [x], [_values(root, numel)]


def _allreduce(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    x = _values(rank, numel)
    group.allreduce([x], _options("Allreduce")).wait()
    return [x], [_reduced([_values(r, numel) for r in range(size)], OPS.SUM)]


def _allreduce_coalesced(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    x = [_values(rank, numel), _values(rank + 1, 6).view(2, 3).t()]
    group.allreduce_coalesced(x, _options("AllreduceCoalesced")).wait()
    want = [
        _reduced([_values(r, numel) for r in range(size)], OPS.SUM),
        _reduced([_values(r + 1, 6) for r in range(size)], OPS.SUM).view(2, 3).t(),
    ]
    return x, want


def _reduce(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    root, x = size - 1, _values(rank, numel)
    group.reduce([x], _options("Reduce", rootRank=root)).wait()
    all_ranks = _reduced([_values(r, numel) for r in range(size)], OPS.SUM)
    return [x], [all_ranks if rank == root else _values(rank, numel)]


def _allgather(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    x = [torch.empty(numel) for _ in range(size)]
    group.allgather([x], [_values(rank, numel)]).wait()
    return x, [_values(r, numel) for r in range(size)]


def _allgather_base(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    x = torch.empty(size, numel)
    group._allgather_base(x, _values(rank, numel)).wait()
    return [x], [torch.stack([_values(r, numel) for r in range(size)])]


def _allgather_coalesced(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    x = [[torch.empty(numel), torch.empty(3)] for _ in range(size)]
    group.allgather_coalesced(x, [_values(rank, numel), _values(rank + 1, 3)]).wait()
    want = [[_values(r, numel), _values(r + 1, 3)] for r in range(size)]
    return [t for each in x for t in each], [t for each in want for t in each]


def _allgather_into_tensors(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    x = [torch.empty(size * numel), torch.empty(size * 3, dtype=torch.int64)]
    inputs = [_values(rank, numel), _values(rank + 1, 3, torch.int64)]
    group.allgather_into_tensor_coalesced(x, inputs).wait()
    want = [
        torch.cat([_values(r, numel) for r in range(size)]),
        torch.cat([_values(r + 1, 3, torch.int64) for r in range(size)]),
    ]
    return x, want


def _gather(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    root = size // 2
    x = [torch.empty(numel) for _ in range(size)] if rank == root else []
    group.gather([x] if x else [], [_values(rank, numel)], _options("Gather", rootRank=root)).wait()
    return x, [_values(r, numel) for r in range(size)] if rank == root else []


def _scatter(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    root, x = size - 1, torch.empty(numel)
    sent = [[_values(r, numel) for r in range(size)]] if rank == root else []
    group.scatter([x], sent, _options("Scatter", rootRank=root)).wait()
    return [x], [_values(rank, numel)]


def _reduce_scatter(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    x, inputs = torch.empty(numel), [_values(rank + part, numel) for part in range(size)]
    group.reduce_scatter([x], [inputs]).wait()
    want = _reduced([_values(r + rank, numel) for r in range(size)], OPS.SUM)
    same = [_values(rank + part, numel) for part in range(size)]
    return [x, *inputs], [want, *same]


def _reduce_scatter_base(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    x = torch.empty(numel)
    inputs = torch.cat([_values(rank + part, numel) for part in range(size)])
    group._reduce_scatter_base(x, inputs.clone()).wait()
    return [x], [_reduced([_values(r + rank, numel) for r in range(size)], OPS.SUM)]


def _reduce_scatter_coalesced(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    x = [torch.empty(numel), torch.empty(2)]
    inputs = [torch.cat([_values(rank + part, each.numel()) for part in range(size)]) for each in x]
    group.reduce_scatter_tensor_coalesced(x, inputs).wait()
    return x, [_reduced([_values(r + rank, t.numel()) for r in range(size)], OPS.SUM) for t in x]


def _alltoall(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    """To rank r: r more elements than to rank 0."""
    x = [torch.empty(numel + rank) for _ in range(size)]
    group.alltoall(x, [_values(rank, numel + r) for r in range(size)]).wait()
    return x, [_values(r, numel + rank) for r in range(size)]


def _alltoall_base(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    x, sent = torch.empty(size * 2, numel), _values(rank, 2 * size * numel).view(size * 2, numel)
    group.alltoall_base(x, sent, [], []).wait()
    parts = [_values(r, 2 * size * numel).view(size, 2, numel)[rank] for r in range(size)]
    return [x], [torch.cat(parts)]


def _alltoall_splits(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    """Rank s sends rank r: s + r rows of two elements."""
    sends = [rank + r for r in range(size)]
    x = torch.empty(sum(sends), 2)
    group.alltoall_base(x, _values(rank, 2 * sum(sends)).view(-1, 2), sends, sends).wait()
    want = []
    for r in range(size):
        rows = _values(r, 2 * sum(r + s for s in range(size))).view(-1, 2)
        begin = sum(r + s for s in range(rank))
        want.append(rows[begin : begin + r + rank])
    return [x], [torch.cat(want)]


def _messages(rank: int, size: int, numel: int, group: Any) -> tuple[Any, Any]:
    """To the next rank: of two tags, the second one first; of a tag, in order."""
    after, before = (rank + 1) % size, (rank - 1) % size
    if size == 1:
        return [], []
    works = [group.send([_values(rank + i, numel)], after, tag) for i, tag in enumerate([5, 4, 5])]
    x = [torch.empty(numel) for _ in range(3)]
    for i in (1, 0, 2):
        work = group.recv([x[i]], before, 4 if i == 1 else 5)
        work.wait()
        assert work._source_rank() == before
    for work in works:
        work.wait()
    return x, [_values(before + i, numel) for i in range(3)]


CASES = [
    _broadcast, _allreduce, _allreduce_coalesced, _reduce, _allgather, _allgather_base,
    _allgather_coalesced, _allgather_into_tensors, _gather, _scatter, _reduce_scatter,
    _reduce_scatter_base, _reduce_scatter_coalesced, _alltoall, _alltoall_base, _alltoall_splits,
    _messages,
]  # fmt: skip
#: With parts for each rank, from each rank.
LARGE = [_alltoall, _alltoall_base, _reduce_scatter, _reduce_scatter_base,
         _reduce_scatter_coalesced, _allgather_coalesced, _allgather_into_tensors]  # fmt: skip


def _assert_equal(found: list[Tensor], want: list[Tensor]) -> None:
    assert len(found) == len(want)
    for one, other in zip(found, want, strict=True):
        assert one.shape == other.shape and torch.equal(one, other), (one, other)


def _run(case: Any, world: WireRanks, numel: int, rank: int) -> tuple[Any, Any]:
    return case(rank, world.size, numel, world.groups[rank])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_collectives(worlds: Callable[[int], WireRanks], case: Any, size: int) -> None:
    world = worlds(size)
    # From all to all, the largest would be 300 MB.
    for numel in NUMELS if size < 20 or case not in LARGE else NUMELS[:-1]:
        found = world.each(functools.partial(_run, case, world, numel))
        for got, want in found:
            _assert_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [3, 20])
def test_dtypes_and_operations(
    worlds: Callable[[int], WireRanks], size: int, dtype: torch.dtype
) -> None:
    world = worlds(size)
    ops = [OPS.SUM, OPS.PRODUCT]
    if dtype != torch.bool:
        ops.append(OPS.AVG)
    if not dtype.is_complex:
        ops += [OPS.MIN, OPS.MAX]
        if not dtype.is_floating_point:
            ops += [OPS.BAND, OPS.BOR, OPS.BXOR]

    def run(rank: int) -> None:
        for op in ops:
            inputs = [_values(r, 11, dtype) for r in range(size)]
            if op == OPS.PRODUCT and dtype != torch.bool:
                inputs = [each.clamp_max(1) if not dtype.is_complex else each * 0 + 1j ** (r % 4)
                          for r, each in enumerate(inputs)]  # fmt: skip
            want = _reduced(inputs, op)
            x = inputs[rank].clone()
            world.groups[rank].allreduce([x], _options("Allreduce", reduceOp=op)).wait()
            assert torch.equal(x, want), (op, x, want)
            x = inputs[rank].clone()
            options = _options("Reduce", reduceOp=op, rootRank=1)
            world.groups[rank].reduce([x], options).wait()
            assert torch.equal(x, want if rank == 1 else inputs[rank]), op

    world.each(run)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("numel", [100, 90_001])
def test_sums_have_the_same_bits(worlds: Callable[[int], WireRanks], size: int, numel: int) -> None:
    world = worlds(size)
    inputs = torch.randn(size, numel)

    def run(rank: int) -> Tensor:
        x = inputs[rank].clone()
        world.groups[rank].allreduce([x]).wait()
        return x

    found = world.each(run)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], inputs.sum(0), rtol=1e-4, atol=1e-4)
    if size <= 16:
        assert torch.equal(found[0], _reduced(list(inputs), OPS.SUM))


@pytest.mark.parametrize("size", [2, 20])
def test_tensors_that_are_not_contiguous(worlds: Callable[[int], WireRanks], size: int) -> None:
    world = worlds(size)

    def run(rank: int) -> None:
        group = world.groups[rank]
        whole = torch.full((6, 8), -1.0)
        x = whole[::2, 1::2].t()
        x.copy_(_values(rank, 12).view(4, 3))
        group.allreduce([x]).wait()
        want = _reduced([_values(r, 12) for r in range(size)], OPS.SUM).view(4, 3)
        assert torch.equal(x, want) and whole[1::2].eq(-1).all() and whole[:, ::2].eq(-1).all()
        conjugate = torch.full((3,), complex(rank, 1)).conj()
        # A group resolves it first, and writes to it at once.
        world.backends[rank].broadcast([conjugate], _options("Broadcast", rootRank=1)).wait()
        assert conjugate.tolist() == [1 - 1j] * 3
        parts = [torch.empty(3, 2).t() for _ in range(size)]
        group.allgather([parts], [_values(rank, 6).view(3, 2).t()]).wait()
        for r, part in enumerate(parts):
            assert torch.equal(part, _values(r, 6).view(3, 2).t())
        out = torch.empty(size, 4).t()
        group._allgather_base(out, _values(rank, 4)).wait()
        assert torch.equal(out.reshape(-1), torch.cat([_values(r, 4) for r in range(size)]))
        whole = torch.empty(size, 3)
        whole[rank] = rank
        group._allgather_base(whole, whole[rank]).wait()
        assert whole.tolist() == [[r] * 3 for r in range(size)]
        parameter = nn.Parameter(_values(rank, 4))
        group.allreduce([parameter]).wait()
        assert parameter.requires_grad and parameter.grad_fn is None

    world.each(run)


@pytest.mark.parametrize("size", SIZES)
def test_barriers(worlds: Callable[[int], WireRanks], size: int) -> None:
    world = worlds(size)
    here: list[int] = []

    def run(rank: int) -> int:
        if rank == size - 1:
            time.sleep(0.05)
        here.append(rank)
        world.groups[rank].barrier().wait()
        count = len(here)
        world.groups[rank].monitored_barrier(timedelta(seconds=30))
        return count

    assert world.each(run) == [size] * size


@pytest.mark.parametrize("size", [2, 3, 20])
def test_many_at_once_waited_for_in_any_order(
    worlds: Callable[[int], WireRanks], size: int
) -> None:
    world = worlds(size)

    def run(rank: int) -> None:
        group = world.groups[rank]
        numels = [1, 50_000, 7, 100, 0, 20_000] * 5
        inputs = [_values(rank, numel) for numel in numels]
        works = [
            group.allreduce([x]) if i % 3 else group.broadcast([x], _options("Broadcast"))
            for i, x in enumerate(inputs)
        ]
        order = torch.randperm(len(works), generator=torch.Generator().manual_seed(rank))
        for i in order.tolist():
            works[i].wait()
            all_ranks = [_values(r, numels[i]) for r in range(size)]
            assert torch.equal(inputs[i], _reduced(all_ranks, OPS.SUM) if i % 3 else all_ranks[0])
            assert works[i].is_completed() and works[i].is_success()

    world.each(run)


def test_futures(worlds: Callable[[int], WireRanks]) -> None:
    """A callback may wait for another collective."""
    world = worlds(3)

    def run(rank: int) -> None:
        group = world.groups[rank]

        def again(done: Any) -> Tensor:
            (value,) = done.value()
            group.allreduce([value]).wait()
            return value

        future = group.allreduce([torch.ones(4)]).get_future()
        assert future.then(again).wait().tolist() == [9.0] * 4
        work = group.allreduce([torch.ones(2)])
        work.wait()
        assert work.get_future().wait()[0].tolist() == work.result()[0].tolist() == [3, 3]
        outputs = [torch.empty(1) for _ in range(3)]
        value = group.allgather([outputs], [torch.ones(1)]).get_future().wait()
        assert [each.data_ptr() for each in value] == [each.data_ptr() for each in outputs]
        assert group.barrier().get_future().wait() == []

    world.each(run)


def test_outputs_outlive_the_callers_names(worlds: Callable[[int], WireRanks]) -> None:
    """The caller drops tensors, Works and Futures at once."""
    world = worlds(3)

    def run(rank: int) -> None:
        for _ in range(20):
            world.groups[rank].allreduce([torch.ones(30_000).view(100, 300).t()])
        world.groups[rank].barrier().wait()

    world.each(run)


# ---- arguments ----------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "no tensor": (lambda g, b: b.allreduce_coalesced([]), "non-empty tensor list"),
    "no memory": (lambda g, b: b.allreduce([torch.ones(1, device="meta")]), "dense tensors"),
    "another device": (lambda g, b: b.allgather([[torch.ones(1), torch.ones(1, device="meta")]],
                       [torch.ones(1)]), "tensors"),
    "sparse": (lambda g, b: b.broadcast([torch.eye(2).to_sparse()]), "dense tensors"),
    "sparse products": (lambda g, b: b.allreduce([torch.eye(2).to_sparse()], _options(
        "Allreduce", reduceOp=OPS.PRODUCT)), "only sums and means"),
    "root": (lambda g, b: g.broadcast([torch.ones(1)], _options("Broadcast", rootRank=7)),
             "invalid root rank: 7"),
    "outputs": (lambda g, b: g.allgather([[torch.ones(1)]], [torch.ones(1)]), "requires 2 tensors"),
    "output size": (lambda g, b: g.allgather([[torch.ones(1), torch.ones(2)]], [torch.ones(1)]),
                    "invalid tensor size"),
    "output dtype": (
        lambda g, b: g.allgather([[torch.ones(1), torch.ones(1).int()]], [torch.ones(1)]),
        "invalid tensor type"),
    "whole": (lambda g, b: g._allgather_base(torch.ones(3), torch.ones(1)), "2 times as many"),
    "bits of floats": (
        lambda g, b: g.allreduce([torch.ones(1)], _options("Allreduce", reduceOp=OPS.BAND)),
        "Cannot use ReduceOp.BAND with non-integral dtype"),
    "order of complex": (
        lambda g, b: g.allreduce([torch.ones(1) + 0j], _options("Allreduce", reduceOp=OPS.MAX)),
        "ReduceOp.MAX with complex"),
    "premultiplied": (
        lambda g, b: g.allreduce([torch.ones(1)], _options(
            "Allreduce", reduceOp=dist._make_nccl_premul_sum(2.0))), "PREMUL_SUM"),
    "splits": (lambda g, b: g.alltoall_base(torch.ones(4), torch.ones(4), [1, 1], [2, 2]),
               "Split sizes"),
    "itself": (lambda g, b: g.send([torch.ones(1)], g.rank(), 0), "another rank"),
    "tag": (lambda g, b: g.send([torch.ones(1)], 1 - g.rank(), -1), "tag"),
    "any source": (lambda g, b: g.recv_anysource([torch.ones(1)], 0), "must be given"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_leave_the_group_alone(
    worlds: Callable[[int], WireRanks], wrong: str
) -> None:
    world = worlds(2)
    call, message = WRONG[wrong]

    def run(rank: int) -> None:
        group = world.groups[rank]
        with pytest.raises((RuntimeError, ValueError), match=message):
            call(group, world.backends[rank])
        x = torch.ones(1)
        group.allreduce([x]).wait()
        assert x.item() == 2

    world.each(run)


# ---- errors -------------------------------------------------------------------------------------


MISFITS: dict[str, Any] = {
    "operations": (lambda g: g.allreduce([torch.ones(4)]),
                          lambda g: g.broadcast([torch.ones(4)], _options("Broadcast"))),
    "sizes": (lambda g: g.allreduce([torch.ones(4)]),
                     lambda g: g.allreduce([torch.ones(5)])),
    "large and small": (lambda g: g.allreduce([torch.ones(4)]),
                               lambda g: g.allreduce([torch.ones(1 << 18)])),
    "dtypes": (lambda g: g.allreduce([torch.ones(4)]),
                      lambda g: g.allreduce([torch.ones(4).int()])),
    "reductions": (
        lambda g: g.allreduce([torch.ones(4)]),
        lambda g: g.allreduce([torch.ones(4)], _options("Allreduce", reduceOp=OPS.MAX))),
    "roots": (
        lambda g: g.broadcast([torch.ones(4)], _options("Broadcast", rootRank=0)),
        lambda g: g.broadcast([torch.ones(4)], _options("Broadcast", rootRank=1))),
    "roots that get": (
        lambda g: g.reduce([torch.ones(4)], _options("Reduce", rootRank=1)),
        lambda g: g.reduce([torch.ones(4)], _options("Reduce", rootRank=0))),
    "messages": (lambda g: g.send([torch.ones(4)], 1, 0),
                        lambda g: g.recv([torch.ones(5)], 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_ranks_that_do_not_fit_get_errors(fresh: Callable[..., WireRanks], name: str) -> None:
    world = fresh(2)

    def run(rank: int) -> None:
        # Neither has waited for its timeout.
        with pytest.raises(dist.DistBackendError, match=r"rank \d (sends|expects) "):
            MISFITS[name][rank](world.groups[rank]).wait()
            if name == "messages":  # a send is over before the other process has looked at it
                world.groups[rank].barrier().wait()
        with pytest.raises(dist.DistBackendError):
            world.groups[rank].barrier().wait()

    world.each(run)


def test_a_late_rank(fresh: Callable[..., WireRanks]) -> None:
    world, have_waited = fresh(3, seconds=0.5), threading.Barrier(3)

    def run(rank: int) -> None:
        if rank == 2:
            have_waited.wait(20)
        with pytest.raises(dist.DistBackendError, match=r"all_reduce 0 of 4 float32 by SUM"):
            world.groups[rank].allreduce([torch.ones(4)]).wait()
        if rank != 2:
            have_waited.wait(20)

    world.each(run)


def test_a_wait_that_is_too_long(fresh: Callable[..., WireRanks]) -> None:
    world = fresh(2)
    ended = threading.Event()

    def run(rank: int) -> None:
        if rank == 0:
            work = world.groups[0].allreduce([torch.ones(4)])
            with pytest.raises(dist.DistBackendError, match="not complete after 100 ms"):
                work.wait(timedelta(milliseconds=100))
            ended.set()
        else:
            ended.wait(20)
            with pytest.raises(dist.DistBackendError, match="not complete after 100 ms"):
                while True:  # until the reason has come: rank 0 has sent its part of the first
                    world.groups[1].allreduce([torch.ones(4)]).wait()

    world.each(run)


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "fails"])
def test_a_rank_that_is_gone_before_another_has_joined(
    fresh: Callable[..., WireRanks], leaves: bool
) -> None:
    """What it says reaches a process that does not know the group yet."""
    world, store, is_gone = fresh(2), dist.HashStore(), threading.Event()
    world.each(lambda rank: world.groups[rank].barrier().wait())  # connects them

    def run(rank: int) -> None:
        own: dist.Store = store if rank == 0 else StoreOfRank(store, then=lambda: is_gone.wait(20))
        made = _C.WireBackend(world.endpoints[rank], own, "b", rank, 2, timedelta(seconds=30))
        if rank == 0:
            (made.close if leaves else made.fail)("it is gone")
            world.groups[0].barrier().wait()
            return
        with pytest.raises(dist.DistBackendError, match="it is gone"):
            made.allreduce([torch.ones(4)], _options("Allreduce")).wait()

    thread = threading.Thread(target=lambda: (world.groups[1].barrier().wait(), is_gone.set()))
    thread.start()
    world.each(run)
    thread.join()


def test_monitored_barrier_names_all_that_are_late(fresh: Callable[..., WireRanks]) -> None:
    world = fresh(4)

    def run(rank: int) -> None:
        if rank in (1, 3):
            return
        with pytest.raises(dist.DistBackendError, match=r"Ranks 1, 3 failed .* in 2000 ms"):
            world.groups[rank].monitored_barrier(timedelta(seconds=2))

    world.each(run)


def test_fail_ends_all_waits(fresh: Callable[..., WireRanks]) -> None:
    world, have_begun = fresh(3), threading.Barrier(3)
    futures: list[Any] = []

    def run(rank: int) -> None:
        if rank == 2:
            have_begun.wait(20)
            world.backends[rank].fail("the data have run out")
            return
        work = world.groups[rank].allreduce([torch.ones(4)])
        futures.append(work.get_future())
        have_begun.wait(20)
        with pytest.raises(dist.DistBackendError, match="the data have run out"):
            work.wait()
        assert work.is_completed() and not work.is_success()

    world.each(run)
    for future in futures:
        with pytest.raises(RuntimeError, match="the data have run out"):
            future.wait()


def test_callbacks_that_run_when_a_group_ends(fresh: Callable[..., WireRanks]) -> None:
    world = fresh(2)
    has_callback, has_begun, may_end = (threading.Event() for _ in range(3))
    found: list[Any] = []
    short, long = timedelta(milliseconds=1), timedelta(seconds=20)

    def callback(_: Any) -> None:
        found.append(world.backends[0].drain(long))  # it does not wait for itself
        has_begun.set()
        may_end.wait(20)

    def run(rank: int) -> None:
        if rank == 1:
            has_callback.wait(20)  # a callback of a work that is done runs here and now
        work = world.groups[rank].allreduce([torch.ones(4)])
        if rank == 0:
            work.get_future().add_done_callback(callback)
            has_callback.set()
        work.wait()

    world.each(run)
    has_begun.wait(20)
    world.backends[0].close()
    assert world.backends[0].drain(short) is None
    may_end.set()
    assert world.backends[0].drain(long) in (True, False)
    assert world.backends[0].drain(short) is False and found == [False]


def test_many_callbacks_have_few_threads(fresh: Callable[..., WireRanks]) -> None:
    world = fresh(2)
    before, most = len(os.listdir("/proc/self/task")), []

    def run(rank: int) -> None:
        group, futures = world.groups[rank], list[Any]()
        for _ in range(500):
            future = group.allreduce([torch.ones(1)]).get_future()
            futures.append(future.then(lambda _: len(os.listdir("/proc/self/task"))))
        most.extend(torch.futures.wait_all(futures))

    world.each(run)
    assert len(most) == 1000 and max(most) - before < 80  # 32 of each endpoint, and a few


def test_an_endpoint_is_replaced_after_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made = wire._Endpoints()
    first, store = made.get(15.0, 1), dist.HashStore()
    backend = _C.WireBackend(first, store, "", 0, 1, timedelta(seconds=9))
    monkeypatch.setattr(_C.WireEndpoint, "has_lost", lambda self: self is first)
    second = made.get(15.0, 1)
    assert second is not first and made.get(15.0, 1) is second
    assert first.address  # its group goes on
    backend.close()
    made.get(15.0, 1)
    with pytest.raises(RuntimeError, match="it is closed"):
        _ = first.address
    made.close()


def test_an_interface_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(dist.DistNetworkError, match="cannot listen at 'none0'"):
        wire._Endpoints().get(15.0, 1)


def test_a_message_of_a_rank_that_has_ended(fresh: Callable[..., WireRanks]) -> None:
    world = fresh(2)
    other = world.more_backends()
    sent, received = torch.arange(300_000.0), torch.zeros(300_000)

    def run(rank: int) -> None:
        if rank == 1:
            world.groups[rank].send([sent], 0, 3).wait()
            world.endpoints[1].close()  # once all has come
            return
        with pytest.raises(dist.DistBackendError, match="rank 1: its process has ended"):
            other[0].recv([torch.zeros(1)], 1, 0).wait()

    world.each(run)
    world.groups[0].recv([received], 1, 3).wait()
    assert torch.equal(received, sent)
    with pytest.raises(dist.DistBackendError, match="rank 1: its process has ended"):
        world.groups[0].recv([received], 1, 3).wait()


def test_a_rank_that_has_ended_since_it_joined(fresh: Callable[..., WireRanks]) -> None:
    world = fresh(2)
    world.endpoints[1].close()
    with pytest.raises(dist.DistBackendError, match="rank 1: its process has ended"):
        world.groups[0].allreduce([torch.ones(4)]).wait()


def test_many_ranks_connect_to_few(fresh: Callable[..., WireRanks]) -> None:
    """To those at doubled distances, and to neighbours in a ring."""
    world = fresh(20)
    for numel in (4, 500_000):
        world.each(
            lambda rank, numel=numel: world.groups[rank].allreduce([torch.ones(numel)]).wait()
        )
    assert sum(each.counts()["connections"] for each in world.endpoints) < 20 * 6


def test_no_file_stays_open() -> None:
    def use() -> int:
        world = WireRanks(2)
        for _ in range(3):
            world.each(lambda rank: world.groups[rank].barrier().wait())
            world.renew()
        world.close()
        return len(os.listdir("/proc/self/fd"))

    assert use() == use()


@pytest.mark.parametrize("size", [2, 5, 20])
def test_what_joining_asks_of_the_store(size: int) -> None:
    """As much of each rank, however many there are."""
    store, calls = dist.HashStore(), [list[str]() for _ in range(size)]

    class Counted(dist.Store):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

        def set(self, key: str, value: Any) -> None:
            calls[self.rank].append("set")
            store.set(key, value.decode())

        def wait(self, keys: Any, timeout: Any = None) -> None:
            calls[self.rank].append("wait")
            store.wait(list(keys), timedelta(seconds=20))

        def multi_get(self, keys: Any) -> Any:
            calls[self.rank].append("multi_get")
            return store.multi_get(list(keys))

        def has_extended_api(self) -> bool:
            return True

    endpoints = [_C.WireEndpoint("127.0.0.1") for _ in range(size)]

    def join(rank: int) -> None:
        limit = timedelta(seconds=20)
        _C.WireBackend(endpoints[rank], Counted(rank), "counted", rank, size, limit)

    assert in_threads([functools.partial(join, rank) for rank in range(size)]) == []
    for each in endpoints:
        each.close()
    assert calls == [["set", "wait", "multi_get"]] * size


def test_a_rank_that_leaves_its_group(fresh: Callable[..., WireRanks]) -> None:
    world = fresh(3)
    sent = torch.arange(300_000.0)

    def run(rank: int) -> None:
        group = world.groups[rank]
        group.barrier().wait()
        if rank == 0:
            group.send([sent], 1, 3).wait()
            world.backends[0].shutdown()
            return
        if rank == 1:
            received = torch.zeros_like(sent)
            group.recv([received], 0, 3).wait()
            assert torch.equal(received, sent)
        with pytest.raises(dist.DistBackendError, match="rank 0 has left the group"):
            group.allreduce([torch.ones(4)]).wait()

    world.each(run)


def test_a_rank_that_leaves_because_of_another(fresh: Callable[..., WireRanks]) -> None:
    # Held: ranks 0 and 1 do not leave by themselves, which the other one could see first.
    world, ended = fresh(3, is_held=True), _C.WireFailure.ENDED

    def run(rank: int) -> None:
        if rank == 2:
            with pytest.raises(ValueError, match="no rank 3 of 3"):
                world.backends[2].close("why", ended, 3)
            world.backends[2].close("since the store has ended", ended, 0)
            return
        with pytest.raises(dist.DistBackendError, match=r"rank 2 has left.*: since the store has"):
            world.groups[rank].allreduce([torch.ones(4)]).wait()
        kind, blamed, _, why = world.backends[rank].failure() or pytest.fail("none")
        assert (kind, blamed, why) == (ended, 0, "since the store has ended")

    world.each(run)


def test_a_loss_that_only_one_side_has_seen() -> None:
    """The other one learns it when it connects again, and fails too."""
    endpoints = [_C.WireEndpoint("127.0.0.1", "test", lost) for lost in (3.0, 60.0)]
    store, ways, is_lost = dist.HashStore(), list[Way](), threading.Event()
    is_shut = threading.Event()

    def run(rank: int) -> None:
        own = StoreOfRank(store, through(ways))
        made = _C.WireBackend(endpoints[rank], own, "w", rank, 2, timedelta(seconds=30))
        made.barrier(_options("Barrier")).wait()
        if rank == 0:
            for each in ways:
                each.set(False)
            is_shut.set()
        is_shut.wait(20)
        work = made.allreduce([torch.ones(4)], _options("Allreduce"))
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="rank 1: no sign of its host for 3 s"):
                work.wait()
            assert endpoints[0].has_lost()
            for each in ways:
                each.set(True)
            is_lost.set()
        else:
            is_lost.wait(20)
            with pytest.raises(dist.DistBackendError, match="rank 0: it counts this process as"):
                work.wait()

    errors = in_threads([functools.partial(run, rank) for rank in range(2)])
    for each in (*ways, *endpoints):
        each.close()
    assert errors == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("", "", 0.5), "lost_after must"), (("", "", 15.0, 0), "rails must be 1 to 64, got 0")],
)
def test_settings_of_an_endpoint(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.WireEndpoint(*arguments)


def test_ranks_of_a_group_have_their_own_endpoints() -> None:
    endpoint, store = _C.WireEndpoint("127.0.0.1"), dist.HashStore()
    store.set("wire/1", f"{endpoint.address} 9")
    with pytest.raises(ValueError, match="two ranks of a group use the same endpoint"):
        _C.WireBackend(endpoint, store, "twice", 0, 2, timedelta(seconds=5))
    endpoint.close()


def test_an_endpoint_that_is_closed(fresh: Callable[..., WireRanks]) -> None:
    world = fresh(3)
    world.each(lambda rank: world.groups[rank].barrier().wait())

    have_begun = threading.Barrier(3)

    def run(rank: int) -> None:
        if rank == 0:
            have_begun.wait(20)
            world.endpoints[0].close()
            return
        work = world.groups[rank].allreduce([torch.ones(4)])
        have_begun.wait(20)
        with pytest.raises(dist.DistBackendError, match="rank 0: its process has ended"):
            work.wait()

    world.each(run)


def test_groups_that_many_threads_make() -> None:
    endpoint = _C.WireEndpoint("127.0.0.1", "test")

    def make(_: int) -> None:
        for _ in range(300):
            _C.WireBackend(endpoint, dist.HashStore(), "", 0, 1, timedelta(seconds=9))

    assert in_threads([functools.partial(make, index) for index in range(4)], 60) == []
    endpoint.close()


# ---- processes ----------------------------------------------------------------------------------


def _train(backend: str, folder: str, rank: int) -> list[Tensor]:
    dist.init_process_group(
        backend, init_method=f"file://{folder}/{backend.replace(':', '')}", rank=rank,
        world_size=2, timeout=timedelta(seconds=60),
    )  # fmt: skip
    torch.manual_seed(rank)  # DDP sends the first rank's parameters
    model = nn.Sequential(nn.Linear(40, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Linear(60, 3))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    gradients = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        ddp.zero_grad()
        ddp(torch.randn(8, 40)).square().mean().backward()
        gradients += [each.grad.clone() for each in model.parameters() if each.grad is not None]
    sub = dist.new_group([0, 1])
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": rank}, group=sub)
    assert found == [{"rank": 0}, {"rank": 1}]
    dist.barrier()
    dist.destroy_process_group()
    return gradients


def _two_processes(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    wire.register_backend()
    want = _train("gloo", folder, rank)
    for backend in ("commhook", "cpu:commhook"):
        for one, other in zip(_train(backend, folder, rank), want, strict=True):
            assert torch.equal(one, other)
    # A rank that ends.
    dist.init_process_group(
        "commhook", init_method=f"file://{folder}/last", rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    dist.barrier()
    if os.fork() == 0:
        try:
            dist.all_reduce(torch.ones(1))
            os._exit(2)
        except RuntimeError as error:
            os._exit(0 if "fork" in str(error) else 3)
    assert os.wait()[1] == 0
    if rank == 1:
        Path(folder, "ended").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        dist.all_reduce(torch.ones(1))
    Path(folder, "noticed").touch()


@pytest.mark.long
def test_in_processes(tmp_path: Path) -> None:
    context = mp.start_processes(
        _two_processes, (str(tmp_path),), nprocs=2, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + 120
    for process in context.processes:
        process.join(max(0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
    codes = [process.exitcode for process in context.processes]
    assert codes == [0, -signal.SIGKILL] and (tmp_path / "noticed").exists()
