"""Every collective, on every group of the library, on every way to it: Gloo's results.

Methods are called on 1 to 8 ranks, in Python and as C++ calls them; functions of
``torch.distributed`` and functional collectives, eager and compiled, on two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_cases import CASES, FUNCTIONAL
from collective_cases import values as any_values
from gloo_threads import gloo_ranks
from rank_pool import RankPool
from torch import Tensor

from torch_commhook.process_group import (
    FaultyProcessGroup,
    RecordingProcessGroup,
    ThrottledProcessGroup,
    WrapperProcessGroup,
    register,
)
from torch_commhook.testing import run_ranks

base: Any = dist.ProcessGroup


def values(rank: int, *shape: int) -> Tensor:
    """Other whole numbers on each rank, whose sums are the same in any order."""
    return any_values(rank, *shape).mul(8).round()


Call = Callable[..., Any]


class Counting(WrapperProcessGroup):
    """Counts the calls that pass through it."""

    calls = 0

    def change_arguments(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls += 1
        return arguments


def _hooked(parent: Any) -> WrapperProcessGroup:
    group = WrapperProcessGroup(parent)
    for register_hook in (
        group.register_pre_hook,
        group.register_post_hook,
        group.register_completion_hook,
    ):
        register_hook(0, lambda args: None)
    return group


#: Around Gloo's group.
AROUND: dict[str, Callable[[Any], Any]] = {
    "wrapper": Counting,
    "hooked": _hooked,
    "recording": RecordingProcessGroup,
    "throttled": lambda parent: ThrottledProcessGroup(parent, bandwidth=10e9, latency=1e-4),
    "faulty": FaultyProcessGroup,  # with no fault
    "all of them": lambda parent: RecordingProcessGroup(
        ThrottledProcessGroup(_hooked(FaultyProcessGroup(parent)), bandwidth=10e9)
    ),
}


# ---- methods -------------------------------------------------------------------------------------


def _options(make: Any, **settings: Any) -> Any:
    options = make()
    for name, value in settings.items():
        setattr(options, name, value)
    return options


def _allreduce(call: Call, rank: int, size: int) -> list[Tensor]:
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        found.append(values(rank, 3, 4))
        call("allreduce", [found[-1]], _options(dist.AllreduceOptions, reduceOp=op))
    return found


def _allreduce_coalesced(call: Call, rank: int, size: int) -> list[Tensor]:
    found = [values(rank, 4), values(rank, 2, 3)]
    call("allreduce_coalesced", found, dist.AllreduceCoalescedOptions())
    return found


def _broadcast(call: Call, rank: int, size: int) -> list[Tensor]:
    found = [values(rank, 5)]
    call("broadcast", found, _options(dist.BroadcastOptions, rootRank=size - 1))
    return found


def _reduce(call: Call, rank: int, size: int) -> list[Tensor]:
    found = [values(rank, 5)]
    call("reduce", found, _options(dist.ReduceOptions, rootRank=size - 1))
    return found if rank == size - 1 else []


def _allgather(call: Call, rank: int, size: int) -> list[Tensor]:
    found = [torch.empty(2, 3) for _ in range(size)]
    call("allgather", [found], [values(rank, 2, 3)])
    return found


def _allgather_coalesced(call: Call, rank: int, size: int) -> list[Tensor]:
    outputs = [[torch.empty(4), torch.empty(2, 3)] for _ in range(size)]
    call("allgather_coalesced", outputs, [values(rank, 4), values(rank, 2, 3)])
    return [tensor for tensors in outputs for tensor in tensors]


def _all_gather_single(call: Call, rank: int, size: int) -> list[Tensor]:
    output = torch.empty(2 * size, 3)
    call("_allgather_base", output, values(rank, 2, 3))
    return [output]


def _all_gather_single_coalesced(call: Call, rank: int, size: int) -> list[Tensor]:
    outputs = [torch.empty(2 * size), torch.empty(size, 3)]
    call("allgather_into_tensor_coalesced", outputs, [values(rank, 2), values(rank, 1, 3)])
    return outputs


def _gather(call: Call, rank: int, size: int) -> list[Tensor]:
    outputs = [[torch.empty(4) for _ in range(size)]] if rank == 0 else []
    call("gather", outputs, [values(rank, 4)], _options(dist.GatherOptions, rootRank=0))
    return outputs[0] if outputs else []


def _scatter(call: Call, rank: int, size: int) -> list[Tensor]:
    output, root = torch.empty(4), size - 1
    inputs = [[values(10 + i, 4) for i in range(size)]] if rank == root else []
    call("scatter", [output], inputs, _options(dist.ScatterOptions, rootRank=root))
    return [output]


def _reduce_scatter(call: Call, rank: int, size: int) -> list[Tensor]:
    output = torch.empty(3)
    inputs = [values(10 * rank + i, 3) for i in range(size)]
    call("reduce_scatter", [output], [inputs], dist.ReduceScatterOptions())
    return [output]


def _reduce_scatter_single(call: Call, rank: int, size: int) -> list[Tensor]:
    output = torch.empty(2, 3)
    call("_reduce_scatter_base", output, values(rank, 2 * size, 3), dist.ReduceScatterOptions())
    return [output]


def _reduce_scatter_single_coalesced(call: Call, rank: int, size: int) -> list[Tensor]:
    outputs = [torch.empty(2), torch.empty(1, 3)]
    inputs = [values(rank, 2 * size), values(rank, size, 3)]
    call("reduce_scatter_tensor_coalesced", outputs, inputs)
    return outputs


def _alltoall(call: Call, rank: int, size: int) -> list[Tensor]:
    outputs = [torch.empty(3) for _ in range(size)]
    inputs = [values(10 * rank + i, 3) for i in range(size)]
    call("alltoall", outputs, inputs, dist.AllToAllOptions())
    return outputs


def _all_to_all_single(call: Call, rank: int, size: int) -> list[Tensor]:
    equal, uneven = torch.empty(2 * size, 3), torch.empty((rank + 1) * size, 3)
    call("alltoall_base", equal, values(rank, 2 * size, 3), [], [])
    sends = [i + 1 for i in range(size)]
    call("alltoall_base", uneven, values(rank, sum(sends), 3), [rank + 1] * size, sends)
    return [equal, uneven]


def _messages(call: Call, rank: int, size: int) -> list[Tensor]:
    """Even ranks send to the next one, then odd ones do."""
    found = []
    for turn in range(2):
        peer = rank + 1 if rank % 2 == turn else rank - 1
        if not 0 <= peer < size:
            continue
        if rank % 2 == turn:
            call("send", [values(rank, 4)], peer, turn)
        else:
            found.append(torch.empty(4))
            call("recv", [found[-1]], peer, turn)
    return found


def _any_source(call: Call, rank: int, size: int) -> list[Tensor]:
    if rank:
        call("send", [values(rank, 4)], 0, 7)
        return []
    found = [torch.empty(4) for _ in range(size - 1)]
    for output in found:
        call("recv_anysource", [output], 7)
    return sorted(found, key=lambda tensor: tensor[0].item())


def _barriers(call: Call, rank: int, size: int) -> list[Tensor]:
    call("barrier", dist.BarrierOptions())
    call("monitored_barrier", timedelta(seconds=20), True)
    return []


METHODS: dict[str, Callable[[Call, int, int], list[Tensor]]] = {
    method.__name__.removeprefix("_"): method
    for method in (
        *(_allreduce, _allreduce_coalesced, _broadcast, _reduce),
        *(_allgather, _allgather_coalesced, _all_gather_single, _all_gather_single_coalesced),
        *(_gather, _scatter),
        *(_reduce_scatter, _reduce_scatter_single, _reduce_scatter_single_coalesced),
        *(_alltoall, _all_to_all_single, _messages, _any_source, _barriers),
    )
}

#: The name in Python of a method that PyTorch's bindings have by an older one.
NEWEST = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


def _in_python(group: Any) -> Call:
    def call(name: str, *arguments: Any) -> None:
        if isinstance(group, base) and type(group) is not base:
            name = NEWEST.get(name, name)
        work = getattr(group, name)(*arguments)
        assert work is None or work.wait()

    return call


def _from_cpp(group: Any) -> Call:
    def call(name: str, *arguments: Any) -> None:
        work = getattr(base, name)(group, *arguments)
        assert work is None or work.wait()

    return call


WAYS = {"in Python": _in_python, "from C++": _from_cpp}
Found = dict[str, list[Any] | str]


def _every_method(rank: int, group: Any, way: str) -> Found:
    found: Found = {}
    for name, method in METHODS.items():
        try:
            tensors = method(WAYS[way](group), rank, group.size())
            found[name] = [tensor.tolist() for tensor in tensors]
        except (RuntimeError, NotImplementedError) as error:
            found[name] = str(error)
    return found


def _on(rank: int, group: Any, kind: str, way: str) -> Found:
    return _every_method(rank, AROUND[kind](group), way)


class References:
    """What Gloo gives, for so many ranks; computed once."""

    def __init__(self) -> None:
        self._found: dict[Any, list[Found]] = {}

    def of(self, size: int) -> list[Found]:
        if size not in self._found:
            self._found[size] = gloo_ranks(_every_method, size, "in Python")
        return self._found[size]


@pytest.fixture(scope="module")
def references() -> References:
    return References()


SIZES = pytest.mark.parametrize("size", [1, 2, 3, 8])
by_way = pytest.mark.parametrize("way", WAYS)


def _compare(found: list[Found], expected: list[Found]) -> list[str]:
    """The methods that Gloo has and that give something else."""
    return [
        f"{name} on rank {rank}: {ours[name]}, Gloo {gloo[name]}"
        for rank, (ours, gloo) in enumerate(zip(found, expected, strict=True))
        for name in METHODS
        if ours[name] != gloo[name] and not isinstance(gloo[name], str)
    ]


@by_way
@SIZES
@pytest.mark.parametrize("kind", AROUND)
def test_methods_around_gloo(references: References, kind: str, size: int, way: str) -> None:
    expected = references.of(size)
    found = gloo_ranks(_on, size, kind, way)
    assert _compare(found, expected) == []
    for ours, gloo in zip(found, expected, strict=True):  # what Gloo lacks is an error here too
        assert [name for name in METHODS if isinstance(gloo[name], str)] == [
            name for name in METHODS if isinstance(ours[name], str)
        ]


@by_way
@SIZES
def test_methods_of_the_simulated_group(references: References, size: int, way: str) -> None:
    found = run_ranks(lambda rank: _every_method(rank, dist.group.WORLD, way), size)
    assert _compare(found, references.of(size)) == []
    assert [name for each in found for name in METHODS if isinstance(each[name], str)] == []


def test_gloo_has_nearly_all(references: References) -> None:
    """Or the comparisons above would mean nothing."""
    missing = {
        name for found in references.of(3) for name in METHODS if isinstance(found[name], str)
    }
    assert missing <= {"alltoall"}


# ---- functions of torch.distributed --------------------------------------------------------------


@contextmanager
def _group_of(kind: str) -> Iterator[Any]:
    """Gloo's group, or a registered one around it."""
    if kind == "gloo":
        yield dist.group.WORLD
        return
    group = AROUND[kind](dist.group.WORLD)
    register(group, f"table {kind}")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _passed_through(group: Any, call: Callable[[], Any]) -> Any:
    """What a call gives; some collective of it has passed through a group that counts them."""
    before = getattr(group, "calls", -1)
    found = call()
    assert getattr(group, "calls", 0) > before
    return found


