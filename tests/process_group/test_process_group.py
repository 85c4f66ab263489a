"""ProcessGroup and Work in Python: every virtual method that C++ calls, and what one may return.

Nonsense and errors become Python exceptions, on every way. These cases run in a process that the
test run survives: this is where PyTorch ends the process.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from group_calls import ANSWERS, CALLS, SECOND, X, ask, base, done, good, group_with
from group_doubles import DoneWork, completed
from rank_pool import RankPool
from repository import ROOT
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_leaves

from torch_commhook import _C, ProcessGroup, Work, attach, hooks
from torch_commhook.process_group import (
    FaultyProcessGroup,
    RecordingProcessGroup,
    WrapperProcessGroup,
    register,
)

INCLUDE = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
by_name = pytest.mark.parametrize("name", CALLS)


def virtual_methods(header: str) -> set[str]:
    text = (INCLUDE / header).read_text()
    return set(re.findall(r"\bvirtual\b[^;{(]*?(\w+)\(", text)) - {"ProcessGroup", "Work"}


# ---- the surface ---------------------------------------------------------------------------------


def test_every_virtual_method_can_be_overridden() -> None:
    assert set(_C.process_group_methods()) == virtual_methods("ProcessGroup.hpp")
    assert set(_C.work_methods()) == virtual_methods("Work.hpp")


@by_name
def test_it_is_called(name: str) -> None:
    calls: list[tuple[Any, ...]] = []
    expected = good(name)

    def method(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        return expected

    if name == "new_window":
        pytest.skip("a window cannot be made without a backend")
    got = CALLS[name][0](group_with(name, method))
    assert len(calls) == 1
    given, passed = (
        [each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)]
        for arguments in (CALLS[name][2], calls)
    )
    assert len(passed) == len(given) and all(each is X for each in passed)
    if CALLS[name][1] is Work:
        assert got.wait() and got.is_completed() and got.is_success()
        assert got.get_future().value() == [X]
    elif CALLS[name][1] is ProcessGroup:
        assert got is expected
    else:
        assert got == expected


@by_name
def test_super_is_what_cpp_does(name: str) -> None:
    """Not the method itself again, for ever."""
    if name.startswith(("register_", "supports_abort", "supports_completion")):
        pytest.skip("hooks are kept in Python, where super() leads to ProcessGroup's own method")

    group = group_with(name, lambda self, *arguments: CALLS[name][0](self))
    try:
        expected = CALLS[name][0](ProcessGroup(0, 2))
    except Exception as error:
        with pytest.raises(type(error)):
            CALLS[name][0](group)
    else:
        assert CALLS[name][0](group) == expected


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


def test_an_old_name_in_a_derived_class() -> None:
    calls = []

    class Derived(WrapperProcessGroup):
        def _allgather_base(self, output: Any, input: Any, *opts: Any) -> Any:
            calls.append("derived")
            return super()._allgather_base(output, input, *opts)

    class Parent(ProcessGroup):
        def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
            calls.append("parent")
            return done(X)

    group = Derived(Parent(0, 1))
    for call in (group.all_gather_single, group._allgather_base):
        call(X, X)
    base._allgather_base(group, X, X)
    assert calls == ["derived", "parent"] * 3


def test_before_its_constructor_has_run() -> None:
    """PyTorch's own classes end the process here."""

    class Early(ProcessGroup):
        def __init__(self) -> None:
            self.world = self.size()

    for call in (Early, lambda: Work.__new__(Work).wait(), lambda: Early.__new__(Early).rank()):
        with pytest.raises(TypeError, match=r"super\(\).__init__\(\) must be called first"):
            call()


# ---- work ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parent", [Work, dist.Work], ids=["ours", "torch's"])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_work_is_asked(parent: Any, name: str) -> None:
    answer = ANSWERS[name]
    if answer is torch.futures.Future:
        answer = completed([X])
    own = type("Own", (parent,), {name: lambda self, *timeout: answer})()
    assert type(_C.held_work(own)) is dist.Work
    got = ask(own, name)
    if "future" in name:
        assert got.value() == [X]
    elif name == "exception":
        assert got is answer
    else:
        assert got == answer


def work_of(future: torch.futures.Future) -> Any:
    return type("Own", (Work,), {"get_future": lambda self: future})()


def test_a_work_with_a_future() -> None:
    future: torch.futures.Future = torch.futures.Future()
    own = work_of(future)
    held = _C.held_work(own)
    assert not held.is_completed() and own.exception() is None
    with pytest.raises(RuntimeError, match=r"Own\.result: the work has not completed"):
        own.result()
    threading.Timer(0.05, lambda: future.set_result([X])).start()
    assert held.wait()
    assert held.is_completed() and held.is_success()


