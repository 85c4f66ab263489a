"""Hooks of process groups: each once for each operation, whoever calls it, and nothing lost."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from group_calls import group_with
from group_doubles import DoneWork, completed, wait_until
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook.process_group import (
    CompletionHookArgs,
    HookOpName,
    PostHookArgs,
    PreHookArgs,
    ProcessGroup,
    Work,
    WrapperProcessGroup,
    register,
)

SUM = dist.AllreduceOptions()


class Alone(ProcessGroup):
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return completed(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return DoneWork()

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        raise ValueError("no gathering")

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return completed(None)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        pass


class Log:
    def __init__(self, group: ProcessGroup) -> None:
        self.pre: list[PreHookArgs] = []
        self.post: list[PostHookArgs] = []
        self.completed: list[CompletionHookArgs] = []
        group.register_pre_hook(1, self.pre.append)
        group.register_post_hook(1, self.post.append)
        group.register_completion_hook(1, self.completed.append)

    def counts(self) -> tuple[int, int, int]:
        return len(self.pre), len(self.post), len(self.completed)


@pytest.fixture
def group() -> Alone:
    return Alone(0, 1)


@pytest.fixture
def log(group: Alone) -> Log:
    return Log(group)


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: seen.append(told.exc_value))
    yield seen


WAYS = {
    "in Python": lambda group, x: group.allreduce([x], SUM),
    "from C++": lambda group, x: dist.ProcessGroup.allreduce(group, [x], SUM),
}
both_ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@both_ways
def test_what_hooks_are_told(way: Any) -> None:
    group, x = Alone(0, 1), torch.ones(2, 3)
    log = Log(group)
    work = way(group, x)
    assert work.wait()
    (pre,), (post,), (completed,) = log.pre, log.post, log.completed
    assert (pre.name, pre.operation, pre.root) == (HookOpName.ALLREDUCE, "allreduce", -1)
    assert pre.input_tensors[0] is x and pre.output_tensors[0] is x and pre.async_op
    assert isinstance(post.work, dist.Work) and post.work.is_completed()
    assert pre.op_id == post.op_id == completed.op_id
    assert (completed.sizes, completed.dtype, completed.nbytes) == (((2, 3),), torch.float32, 24)
    assert completed.error is None and completed.start <= completed.end
    assert completed.duration_ms == pytest.approx((completed.end - completed.start) * 1e3)
    assert completed.completion_key != 0


@both_ways
def test_super_is_no_second_operation(way: Any) -> None:
    calls = []

    class Own(Alone):
        def allreduce(self, tensors: Any, opts: Any = None) -> Any:
            calls.append("own")
            return super().allreduce(tensors, opts)

    group = Own(0, 1)
    log = Log(group)
    way(group, torch.ones(2)).wait()
    assert calls == ["own"] and log.counts() == (1, 1, 1)


@both_ways
def test_super_of_a_group_with_a_backend(way: Any, one_rank: None) -> None:
    calls = []

    class Own(ProcessGroup):
        def allreduce(self, tensors: Any, opts: Any = None) -> Any:
            calls.append("own")
            return super().allreduce(tensors, opts)

    store = dist.HashStore()
    group, x = Own(store, 0, 1), torch.ones(2)
    gloo = dist.ProcessGroupGloo(store, 0, 1)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    assert way(group, x).wait()
    assert calls == ["own"]
    log = Log(group)
    assert way(group, x).wait()
    assert calls == ["own"] * 2 and log.counts() == (1, 1, 1)
    work = group.broadcast([x], dist.BroadcastOptions())  # all of it in C++
    assert work.wait()
    assert log.counts() == (2, 2, 2) and log.pre[1].name == HookOpName.BROADCAST


def test_work_that_calls_super() -> None:
    calls = []

    class Own(Work):
        def get_future(self) -> torch.futures.Future:
            return completed(None)

        def wait(self, *timeout: Any) -> bool:
            calls.append("own")
            return super().wait(*timeout)

    assert Own().wait()
    assert calls == ["own"]


def test_order_and_ids() -> None:
    group, order = Alone(0, 1), []
    for hook_id in (3, -1, 2):
        group.register_pre_hook(hook_id, lambda args, hook_id=hook_id: order.append(hook_id))
    group.allreduce([torch.ones(1)])
    assert order == [-1, 2, 3]
    group.unregister_pre_hook(2)
    group.unregister_pre_hook(77)
    group.register_pre_hook(3, lambda args: order.append(33))
    group.allreduce([torch.ones(1)])
    assert order[3:] == [-1, 33]
    assert group._hooked
    group.unregister_pre_hook(-1)
    group.unregister_pre_hook(3)
    assert not group._hooked  # and calls cost nothing again


def test_errors_of_hooks_come_out() -> None:
    group, x = Alone(0, 1), torch.ones(1)
    log = Log(group)

    def refuse(args: Any) -> None:
        raise KeyError(args.operation)

    group.register_pre_hook(2, refuse)
    with pytest.raises(KeyError, match="allreduce"):
        group.allreduce([x])
    assert log.counts() == (1, 0, 0)  # it was not issued
    group.unregister_pre_hook(2)
    group.register_post_hook(2, refuse)
    with pytest.raises(KeyError, match="allreduce"):
        dist.ProcessGroup.allreduce(group, [x], SUM)
    assert log.counts() == (2, 1, 1)


def test_errors_after_completion_are_reported(
    unraisable: list[Any], group: Alone, log: Log
) -> None:
    def fail(args: Any) -> None:
        raise KeyError("mine")

    group.register_completion_hook(0, fail)
    assert group.allreduce([torch.ones(1)]).wait()
    assert [type(error) for error in unraisable] == [KeyError]
    assert log.counts() == (1, 1, 1)  # the others are told all the same


def test_a_method_that_fails(group: Alone, log: Log) -> None:
    with pytest.raises(ValueError, match="no gathering"):
        group.all_gather_single(torch.ones(2), torch.ones(2))
    assert log.counts() == (1, 0, 1)
    assert isinstance(log.completed[0].error, ValueError)
    assert log.completed[0].sizes == ((2,),)


def test_a_future_that_fails() -> None:
    future: torch.futures.Future = torch.futures.Future()
    future.set_exception(OSError("cable"))
    group = group_with("allreduce", lambda self, *arguments: future)
    log = Log(group)
    group.allreduce([torch.ones(1)])
    assert isinstance(log.completed[0].error, OSError)


def test_a_future_completes_later() -> None:
    future: torch.futures.Future = torch.futures.Future()
    group = group_with("allreduce", lambda self, *arguments: future)
    log = Log(group)
    work = group.allreduce([torch.ones(1)])
    assert log.counts() == (1, 1, 0) and not work.is_completed()
    thread = threading.Thread(target=future.set_result, args=(None,))
    thread.start()
    thread.join()
    assert work.wait() and log.counts() == (1, 1, 1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_work_with_nothing_but_wait(device: str, group: Alone, log: Log) -> None:
    work = group.broadcast([torch.ones(1, device=device)])
    assert not work.is_completed()
    assert work.wait() and work.is_completed()
    wait_until(lambda: log.completed)


def test_work_without_a_future_tells_when_it_is_waited_for(group: Alone, log: Log) -> None:
    work = group.broadcast([torch.ones(1)])
    assert log.counts() == (1, 1, 0)
    assert work.wait() and work.wait()
    assert log.counts() == (1, 1, 1)
    dist.ProcessGroup.broadcast(group, [torch.ones(1)], dist.BroadcastOptions()).wait()
    assert log.counts() == (2, 2, 2)


@pytest.mark.parametrize("fails", [False, True])
def test_work_on_an_accelerator_is_asked(fails: bool) -> None:
    """Its Future is complete too early. ``meta`` stands for a device here."""
    flag = threading.Event()

    class Late(Work):
        def get_future(self) -> torch.futures.Future:
            return completed(None)

        def is_completed(self) -> bool:
            return flag.is_set()

        def is_success(self) -> bool:
            return not fails

    group = group_with("allreduce", lambda self, *arguments: Late())
    log = Log(group)
    group.allreduce([torch.ones(1, device="meta")])
    time.sleep(0.01)
    assert not log.completed
    flag.set()
    wait_until(lambda: log.completed)
    wait_until(lambda: not any(t.name == "commhook-completion" for t in threading.enumerate()))
    assert (log.completed[0].error is not None) == fails


def test_what_returns_no_work(group: Alone, log: Log) -> None:
    group.monitored_barrier()
    assert log.counts() == (1, 1, 1) and log.post[0].work is None
    assert log.pre[0].name == HookOpName.BARRIER
    group.send([torch.ones(4)], 3, 0).wait()
    assert log.pre[1].root == 3 and log.pre[1].output_tensors == []


def test_no_operation_has_no_hooks(group: Alone, log: Log) -> None:
    assert (group.rank(), group.size(), group.name()) == (0, 1, "custom")
    assert log.counts() == (0, 0, 0)


def test_abort(unraisable: list[Any]) -> None:
    order: list[str] = []

    class Own(ProcessGroup):
        def abort(self) -> None:
            order.append("abort")

    for group in (Own(0, 1), ProcessGroup(0, 1)):
        order.clear()
        group.register_abort_hook(1, lambda: order.append("hook"))
        group.register_abort_hook(2, lambda: order.append(str(1 / 0)))
        group.abort()
        assert order == ["hook", "abort"][: 1 + isinstance(group, Own)]
        dist.ProcessGroup.abort(group)
        assert order.count("hook") == 2
    assert {type(error) for error in unraisable} == {ZeroDivisionError}
    assert group.supports_abort_hooks and group.supports_completion_hooks


def test_pytorchs_older_interface() -> None:
    group, told = Alone(0, 1), []
    assert not group._has_hooks()
    group._register_on_completion_hook(told.append)
    assert group._has_hooks()
    group.allreduce([torch.ones(1)])
    (info,) = told
    assert info.op_type == "ALLREDUCE" and info.seq == 0
    assert info.time_finished - info.time_started == info.active_duration
    with pytest.raises(RuntimeError, match="there is a hook already"):
        group._register_on_completion_hook(told.append)


@pytest.mark.parametrize("kind", ["pre", "post", "completion", "abort"])
def test_bad_registrations(kind: str, group: Alone) -> None:
    add = getattr(group, f"register_{kind}_hook")
    with pytest.raises(TypeError, match=f"register_{kind}_hook: hook_id must be an int, got str"):
        add("1", print)
    with pytest.raises(TypeError, match=f"register_{kind}_hook: hook must be callable, got None"):
        add(1, None)
    with pytest.raises(ValueError, match=f"register_{kind}_hook: hook_id must be an int of 64"):
        add(1 << 64, print)
    assert not group._hooked


def test_what_a_hook_calls_is_done_and_not_told() -> None:
    """In Python as well as by C++, where the hook's group is in the midst of the same method."""

    class Own(ProcessGroup):
        def allreduce(self, tensors: Any, opts: Any = None) -> Any:
            for tensor in tensors:
                tensor.add_(9)
            return completed(tensors)

    group, found, told = Own(0, 1), [], []

    def hook(args: Any) -> None:
        told.append(args.operation)
        for way in WAYS.values():
            x = torch.ones(1)
            way(group, x)
            found.append(x.item())

    group.register_pre_hook(1, hook)
    group.register_completion_hook(1, hook)
    group.allreduce([torch.ones(1)])
    assert told == ["allreduce"] * 2 and found == [10.0] * 4


