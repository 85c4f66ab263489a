"""ProcessGroup and Work in Python: every virtual method that C++ calls, and what one may return.

The methods are called as C++ does it, through the bindings of ``torch.distributed.ProcessGroup``,
which go to the virtual methods whatever class the object has.
"""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_commhook import _C, ProcessGroup, Work

INCLUDE = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
#: What our own class does, and no class in Python.
IN_CPP = {
    "registerAbortHook",
    "unregisterAbortHook",
    "registerCompletionHook",
    "unregisterCompletionHook",
    "registerPreHook",
    "unregisterPreHook",
    "registerPostHook",
    "unregisterPostHook",
    "supportsAbortHooks",
    "supportsCompletionHooks",
}

X = torch.ones(2)
SECOND = timedelta(seconds=1)
Call = Callable[[Any], Any]
base = dist.ProcessGroup


def done(*tensors: torch.Tensor) -> Work:
    class Done(Work):
        def get_future(self) -> torch.futures.Future:
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(list(tensors))
            return future

    return Done()


def _deprecated(name: str, *arguments: Any) -> Call:
    return lambda group: getattr(base, name)(group, *arguments)


#: By a name that a class may give the method: how C++ is made to call it, and what it may return.
CALLS: dict[str, tuple[Call, Any]] = {
    "rank": (lambda group: base.rank(group), 1),
    "getRank": (lambda group: base.rank(group), 1),
    "size": (lambda group: base.size(group), 3),
    "getSize": (lambda group: base.size(group), 3),
    "name": (lambda group: base.name(group), "own"),
    "getBackendName": (lambda group: base.name(group), "own"),
    "getGroupName": (lambda group: base.group_name.fget(group), "a group"),
    "getGroupDesc": (lambda group: base.group_desc.fget(group), "of ranks"),
    "_set_group_name": (lambda group: base._set_group_name(group, "a group"), None),
    "setGroupName": (lambda group: base._set_group_name(group, "a group"), None),
    "_set_group_desc": (lambda group: base._set_group_desc(group, "of ranks"), None),
    "set_timeout": (lambda group: base.set_timeout(group, SECOND), None),
    "setTimeout": (lambda group: base.set_timeout(group, SECOND), None),
    "shutdown": (lambda group: base.shutdown(group), None),
    "abort": (lambda group: base.abort(group), None),
    "broadcast": (lambda group: base.broadcast(group, [X], dist.BroadcastOptions()), Work),
    "allreduce": (lambda group: base.allreduce(group, [X], dist.AllreduceOptions()), Work),
    "allreduce_coalesced": (
        lambda group: base.allreduce_coalesced(group, [X], dist.AllreduceCoalescedOptions()),
        Work,
    ),
    "reduce": (lambda group: base.reduce(group, [X], dist.ReduceOptions()), Work),
    "allgather": (lambda group: base.allgather(group, [[X]], [X]), Work),
    "allgather_coalesced": (lambda group: base.allgather_coalesced(group, [[X]], [X]), Work),
    "all_gather_single": (_deprecated("_allgather_base", X, X), Work),
    "_allgather_base": (_deprecated("_allgather_base", X, X), Work),
    "all_gather_single_coalesced": (
        _deprecated("allgather_into_tensor_coalesced", [X], [X]),
        Work,
    ),
    "allgather_into_tensor_coalesced": (
        _deprecated("allgather_into_tensor_coalesced", [X], [X]),
        Work,
    ),
    "gather": (lambda group: base.gather(group, [[X]], [X], dist.GatherOptions()), Work),
    "scatter": (lambda group: base.scatter(group, [X], [[X]], dist.ScatterOptions()), Work),
    "reduce_scatter": (
        lambda group: base.reduce_scatter(group, [X], [[X]], dist.ReduceScatterOptions()),
        Work,
    ),
    "reduce_scatter_single": (_deprecated("_reduce_scatter_base", X, X), Work),
    "_reduce_scatter_base": (_deprecated("_reduce_scatter_base", X, X), Work),
    "reduce_scatter_single_coalesced": (
        _deprecated("reduce_scatter_tensor_coalesced", [X], [X]),
        Work,
    ),
    "reduce_scatter_tensor_coalesced": (
        _deprecated("reduce_scatter_tensor_coalesced", [X], [X]),
        Work,
    ),
    "all_to_all_single": (_deprecated("alltoall_base", X, X, [], []), Work),
    "alltoall_base": (_deprecated("alltoall_base", X, X, [], []), Work),
    "alltoall": (lambda group: base.alltoall(group, [X], [X], dist.AllToAllOptions()), Work),
    "send": (lambda group: base.send(group, [X], 1, 2), Work),
    "recv": (lambda group: base.recv(group, [X], 1, 2), Work),
    "recv_anysource": (lambda group: base.recv_anysource(group, [X], 2), Work),
    "recvAnysource": (lambda group: base.recv_anysource(group, [X], 2), Work),
    "barrier": (lambda group: base.barrier(group, dist.BarrierOptions()), Work),
    "monitored_barrier": (lambda group: base.monitored_barrier(group, SECOND, True), None),
    "monitoredBarrier": (lambda group: base.monitored_barrier(group, SECOND, True), None),
    "_get_sequence_number_for_group": (
        lambda group: base._get_sequence_number_for_group(group),
        7,
    ),
    "getSequenceNumberForGroup": (lambda group: base._get_sequence_number_for_group(group), 7),
    "start_coalescing": (lambda group: base._start_coalescing(group, torch.device("cpu")), None),
    "startCoalescing": (lambda group: base._start_coalescing(group, torch.device("cpu")), None),
    "end_coalescing": (lambda group: base._end_coalescing(group, torch.device("cpu")), Work),
    "_end_coalescing": (lambda group: base._end_coalescing(group, torch.device("cpu")), Work),
    "split_group": (lambda group: base.split_group(group, [0]), ProcessGroup),
    "splitGroup": (lambda group: base.split_group(group, [0]), ProcessGroup),
}
if hasattr(base, "_set_sequence_number_for_group"):
    CALLS["_set_sequence_number_for_group"] = (
        lambda group: base._set_sequence_number_for_group(group),
        None,
    )