def test_a_work_whose_future_fails() -> None:
    future: torch.futures.Future = torch.futures.Future()
    own = work_of(future)
    assert own.exception() is None
    future.set_exception(KeyError("lost"))
    held = _C.held_work(own)
    assert held.is_completed() and not held.is_success()
    assert isinstance(own.exception(), KeyError)
    with pytest.raises(KeyError, match="lost"):
        held.wait()


def test_wait_is_called_with_its_timeout_or_without() -> None:
    """As C++ calls it, and as PyTorch's functions do in Python."""
    seen = []

    class Own(Work):
        def wait(self, timeout: timedelta) -> bool:
            seen.append(timeout)
            return True

    own = Own()
    assert own.wait() and own.wait(SECOND) and own.wait(timeout=SECOND)
    assert _C.held_work(own).wait()
    assert seen == [timedelta(0), SECOND, SECOND, timedelta(0)]
    assert own.is_completed()


def test_ctrl_c_ends_a_wait() -> None:
    code = """
import _thread, signal, threading, torch
from torch_commhook import Work
# What a shell starts in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
future = torch.futures.Future()
own = type("Own", (Work,), {"get_future": lambda self: future})()
threading.Timer(0.2, _thread.interrupt_main).start()
try:
    own.wait()
except KeyboardInterrupt:
    print("interrupted")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "interrupted\n", ran.stderr


def test_a_work_with_nothing() -> None:
    assert Work().exception() is None
    work = type("Own", (Work,), {})()
    for method in (work.wait, work.abort, work.get_future, work.result):
        with pytest.raises(NotImplementedError, match=rf"Own\.{method.__name__} is not impl"):
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


def test_the_example_in_the_docs() -> None:
    text = (ROOT / "docs" / "process_groups.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    group, x = names["group"], torch.arange(3.0)
    assert base.allreduce(group, [x], dist.AllreduceOptions()).wait()
    output = torch.empty(6)
    assert base._allgather_base(group, output, x).wait()
    assert output.tolist() == [0, 1, 2, 0, 1, 2]


def _hooked(parent: Any) -> Any:
    group = WrapperProcessGroup(parent)
    group.register_completion_hook(1, lambda args: group.size())  # a cycle
    return group


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "around",
    [lambda parent: parent, _hooked, RecordingProcessGroup, FaultyProcessGroup],
    ids=["plain", "hooked", "recording", "faulty"],
)
def test_ten_thousand_groups_and_works_leave_nothing(around: Any) -> None:
    class Own(ProcessGroup):
        def allreduce(self, tensors: Any, opts: Any) -> Any:
            return DoneWork()

    def cycles(count: int) -> int:
        for _ in range(count):
            group = around(Own(0, 1))
            base._set_group_name(group, "group")
            assert base.allreduce(group, [X], dist.AllreduceOptions()).wait()
            assert group.allreduce([X], dist.AllreduceOptions()).wait(timedelta(1))
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096  # what is resident

    before = cycles(2_000)
    # A leak grows in each round; what other threads of this process take does not.
    for _ in range(5):
        after = cycles(10_000)
        if after - before < 1 << 20:
            return
        before = after
    pytest.fail(f"{after} bytes after five rounds that each took another 2**20")


# ---- wrong results and errors --------------------------------------------------------------------

#: What a method does instead.
WRONG: dict[str, Any] = {"None": None, "bytes": b"wrong", "list": [None], "raises": ...}


class OwnError(Exception):
    pass


def misbehaving(what: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any) -> Any:
        if what == "raises":
            raise OwnError("boo")
        return WRONG[what]

    return method


def caught(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        value = call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "returned", repr(value)


def in_a_thread(call: Callable[[], Any]) -> tuple[str, str]:
    found: list[tuple[str, str]] = []
    thread = threading.Thread(target=lambda: found.append(caught(call)))
    thread.start()
    thread.join()
    return found[0]


THREADS = {"main thread": caught, "other thread": in_a_thread}


@pytest.fixture(scope="module")
def process() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.stop()


def check(found: tuple[str, str], what: str, method: str) -> None:
    kind, message = found
    if what == "raises":
        assert (kind, message) == ("OwnError", "boo")
    else:
        got = {"None": "None", "bytes": "bytes", "list": "(a )?list|one with None"}[what]
        assert kind == "TypeError"
        assert re.search(rf"{method}: must return .*, got ({got})", message), message


# ---- each method of a group, as C++ calls it -----------------------------------------------------


def _group(rank: int, name: str, what: str, thread: str) -> tuple[str, str]:
    group = group_with(name, misbehaving(what))
    return THREADS[thread](lambda: CALLS[name][0](group))


@pytest.mark.parametrize("thread", THREADS)
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("name", CALLS)
def test_methods_of_a_group(process: RankPool, name: str, what: str, thread: str) -> None:
    (found,) = process.run(_group, name, what, thread)
    if what == "None" and CALLS[name][1] is None and name != "new_window":
        assert found == ("returned", "None")
    else:
        check(found, what, rf"Own\.{name}")


def _work(rank: int, name: str, what: str, thread: str, parent: str) -> tuple[str, str]:
    base = Work if parent == "ours" else dist.Work
    own = type("Own", (base,), {name: misbehaving(what)})()
    return THREADS[thread](lambda: ask(own, name))


@pytest.mark.parametrize("parent", ["ours", "torch's"])
@pytest.mark.parametrize("thread", THREADS)
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("name", ANSWERS)
def test_methods_of_a_work(
    process: RankPool, name: str, what: str, thread: str, parent: str
) -> None:
    (found,) = process.run(_work, name, what, thread, parent)
    if what == "None" and (ANSWERS[name] is None or name == "exception"):
        assert found == ("returned", "None")
    elif what == "list" and name == "result":
        assert found[0] == "TypeError" and "got one with None" in found[1]
    else:
        check(found, what, rf"Own\.{name}")


# ---- on the ways that PyTorch takes --------------------------------------------------------------


class _Good(Work):
    def get_future(self) -> Any:
        return completed([X])


def _group_of(method: str, where: str, what: str) -> ProcessGroup:
    """A group whose method misbehaves, or whose Work's method does."""

    def call(self: Any, *arguments: Any) -> Any:
        if where == method:
            return misbehaving(what)(self)
        return type("OwnWork", (_Good,), {where: misbehaving(what)})()

    def good(self: Any, *arguments: Any) -> Any:
        return _Good()

    def allgather(self: Any, outputs: Any, inputs: Any, *options: Any) -> Any:
        for output in outputs[0]:
            output.copy_(inputs[0])
        return _Good()

    def all_gather_single(self: Any, output: Any, input: Any, *options: Any) -> Any:
        output.copy_(input.repeat(2))
        return _Good()

    methods = {"allgather": allgather, "all_gather_single": all_gather_single, "allreduce": good}
    return type("Own", (ProcessGroup,), {"broadcast": good, **methods, method: call})(0, 2)