def test_methods_of_a_mixin() -> None:
    calls = []

    class Mixin:
        def allreduce(self, tensors: Any, opts: Any = None) -> Any:
            calls.append("mixin")
            return super().allreduce(tensors, opts)  # type: ignore[misc]

    class Own(Mixin, Alone):
        pass

    group = Own(0, 1)
    log = Log(group)
    for way in WAYS.values():
        assert way(group, torch.ones(1)).wait()
    assert calls == ["mixin"] * 2 and log.counts() == (2, 2, 2)


def test_methods_that_are_no_functions_have_hooks_from_cpp() -> None:
    method = functools.partialmethod(lambda self, tensors, opts: completed(tensors))
    group = group_with("allreduce", method)
    log = Log(group)
    assert WAYS["from C++"](group, torch.ones(1)).wait()
    assert log.counts() == (1, 1, 1)


def test_around_gloo(one_rank: None) -> None:
    """Functions of torch.distributed, functional collectives and DDP, each operation once."""
    group = WrapperProcessGroup(dist.group.WORLD)
    register(group, "hooked")
    try:
        log = Log(group)
        x = torch.arange(4.0)
        dist.all_reduce(x, group=group)
        functional.all_reduce(x, "sum", group).wait()
        dist.barrier(group=group)
        assert [args.name.name for args in log.pre] == ["ALLREDUCE", "ALLREDUCE", "BARRIER"]
        assert log.counts() == (3, 3, 3)
        assert not log.pre[0].async_op
        model = DDP(nn.Linear(4, 1), process_group=group)
        before = len(log.pre)
        model(x).sum().backward()
        assert [args.operation for args in log.pre[before:]] == ["allreduce"]
        assert log.completed[-1].nbytes == 20 and log.completed[-1].error is None
    finally:
        dist.destroy_process_group(group)


class TestFromCpp:
    """torch 2.14 and newer register hooks in C++, its own diagnostics among them."""

    pytestmark = pytest.mark.skipif(
        not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="this torch has no such hooks"
    )

    def test_pytorchs_binding_leads_here(self) -> None:
        group, told = Alone(0, 1), []
        base: Any = dist.ProcessGroup
        base.register_pre_hook(group, 5, lambda args: told.append((args.name.name, args.op_id)))
        base.register_post_hook(group, 5, lambda args: told.append(args.work.is_completed()))
        group.allreduce([torch.ones(1)])
        dist.ProcessGroup.allreduce(group, [torch.ones(1)], SUM)
        assert told == [("ALLREDUCE", 0), True, ("ALLREDUCE", 1), True]
        base.unregister_pre_hook(group, 5)
        base.unregister_post_hook(group, 5)
        assert not group._hooked
        base.register_abort_hook(group, 1, lambda: told.append("abort"))
        group.abort()
        assert told[-1] == "abort"
        base.unregister_abort_hook(group, 1)
        assert not group._hooked
