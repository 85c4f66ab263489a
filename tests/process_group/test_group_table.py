"""Every collective, on every group of the library, on every way to it: Gloo's results.

Methods are called on 1 to 8 ranks, in Python and as C++ calls them; functions of
``torch.distributed`` and functional collectives, eager and compiled, on two.
"""

from __future__ import annotations

import functools
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


class Counting(WrapperProcessGroup):
    calls = 0

    def change_arguments(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls += 1
        return arguments


def _hooked(parent: Any) -> WrapperProcessGroup:
    group = WrapperProcessGroup(parent)
    for kind in ("pre", "post", "completion"):
        getattr(group, f"register_{kind}_hook")(0, lambda args: None)
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

#: The name in Python of a method that PyTorch's bindings have by an older one.
NEWEST = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


def _in_python(group: Any, name: str, *arguments: Any) -> Any:
    if isinstance(group, base) and type(group) is not base:
        name = NEWEST.get(name, name)
    return getattr(group, name)(*arguments)


WAYS: dict[str, Callable[..., Any]] = {
    "in Python": _in_python,
    "from C++": lambda group, name, *arguments: getattr(base, name)(group, *arguments),
}
Found = dict[str, list[Any] | str]


def _options(make: Any, **settings: Any) -> Any:
    options = make()
    for name, value in settings.items():
        setattr(options, name, value)
    return options


def _every_method(rank: int, group: Any, way: str) -> Found:
    """The results of each method, or its error."""
    size, found = group.size(), {}
    last = size - 1

    def call(name: str, *arguments: Any, gives: list[Tensor], case: str = "") -> None:
        case = case or NEWEST.get(name, name)
        try:
            work = WAYS[way](group, name, *arguments)
            assert work is None or work.wait()
            found[case] = [tensor.tolist() for tensor in gives]
        except (RuntimeError, NotImplementedError) as error:
            found[case] = str(error)

    def empty(*shape: int) -> list[Tensor]:
        return [torch.empty(shape) for _ in range(size)]

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        options = _options(dist.AllreduceOptions, reduceOp=op)
        x = [values(rank, 3, 4)]
        call("allreduce", x, options, gives=x, case=f"allreduce {op}")
    x = [values(rank, 4), values(rank, 2, 3)]
    call("allreduce_coalesced", x, dist.AllreduceCoalescedOptions(), gives=x)
    x = [values(rank, 5)]
    call("broadcast", x, _options(dist.BroadcastOptions, rootRank=last), gives=x)
    x = [values(rank, 5)]
    options = _options(dist.ReduceOptions, rootRank=last)
    call("reduce", x, options, gives=x if rank == last else [])
    outputs = empty(2, 3)
    call("allgather", [outputs], [values(rank, 2, 3)], gives=outputs)
    pairs = list(zip(empty(4), empty(2, 3), strict=True))
    inputs = [values(rank, 4), values(rank, 2, 3)]
    outputs = [output for pair in pairs for output in pair]
    call("allgather_coalesced", list(map(list, pairs)), inputs, gives=outputs)
    output = torch.empty(2 * size, 3)
    call("_allgather_base", output, values(rank, 2, 3), gives=[output])
    outputs = [torch.empty(2 * size), torch.empty(size, 3)]
    inputs = [values(rank, 2), values(rank, 1, 3)]
    call("allgather_into_tensor_coalesced", outputs, inputs, gives=outputs)
    outputs = empty(4) if rank == 0 else []
    options = _options(dist.GatherOptions, rootRank=0)
    call("gather", [outputs] if outputs else [], [values(rank, 4)], options, gives=outputs)
    output = torch.empty(4)
    lists = [[values(10 + i, 4) for i in range(size)]] if rank == last else []
    options = _options(dist.ScatterOptions, rootRank=last)
    call("scatter", [output], lists, options, gives=[output])
    output = torch.empty(3)
    inputs = [values(10 * rank + i, 3) for i in range(size)]
    call("reduce_scatter", [output], [inputs], dist.ReduceScatterOptions(), gives=[output])
    outputs = empty(3)
    call("alltoall", outputs, inputs, dist.AllToAllOptions(), gives=outputs)
    output, options = torch.empty(2, 3), dist.ReduceScatterOptions()
    call("_reduce_scatter_base", output, values(rank, 2 * size, 3), options, gives=[output])
    outputs = [torch.empty(2), torch.empty(1, 3)]
    inputs = [values(rank, 2 * size), values(rank, size, 3)]
    call("reduce_scatter_tensor_coalesced", outputs, inputs, gives=outputs)
    output = torch.empty(2 * size, 3)
    call("alltoall_base", output, values(rank, 2 * size, 3), [], [], gives=[output])
    output, sends = torch.empty((rank + 1) * size, 3), [i + 1 for i in range(size)]
    arguments = output, values(rank, sum(sends), 3), [rank + 1] * size, sends
    call("alltoall_base", *arguments, gives=[output], case="uneven alltoall_base")
    for turn in range(2):  # even ranks send to the next one, then odd ones do
        peer, output = rank + 1 if rank % 2 == turn else rank - 1, torch.empty(4)
        if not 0 <= peer < size:
            continue
        if rank % 2 == turn:
            call("send", [values(rank, 4)], peer, turn, gives=[])
        else:
            call("recv", [output], peer, turn, gives=[output])
    if rank:
        call("send", [values(rank, 4)], 0, 7, gives=[], case="send to any")
    else:
        outputs = [torch.empty(4) for _ in range(last)]
        for output in outputs:
            call("recv_anysource", [output], 7, gives=[])
        found["from any"] = sorted(output.tolist() for output in outputs)
    call("barrier", dist.BarrierOptions(), gives=[])
    call("monitored_barrier", timedelta(seconds=20), True, gives=[])
    return found


@functools.cache
def _of_gloo(size: int, kind: str | None = None, way: str = "in Python") -> list[Found]:
    """The results of Gloo's group, for so many ranks, or of one around it."""
    around = AROUND[kind] if kind else lambda group: group
    return gloo_ranks(lambda rank, group: _every_method(rank, around(group), way), size)


SIZES = pytest.mark.parametrize("size", [1, 2, 3, 8])
by_way = pytest.mark.parametrize("way", WAYS)


def _errors(found: Found) -> list[str]:
    return [name for name, gives in found.items() if isinstance(gives, str)]


def _compare(found: list[Found], expected: list[Found]) -> list[str]:
    """The methods that Gloo has and that give something else."""
    return [
        f"{name} on rank {rank}: {ours[name]}, Gloo {gloo[name]}"
        for rank, (ours, gloo) in enumerate(zip(found, expected, strict=True))
        for name in gloo
        if ours[name] != gloo[name] and not isinstance(gloo[name], str)
    ]


@by_way
@SIZES
@pytest.mark.parametrize("kind", AROUND)
def test_methods_around_gloo(kind: str, size: int, way: str) -> None:
    expected = _of_gloo(size)
    found = _of_gloo(size, kind, way)
    assert _compare(found, expected) == []
    # What Gloo lacks is an error here too.
    assert list(map(_errors, found)) == list(map(_errors, expected))


@by_way
@SIZES
def test_methods_of_the_simulated_group(size: int, way: str) -> None:
    found = run_ranks(lambda rank: _every_method(rank, dist.group.WORLD, way), size)
    assert _compare(found, _of_gloo(size)) == []
    assert not any(map(_errors, found))


def test_gloo_has_nearly_all() -> None:
    """Or the comparisons above would mean nothing."""
    every = _of_gloo(3)
    assert {name for found in every for name in _errors(found)} <= {"alltoall"}
    assert {name for found in every for name in found} >= {"send", "recv", *NEWEST.values()}


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


#: Calls with a tensor, one for results, and the group.
UNTRACED: dict[str, Callable[[Tensor, Tensor, Any], Any]] = {
    "async": lambda y, out, group: dist.all_reduce(y, group=group, async_op=True).wait(),
    "barrier": lambda y, out, group: dist.barrier(group=group),
    "root": lambda y, out, group: dist.reduce(y, 0, group=group),
    "gathered": lambda y, out, group: dist.all_gather([out], y, group, async_op=True).wait(),
}


@pytest.mark.usefixtures("one_rank", "fresh_compiler")
@pytest.mark.parametrize("name", UNTRACED)
@pytest.mark.parametrize("kind", AROUND)
def test_functions_in_compiled_code(kind: str, name: str) -> None:
    if name == "root" and torch.__version__.startswith("2.11."):
        pytest.skip("this torch's compiler knows ranks of no group whose class is in Python")

    @functools.partial(torch.compile, backend="eager")
    def compiled(x: Tensor, group: Any) -> Tensor:
        y, out = x * 2, torch.empty_like(x)
        UNTRACED[name](y, out, group)
        return (out if name == "gathered" else y) + 1

    with _group_of(kind) as group:
        assert compiled(torch.ones(2), group).tolist() == [3.0, 3.0]
