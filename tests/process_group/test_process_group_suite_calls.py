"""PyTorch's tests of how a method of a group in Python is called, on ours.

PyTorch's bindings take short forms, of a tensor, a rank or an operation where the method has lists
and options. C++ gives the method lists and options, whoever has called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from group_doubles import completed, default_group
from torch._C._distributed_c10d import FakeProcessGroup

from torch_commhook import ProcessGroup
from torch_commhook.process_group import WrapperProcessGroup

base: Any = dist.ProcessGroup
SECONDS = timedelta(seconds=5)
UNSET = timedelta(milliseconds=-1)
MAX, MIN, SUM = dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.SUM


class Noting(ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(store, rank, size)
        self.calls: list[Any] = []  # the names and arguments, in their order

    def only_call(self, name: str) -> tuple[Any, ...]:
        """The arguments of the only call since the last time."""
        ((called, *arguments),) = self.calls
        self.calls.clear()
        assert called == name
        return tuple(arguments)


def noted(name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        self.calls.append((name, *arguments, *keywords.values()))
        return completed([])

    return method


ALL_TO_ALL = "all_to_all_single" if hasattr(base, "all_to_all_single") else "alltoall_base"
NOTED = (
    "allgather",
    "allreduce",
    ALL_TO_ALL,
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)


Canonical = type("Canonical", (Noting,), {name: noted(name) for name in NOTED})

X, Y, Z = torch.ones(2), torch.zeros(2), torch.full((2,), 3.0)


#: By a short form: the lists that the method gets, and parts of its options.
SHORT: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "allreduce(X, op=MAX)": (([X],), {"reduceOp": MAX, "timeout": UNSET}),
    "allreduce(X, MIN, SECONDS)": (([X],), {"reduceOp": MIN, "timeout": SECONDS}),
    "allreduce([X], MAX)": (([X],), {"reduceOp": MAX}),
    "allreduce([X])": (([X],), {"reduceOp": SUM, "timeout": UNSET}),
    "broadcast(X, 1, SECONDS)": (([X],), {"rootRank": 1, "timeout": SECONDS}),
    "reduce(X, root=1, op=MAX)": (([X],), {"rootRank": 1, "reduceOp": MAX}),
    "allgather([Y, Z], X, timeout=SECONDS)": (([[Y, Z]], [X]), {"timeout": SECONDS}),
    "gather([Y, Z], X, 0)": (([[Y, Z]], [X]), {"rootRank": 0}),
    "gather([], X, root=1)": (([], [X]), {"rootRank": 1}),
    "scatter(X, [Y, Z], 0)": (([X], [[Y, Z]]), {"rootRank": 0}),
    "scatter(X, [], root=1)": (([X], []), {"rootRank": 1}),
    "reduce_scatter(X, [Y, Z], op=MAX)": (([X], [[Y, Z]]), {"reduceOp": MAX}),
    "all_to_all_single(Y, X, [1, 1], [1, 1], SECONDS)": (
        (Y, X, [1, 1], [1, 1]),
        {"timeout": SECONDS},
    ),
    "barrier(timeout=SECONDS)": ((), {"timeout": SECONDS}),
    "barrier()": ((), {"timeout": UNSET}),
}


def method_of(form: str) -> str:
    name = form.partition("(")[0]
    return ALL_TO_ALL if name == "all_to_all_single" else name


def same(got: Any, expected: Any) -> bool:
    """Whether two nested lists hold the same tensors, and otherwise equal values."""
    if isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(same, got, expected))
    return got is expected if isinstance(expected, torch.Tensor) else got == expected


@pytest.mark.parametrize("form", SHORT)
def test_a_short_form(form: str) -> None:
    lists, options = SHORT[form]
    group, name = Canonical(None, 0, 2), form.partition("(")[0]
    method = functools.partial(getattr(base, method_of(form)), group)
    assert eval(form, {**globals(), name: method}).wait()
    *got, opts = group.only_call(method_of(form))
    assert same(got, lists)
    assert {part: getattr(opts, part) for part in options} == options


def test_lists_and_options_are_passed_on() -> None:
    group = Canonical(None, 0, 2)
    options: Any = dist.AllreduceOptions()
    options.reduceOp, options.timeout = MAX, SECONDS
    for call in (
        lambda: base.allreduce(group, [X], options),
        lambda: base.allreduce(group, [X], opts=options),
        lambda: group.allreduce([X], options),
    ):
        call().wait()
        tensors, got = group.only_call("allreduce")
        assert same(tensors, [X])
        assert (got.reduceOp, got.timeout) == (MAX, SECONDS)
    group.allreduce([X], options).wait()
    assert group.only_call("allreduce")[1] is options  # Python's own call is not looked at
    base.barrier(group, dist.BarrierOptions()).wait()
    (got,) = group.only_call("barrier")
    assert isinstance(got, dist.BarrierOptions)


#: By a call: the method that it reaches, and parts of the options.
CALLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dist.all_reduce(X, op=MAX)": ("allreduce", {"reduceOp": MAX}),
    "dist.broadcast(X, src=1)": ("broadcast", {"rootRank": 1}),
    "dist.reduce(X, dst=1)": ("reduce", {"rootRank": 1}),
    "dist.all_gather([Y, Z], X)": ("allgather", {}),
    "dist.gather(X, [Y, Z], dst=0)": ("gather", {"rootRank": 0}),
    "dist.scatter(X, [Y, Z], src=0)": ("scatter", {"rootRank": 0}),
    "dist.reduce_scatter(X, [Y, Z])": ("reduce_scatter", {}),
    "dist.all_to_all_single(Y, X)": (ALL_TO_ALL, {}),
    "dist.barrier()": ("barrier", {}),
    "functional.all_reduce(X, 'max', group).tolist()": ("allreduce", {"reduceOp": MAX}),
    "functional.broadcast(X, 1, group).tolist()": ("broadcast", {"rootRank": 1}),
    "functional.all_to_all_single(X, [1, 1], [1, 1], group).tolist()": (ALL_TO_ALL, {}),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_functions_of_torch_distributed(caller: str) -> None:
    name, options = CALLERS[caller]
    with default_group(Canonical) as group:
        eval(caller, {**globals(), "group": group})
        *lists, opts = group.only_call(name)
        assert {part: getattr(opts, part) for part in options} == options
        if name == ALL_TO_ALL and caller.startswith("functional"):
            assert lists[2:] == [[1, 1], [1, 1]]


def test_a_method_with_forms_of_its_own() -> None:
    class Own(Noting):
        def allreduce(self, *arguments: Any, **keywords: Any) -> Any:
            self.calls.append(("allreduce", *arguments, keywords))
            return completed([])

        def broadcast(self, tensors: Any, options: Any = None) -> Any:
            self.calls.append(("broadcast", tensors, options))
            return completed([])

        def barrier(self, opts: Any = None) -> Any:
            return self.broadcast(tensors=[X])

    with default_group(Own) as group:
        group.allreduce(X, op=MAX).wait()
        assert group.only_call("allreduce") == (X, {"op": MAX})
        dist.all_reduce(X, op=MIN)
        tensors, options, keywords = group.only_call("allreduce")
        assert same(tensors, [X]) and options.reduceOp == MIN and keywords == {}
        functional.all_reduce(X, "sum", group).tolist()
        assert len(group.only_call("allreduce")) == 3
        for barrier in (group.barrier, dist.barrier):
            barrier()
            tensors, options = group.only_call("broadcast")
            assert same(tensors, [X]) and options is None


def test_a_wrapper_changes_what_is_given_by_keyword() -> None:
    class Own(WrapperProcessGroup):
        def change_arguments(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            arguments[-1].timeout = SECONDS
            return arguments

    with default_group(lambda *arguments: Own(Canonical(*arguments))) as group:
        dist.broadcast(X, src=0)
        assert group.parent.only_call("broadcast")[-1].timeout == SECONDS
        dist.barrier()
        assert group.parent.only_call("barrier")[-1].timeout == SECONDS


def test_a_method_by_its_older_name() -> None:
    class Own(Noting):
        alltoall_base = noted("alltoall_base")

    with default_group(Own) as group:
        for call in (
            lambda: base.alltoall_base(group, Y, X, [1, 1], [1, 1], SECONDS).wait(),
            lambda: getattr(base, ALL_TO_ALL)(group, Y, X, [1, 1], [1, 1], SECONDS).wait(),
            lambda: functional.all_to_all_single(X, [1, 1], [1, 1], group).tolist(),
        ):
            call()
            got = group.only_call("alltoall_base")
            assert got[2:4] == ([1, 1], [1, 1])
        dist.all_to_all_single(Y, X)
        assert same(group.only_call("alltoall_base")[:2], (Y, X))


@pytest.mark.parametrize(
    ("older", "call"),
    [
        ("_reduce_scatter_base", lambda: dist.reduce_scatter_tensor(Y[:1], X)),
        ("_allgather_base", lambda: dist.all_gather_into_tensor(Y, X[:1])),
    ],
)
def test_functions_reach_a_method_by_its_older_name(older: str, call: Callable[[], Any]) -> None:
    """Whatever the binding is called that they use."""
    with default_group(type("Own", (Noting,), {older: noted(older)})) as group:
        call()
        assert len(group.only_call(older)) == 3


def test_each_method_that_has_short_forms_is_tried() -> None:
    overloaded = {
        name
        for name in dir(base)
        if not name.startswith("_") and "Overloaded function" in (getattr(base, name).__doc__ or "")
    }
    tried = set(map(method_of, SHORT))
    assert overloaded - {"alltoall_base"} - tried == set()


# ---- super() -------------------------------------------------------------------------------------


class WithBackend(ProcessGroup):
    """Has a backend, which does nothing, and leaves one method to it."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(store, rank, size)
        custom = dist.ProcessGroup.BackendType.CUSTOM
        backend = FakeProcessGroup._create_internal(rank, world_size=size)
        self._register_backend(torch.device("cpu"), custom, backend)
        self._set_default_backend(custom)

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return super().allreduce(tensors, opts)


def test_a_group_with_a_backend_is_registered() -> None:
    with default_group(WithBackend):
        functional.all_reduce(X, "sum", dist.group.WORLD).tolist()
