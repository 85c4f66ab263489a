"""A group or a Work in Python that returns nonsense or raises: a Python exception, on every way.

Each case runs in a process that the test run survives: this is where PyTorch ends the process.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from group_calls import ANSWERS, CALLS, X, ask, group_with
from group_doubles import completed
from rank_pool import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import ProcessGroup, Work, attach, hooks
from torch_commhook.process_group import register

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

    methods = {
        "broadcast": good,
        "allgather": allgather,
        "all_gather_single": all_gather_single,
        "allreduce": good,
        method: call,
    }
    return type("Own", (ProcessGroup,), methods)(0, 2)


FUNCTIONAL: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda group: functional.all_reduce(X, "sum", group),
    "broadcast": lambda group: functional.broadcast(X, 0, group),
    "all_gather_single": lambda group: functional.all_gather_tensor(X, 0, group),
    "reduce_scatter_single": lambda group: functional.reduce_scatter_tensor(X, "sum", 0, group),
    "all_to_all_single": lambda group: functional.all_to_all_single(X, [1, 1], [1, 1], group),
    "allreduce_coalesced": lambda group: functional.all_reduce_coalesced([X], "sum", group)[0],
}


def _functional(rank: int, method: str, where: str, what: str) -> tuple[str, str]:
    # PyTorch asks for the coalesced method of one tensor, in some versions.
    coalesced = {
        "all_gather_single": "all_gather_single_coalesced",
        "reduce_scatter_single": "reduce_scatter_single_coalesced",
    }
    group: Any = _group_of(method, where, what)
    if method in coalesced:
        setattr(type(group), coalesced[method], getattr(type(group), method))
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
    return _step(road, _group_of("allreduce", where, what))


def _step(road: str, group: Any) -> tuple[str, str]:
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


def _model_with_a_late_error(rank: int, road: str) -> tuple[str, str]:
    future: torch.futures.Future = torch.futures.Future()
    future.set_exception(OwnError("boo"))
    kind = type(_group_of("allreduce", "allreduce", "None"))
    late = type("Late", (kind,), {"allreduce": lambda self, *arguments: future})
    return _step(road, late(0, 2))


@pytest.mark.parametrize("road", ["DDP", "module"])
def test_a_future_with_an_exception(process: RankPool, road: str) -> None:
    """What Python sets as a Future's exception is a value to C++."""
    ((kind, message),) = process.run(_model_with_a_late_error, road)
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
