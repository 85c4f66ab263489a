"""Makes C++ call each virtual method of a process group and of a Work.

The calls go through the bindings of ``torch.distributed``, which call the virtual methods of any
class, as C++ does.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from group_doubles import completed

from torch_commhook import _C, ProcessGroup, Work

X = torch.ones(2)
SECOND = timedelta(seconds=1)
Call = Callable[[Any], Any]
base: Any = dist.ProcessGroup
c10d: Any = torch._C._distributed_c10d
_HOOKED = ("pre", "post", "abort")


def done(*tensors: torch.Tensor) -> Work:
    future = completed(list(tensors))
    return type("Done", (Work,), {"get_future": lambda self: future})()


def _call(binding: str, arguments: tuple[Any, ...]) -> Call:
    """Calls a method of PyTorch's class, or reads a property of it."""

    def call(group: Any) -> Any:
        method = getattr(base, binding)
        return method.fget(group) if isinstance(method, property) else method(group, *arguments)

    return call


#: By PyTorch's name of the binding: the names that a class may give the method (``*`` is that of
#: the binding), arguments with which the call reaches C++, and a possible result.
_BINDINGS: dict[str, tuple[str, tuple[Any, ...], Any]] = {
    "rank": ("rank getRank", (), 1),
    "size": ("size getSize", (), 3),
    "name": ("name getBackendName", (), "own"),
    "group_name": ("getGroupName", (), "a group"),
    "group_desc": ("getGroupDesc", (), "of ranks"),
    "_set_group_name": ("_set_group_name setGroupName", ("a group",), None),
    "_set_group_desc": ("_set_group_desc", ("of ranks",), None),
    "set_timeout": ("set_timeout setTimeout", (SECOND,), None),
    "shutdown": ("shutdown", (), None),
    "abort": ("abort", (), None),
    "broadcast": ("broadcast", ([X], dist.BroadcastOptions()), Work),
    "allreduce": ("allreduce", ([X], dist.AllreduceOptions()), Work),
    "allreduce_coalesced": ("allreduce_coalesced", ([X], dist.AllreduceCoalescedOptions()), Work),
    "reduce": ("reduce", ([X], dist.ReduceOptions()), Work),
    "allgather": ("allgather", ([[X]], [X]), Work),
    "allgather_coalesced": ("allgather_coalesced", ([[X]], [X]), Work),
    "_allgather_base": ("all_gather_single _allgather_base", (X, X), Work),
    "allgather_into_tensor_coalesced": ("all_gather_single_coalesced *", ([X], [X]), Work),
    "gather": ("gather", ([[X]], [X], dist.GatherOptions()), Work),
    "scatter": ("scatter", ([X], [[X]], dist.ScatterOptions()), Work),
    "reduce_scatter": ("reduce_scatter", ([X], [[X]], dist.ReduceScatterOptions()), Work),
    "_reduce_scatter_base": ("reduce_scatter_single _reduce_scatter_base", (X, X), Work),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_single_coalesced *", ([X], [X]), Work),
    "alltoall_base": ("all_to_all_single alltoall_base", (X, X, [], []), Work),
    "alltoall": ("alltoall", ([X], [X], dist.AllToAllOptions()), Work),
    "send": ("send", ([X], 1, 2), Work),
    "recv": ("recv", ([X], 1, 2), Work),
    "recv_anysource": ("recv_anysource recvAnysource", ([X], 2), Work),
    "barrier": ("barrier", (dist.BarrierOptions(),), Work),
    "monitored_barrier": ("monitored_barrier monitoredBarrier", (SECOND, True), None),
    "_get_sequence_number_for_group": ("* getSequenceNumberForGroup", (), 7),
    "_start_coalescing": ("start_coalescing startCoalescing", (torch.device("cpu"),), None),
    "_end_coalescing": ("end_coalescing _end_coalescing", (torch.device("cpu"),), Work),
    "split_group": ("split_group splitGroup", ([0],), ProcessGroup),
    "merge_remote_group": ("merge_remote_group", (dist.HashStore(), 2), ProcessGroup),
}
#: The same for bindings that only some versions of torch have.
_NEWER: dict[str, tuple[str, tuple[Any, ...], Any]] = {
    "_set_sequence_number_for_group": ("_set_sequence_number_for_group", (), None),
    "_add_ephemeral_timeout": ("add_ephemeral_timeout", (SECOND,), None),
    "gather_single": ("gather_single", (X, X), Work),
    "gather_into_tensor": ("gather_into_tensor", (X, X), Work),
    "get_reconfigure_handle": ("get_reconfigure_handle", (), "a handle"),
    "reconfigure": ("reconfigure", (getattr(c10d, "ReconfigureOptions", object)(),), Work),
    "supports_reconfigure": ("supports_reconfigure", (), True),
    "supports_window": ("supports_window", (), True),
    "new_window": ("new_window", (X,), None),
    **{f"register_{on}_hook": (f"register_{on}_hook", (1, print), None) for on in _HOOKED},
    **{f"unregister_{on}_hook": (f"unregister_{on}_hook", (1,), None) for on in _HOOKED},
    "supports_abort_hooks": ("supports_abort_hooks", (), True),
    "supports_completion_hooks": ("supports_completion_hooks", (), True),
}
#: By a name that a class may give the method: a call that reaches C++, a possible result, and the
#: arguments.
CALLS: dict[str, tuple[Call, Any, tuple[Any, ...]]] = {
    name: (_call(binding, arguments), result, arguments)
    for binding, (names, arguments, result) in {
        **_BINDINGS,
        **{each: row for each, row in _NEWER.items() if hasattr(base, each)},
    }.items()
    for name in names.replace("*", binding).split()
}


def group_with(name: str, method: Any) -> Any:
    return type("Own", (ProcessGroup,), {name: method})(0, 2)


def good(name: str) -> Any:
    result = CALLS[name][1]
    if result is Work:
        return done(X)
    return ProcessGroup(0, 1) if result is ProcessGroup else result


#: The questions that C++ may ask a Work, each with a possible answer.
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
    "block_current_stream": None,
    "get_future_result": torch.futures.Future,
}
if "getTimeout" in _C.work_methods():
    ANSWERS["get_timeout"] = SECOND
if "getCompletionKey" in _C.work_methods():
    ANSWERS["get_completion_key"] = 11


def ask(work: Any, name: str) -> Any:
    """Asks a Work as C++ does."""
    return _C.ask_work(work, name)