FUNCTIONAL: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda group: functional.all_reduce(X, "sum", group),
    "broadcast": lambda group: functional.broadcast(X, 0, group),
    "all_gather_single": lambda group: functional.all_gather_tensor(X, 0, group),
    "reduce_scatter_single": lambda group: functional.reduce_scatter_tensor(X, "sum", 0, group),
    "all_to_all_single": lambda group: functional.all_to_all_single(X, [1, 1], [1, 1], group),
    "allreduce_coalesced": lambda group: functional.all_reduce_coalesced([X], "sum", group)[0],
}


def _functional(rank: int, method: str, where: str, what: str) -> tuple[str, str]:
    group: Any = _group_of(method, where, what)
    # PyTorch asks for the coalesced method of one tensor, in some versions.
    if method in ("all_gather_single", "reduce_scatter_single"):
        setattr(type(group), f"{method}_coalesced", getattr(type(group), method))
    register(group, "misused")
    try:
        # The Work is waited for when its tensor is used.
        return caught(lambda: FUNCTIONAL[method](group).sum().item())
    finally:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("where", ["the method", "wait"])
@pytest.mark.parametrize("method", FUNCTIONAL)
def test_functional_collectives(process: RankPool, method: str, where: str, what: str) -> None:
    (found,) = process.run(_functional, method, method if where == "the method" else where, what)
    named = rf"Own\.{method}(_coalesced)?" if where == "the method" else r"OwnWork\.wait"
    check(found, what, named)


def _model(rank: int, road: str, where: str, what: str) -> tuple[str, str]:
    group = _group_of("allreduce", where, what)
    if what == "late error":
        future: torch.futures.Future = torch.futures.Future()
        future.set_exception(OwnError("boo"))
        group = type("Late", (type(group),), {"allreduce": lambda *arguments: future})(0, 2)
    register(group, "misused")
    try:
        model: Any = nn.Linear(4, 1)
        if road == "DDP":
            model = DDP(model, process_group=group, init_sync=False)
        else:
            attach(model, hooks.allreduce(), process_group=group, init_sync=False)
        return caught(lambda: model(torch.ones(4)).sum().backward())
    finally:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("road", ["DDP", "module"])
def test_a_future_with_an_exception(process: RankPool, road: str) -> None:
    """What Python sets as a Future's exception is a value to C++."""
    ((kind, message),) = process.run(_model, road, "allreduce", "late error")
    assert kind == "OwnError" and message == "boo"


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("where", ["allreduce", "get_future"])
@pytest.mark.parametrize("road", ["DDP", "module"])
def test_models(process: RankPool, road: str, where: str, what: str) -> None:
    (found,) = process.run(_model, road, where, what)
    named = r"Own\.allreduce" if where == "allreduce" else r"OwnWork\.get_future"
    kind, message = found
    if what == "raises":
        assert "boo" in message and kind in ("OwnError", "RuntimeError")
    else:
        assert kind in ("TypeError", "RuntimeError")
        assert re.search(rf"{named}.* must return ", message), message