def _functions(rank: int, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with _group_of(kind) as group:
        for name, case in CASES.items():
            try:
                tensors = _passed_through(group, lambda case=case: case(rank, 2, group))
                found[name] = [tensor.tolist() for tensor in tensors]
            except (RuntimeError, NotImplementedError, ValueError) as error:
                found[name] = type(error).__name__
    return found


@pytest.mark.parametrize("kind", AROUND)
def test_functions(two_ranks: RankPool, kind: str) -> None:
    expected, found = two_ranks.run(_functions, "gloo"), two_ranks.run(_functions, kind)
    for ours, gloo in zip(found, expected, strict=True):
        assert {name: ours[name] for name in CASES if ours[name] != gloo[name]} == {}


# ---- functional collectives by name --------------------------------------------------------------


def _functional(rank: int, kind: str, backend: str | None) -> dict[str, list[Any]]:
    found = {}
    with _group_of(kind) as group:
        for name, call in FUNCTIONAL.items():
            if backend is not None:
                torch._dynamo.reset()
                call = torch.compile(call, backend=backend, fullgraph=True)
            x = values(rank, 4)
            result = _passed_through(group, lambda call=call, x=x: call(x, group.group_name))
            found[name] = result.tolist()
    return found


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("kind", AROUND)
def test_functional_collectives(two_ranks: RankPool, kind: str, backend: str | None) -> None:
    expected = two_ranks.run(_functional, "gloo", None)
    assert two_ranks.run(_functional, kind, backend, timeout=240) == expected


# ---- functions that a compiler leaves to Python --------------------------------------------------


def _async(x: Tensor, group: Any) -> Tensor:
    y = x * 2
    dist.all_reduce(y, group=group, async_op=True).wait()
    return y + 1


def _barrier(x: Tensor, group: Any) -> Tensor:
    y = x * 2
    dist.barrier(group=group)
    return y + 1


def _root(x: Tensor, group: Any) -> Tensor:
    y = x * 2
    dist.reduce(y, 0, group=group)
    return y + 1


def _gathered(x: Tensor, group: Any) -> Tensor:
    outputs = [torch.empty_like(x)]
    dist.all_gather(outputs, x * 2, group=group, async_op=True).wait()
    return outputs[0] + 1


@pytest.mark.usefixtures("one_rank", "fresh_compiler")
@pytest.mark.parametrize("function", [_async, _barrier, _root, _gathered])
@pytest.mark.parametrize("kind", AROUND)
def test_functions_in_compiled_code(kind: str, function: Callable[..., Tensor]) -> None:
    if function is _root and torch.__version__.startswith("2.11."):
        pytest.skip("this torch's compiler knows ranks of no group whose class is in Python")
    with _group_of(kind) as group:
        compiled = torch.compile(function, backend="eager")
        assert compiled(torch.ones(2), group).tolist() == [3.0, 3.0]