by_name = pytest.mark.parametrize("name", CALLS)


def group_with(name: str, method: Any) -> Any:
    return type("Own", (ProcessGroup,), {name: method})(0, 2)


def good(name: str) -> Any:
    result = CALLS[name][1]
    if result is Work:
        return done(X)
    return ProcessGroup(0, 1) if result is ProcessGroup else result


def virtual_methods(header: str) -> set[str]:
    text = (INCLUDE / header).read_text()
    return set(re.findall(r"\bvirtual\b[^;{(]*?(\w+)\(", text)) - {"ProcessGroup", "Work"}


# ---- the surface ---------------------------------------------------------------------------------


def test_every_virtual_method_can_be_overridden() -> None:
    assert set(_C.process_group_methods()) == virtual_methods("ProcessGroup.hpp") - IN_CPP
    assert set(_C.work_methods()) == virtual_methods("Work.hpp")


@by_name
def test_it_is_called(name: str) -> None:
    calls: list[tuple[Any, ...]] = []
    expected = good(name)

    def method(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        return expected

    got = CALLS[name][0](group_with(name, method))
    assert len(calls) == 1
    if CALLS[name][1] is Work:
        assert got.wait() and got.is_completed() and got.is_success()
        assert got.get_future().value() == [X]
    elif CALLS[name][1] is ProcessGroup:
        assert got is expected
    else:
        assert got == expected


@by_name
def test_what_it_raises_comes_out(name: str) -> None:
    class OwnError(Exception):
        pass

    def method(self: Any, *arguments: Any) -> Any:
        raise OwnError("boo")

    with pytest.raises(OwnError, match=r"^boo$") as raised:
        CALLS[name][0](group_with(name, method))
    assert raised.traceback[-1].name == "method"


@by_name
@pytest.mark.parametrize("wrong", [None, b"wrong", [None]], ids=repr)
def test_a_wrong_return_is_named(name: str, wrong: Any) -> None:
    if wrong is None and CALLS[name][1] is None:
        pytest.skip("None is what it must return")
    message = (
        rf"Own\.{name}: must return .*, got {type(wrong).__name__.replace('NoneType', 'None')}"
    )
    with pytest.raises(TypeError, match=message):
        CALLS[name][0](group_with(name, lambda self, *arguments: wrong))


@by_name
def test_super_is_what_cpp_does(name: str) -> None:
    """Not the method itself again, for ever."""

    def method(self: Any, *arguments: Any) -> Any:
        return CALLS[name][0](self)

    plain = ProcessGroup(0, 2)
    try:
        expected, error = CALLS[name][0](plain), None
    except Exception as raised:
        expected, error = None, raised
    group = group_with(name, method)
    if error is None:
        assert CALLS[name][0](group) == expected
    else:
        with pytest.raises(type(error)):
            CALLS[name][0](group)


def test_the_newest_name_wins() -> None:
    for names in _C.process_group_methods().values():
        both = [name for name in names if name in CALLS]
        if len(both) < 2 or CALLS[both[0]][1] is not Work:
            continue
        calls: list[str] = []

        def method(name: str, calls: list[str] = calls) -> Any:
            return lambda self, *arguments: calls.append(name) or done(X)

        group = type("Own", (ProcessGroup,), {name: method(name) for name in both})(0, 2)
        for name in both:
            CALLS[name][0](group)
        assert set(calls) == {both[0]}


def test_arguments() -> None:
    seen: list[Any] = []

    class Own(ProcessGroup):
        def allreduce(self, tensors: Any, opts: Any) -> Any:
            seen.append((tensors, opts.reduceOp, opts.timeout))
            return done(*tensors)

        def monitored_barrier(self, timeout: Any, wait_all_ranks: Any) -> None:
            seen.append((timeout, wait_all_ranks))

        def start_coalescing(self, device: Any) -> None:
            seen.append(device)

    options = dist.AllreduceOptions()
    options.reduceOp, options.timeout = dist.ReduceOp.MAX, SECOND
    group = Own(1, 2)
    base.allreduce(group, [X], options)
    base.monitored_barrier(group, SECOND, True)
    base._start_coalescing(group, torch.device("cpu"))
    (tensors, op, timeout), barrier, device = seen
    assert tensors[0] is X and op == dist.ReduceOp.MAX and timeout == SECOND
    assert barrier == (SECOND, True)
    assert device == torch.device("cpu")


def test_what_is_not_defined() -> None:
    group = ProcessGroup(0, 2)
    with pytest.raises(NotImplementedError, match=r"ProcessGroup\.allreduce is not implemented"):
        group.allreduce([X])
    assert (group.rank(), group.size()) == (0, 2)


def test_constructors() -> None:
    class Own(ProcessGroup):
        def __init__(self, store: dist.Store) -> None:
            super().__init__(store, 1, 4)

    group = Own(dist.HashStore())
    assert (group.rank(), group.size()) == (1, 4)
    with pytest.raises(TypeError):
        ProcessGroup("x", 2)  # type: ignore[arg-type]


def test_attributes_are_no_methods() -> None:
    class Own(ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 2)
            self.world = 5  # an attribute of its own

        group_name = property(lambda self: "by a property")

    group = Own()
    assert base.group_name.fget(group) == "by a property"
    assert base.size(group) == 2


# ---- work ----------------------------------------------------------------------------------------

#: What C++ may ask a Work for, and something that it may get.
ANSWERS: dict[str, Any] = {
    "is_completed": True,
    "is_success": False,
    "exception": ValueError("late"),
    "source_rank": 3,
    "result": [X],
    "synchronize": None,
    "wait": True,
    "get_future": torch.futures.Future,
    "abort": None,
    "get_duration": 0.5,
    "get_sequence_number": 9,
}


def ask(work: Any, name: str) -> Any:
    """Ask as C++ does, of what C++ holds."""
    own = {"get_duration": "_get_duration", "source_rank": "_source_rank"}
    return getattr(work, own.get(name, name))()


@pytest.mark.parametrize("parent", [Work, dist.Work], ids=["ours", "torch's"])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_work_is_asked(parent: Any, name: str) -> None:
    answer = ANSWERS[name]
    if answer is torch.futures.Future:
        answer = torch.futures.Future()
        answer.set_result([X])
    own = type("Own", (parent,), {name: lambda self, *timeout: answer})()
    held = _C.held_work(own)
    assert type(held) is dist.Work
    if not hasattr(dist.Work, {"get_duration": "_get_duration"}.get(name, name)):
        return  # this torch has no way to ask
    try:
        got = ask(held, name)
    except TypeError as error:
        if "Unable to convert function return value" in str(error):
            pytest.skip("the binding of this torch cannot tell")
        raise
    if name == "get_future":
        assert got.value() == [X]
    elif name == "exception":
        assert isinstance(got, ValueError) or "late" in str(got)
    elif name == "get_duration":
        assert got == 0.5
    else:
        assert got == answer


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("wrong", [b"wrong", [None]], ids=repr)
def test_a_wrong_answer_is_named(name: str, wrong: Any) -> None:
    asked = {"get_duration": "_get_duration", "source_rank": "_source_rank"}.get(name, name)
    if not hasattr(dist.Work, asked):
        pytest.skip("this torch has no way to ask")
    own = type("Own", (Work,), {name: lambda self, *timeout: wrong})()
    with pytest.raises(TypeError, match=rf"Own\.{name}: must return "):
        getattr(dist.Work, asked)(own)
    with pytest.raises(TypeError, match=rf"Own\.{name}: must return "):
        ask(_C.held_work(own), name)


def test_a_work_with_a_future() -> None:
    future: torch.futures.Future = torch.futures.Future()
    own = type("Own", (Work,), {"get_future": lambda self: future})()
    held = _C.held_work(own)
    assert not held.is_completed()
    threading.Timer(0.05, lambda: future.set_result([X])).start()
    assert held.wait()
    assert held.is_completed() and held.is_success()
    failed: torch.futures.Future = torch.futures.Future()
    failed.set_exception(KeyError("lost"))
    held = _C.held_work(type("Own", (Work,), {"get_future": lambda self: failed})())
    assert held.is_completed() and not held.is_success()
    with pytest.raises(KeyError, match="lost"):
        held.wait()


def test_an_exception_as_python_gets_it() -> None:
    assert Work().exception() is None
    failed: torch.futures.Future = torch.futures.Future()
    own = type("Own", (Work,), {"get_future": lambda self: failed})()
    assert own.exception() is None
    failed.set_exception(KeyError("lost"))
    assert isinstance(own.exception(), KeyError)


def test_a_work_with_nothing() -> None:
    work = Work()
    for method in (work.wait, work.abort, work.get_future):
        with pytest.raises(NotImplementedError, match=rf"Work\.{method.__name__} is not impl"):
            method()


def test_a_work_lives_as_long_as_cpp_needs_it() -> None:
    class Own(Work):
        pass

    own = Own()
    left = weakref.ref(own)
    held = _C.held_work(own)
    del own
    gc.collect()
    assert left() is not None
    del held
    gc.collect()
    assert left() is None


def test_works_and_groups_are_dropped() -> None:
    class Own(ProcessGroup):
        def allreduce(self, tensors: Any, opts: Any) -> Any:
            return done(*tensors)

    group = Own(0, 1)
    base.allreduce(group, [X], dist.AllreduceOptions()).wait()
    left = weakref.ref(group)
    del group
    gc.collect()
    assert left() is None


def test_the_example_in_the_docs() -> None:
    text = (Path(__file__).parents[1] / "docs" / "process_groups.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    group, x = names["group"], torch.arange(3.0)
    assert base.allreduce(group, [x], dist.AllreduceOptions()).wait()
    output = torch.empty(6)
    assert base._allgather_base(group, output, x).wait()
    assert output.tolist() == [0, 1, 2, 0, 1, 2]


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_ten_thousand_groups_and_works_leave_nothing() -> None:
    class Waits(Work):
        def wait(self, timeout: timedelta) -> bool:
            return True

    class Own(ProcessGroup):
        def allreduce(self, tensors: Any, opts: Any) -> Any:
            return Waits()

    def cycles(count: int) -> int:
        for _ in range(count):
            group = Own(0, 1)
            base._set_group_name(group, "group")
            assert base.allreduce(group, [X], dist.AllreduceOptions()).wait()
        gc.collect()
        return _resident()

    before = cycles(2_000)
    assert cycles(10_000) - before < 1 << 20
