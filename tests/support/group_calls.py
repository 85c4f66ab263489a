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

from torch_commhook import _C, ProcessGroup, Work

X = torch.ones(2)
SECOND = timedelta(seconds=1)
Call = Callable[[Any], Any]
base: Any = dist.ProcessGroup
c10d: Any = torch._C._distributed_c10d


def done(*tensors: torch.Tensor) -> Work:
    class Done(Work):
        def get_future(self) -> torch.futures.Future:
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(list(tensors))
            return future

    return Done()


def _deprecated(name: str, *arguments: Any) -> Call:
    return lambda group: getattr(base, name)(group, *arguments)


#: By a name that a class may give the method: a call that reaches C++, and a possible result.
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
    "merge_remote_group": (
        lambda group: base.merge_remote_group(group, dist.HashStore(), 2),
        ProcessGroup,
    ),
    "splitGroup": (lambda group: base.split_group(group, [0]), ProcessGroup),
}

#: The same for methods that only some versions of torch have.
_NEWER: dict[str, tuple[str, Call, Any]] = {
    "_set_sequence_number_for_group": (
        "_set_sequence_number_for_group",
        lambda group: base._set_sequence_number_for_group(group),
        None,
    ),
    "add_ephemeral_timeout": (
        "_add_ephemeral_timeout",
        lambda group: base._add_ephemeral_timeout(group, SECOND),
        None,
    ),
    "gather_single": ("gather_single", lambda group: base.gather_single(group, X, X), Work),
    "gather_into_tensor": (
        "gather_into_tensor",
        lambda group: base.gather_into_tensor(group, X, X),
        Work,
    ),
    "get_reconfigure_handle": (
        "get_reconfigure_handle",
        lambda group: base.get_reconfigure_handle(group),
        "a handle",
    ),
    "reconfigure": (
        "reconfigure",
        lambda group: base.reconfigure(group, c10d.ReconfigureOptions()),
        Work,
    ),
    "supports_reconfigure": (
        "supports_reconfigure",
        lambda group: base.supports_reconfigure.fget(group),
        True,
    ),
    "supports_window": ("supports_window", lambda group: base.supports_window.fget(group), True),
    "new_window": ("new_window", lambda group: base.new_window(group, X), None),
    "register_pre_hook": (
        "register_pre_hook",
        lambda group: base.register_pre_hook(group, 1, print),
        None,
    ),
    "register_post_hook": (
        "register_post_hook",
        lambda group: base.register_post_hook(group, 1, print),
        None,
    ),
    "register_abort_hook": (
        "register_abort_hook",
        lambda group: base.register_abort_hook(group, 1, print),
        None,
    ),
    "unregister_pre_hook": (
        "unregister_pre_hook",
        lambda group: base.unregister_pre_hook(group, 1),
        None,
    ),
    "unregister_post_hook": (
        "unregister_post_hook",
        lambda group: base.unregister_post_hook(group, 1),
        None,
    ),
    "unregister_abort_hook": (
        "unregister_abort_hook",
        lambda group: base.unregister_abort_hook(group, 1),
        None,
    ),
    "supports_abort_hooks": (
        "supports_abort_hooks",
        lambda group: base.supports_abort_hooks.fget(group),
        True,
    ),
    "supports_completion_hooks": (
        "supports_completion_hooks",
        lambda group: base.supports_completion_hooks.fget(group),
        True,
    ),
}
CALLS |= {name: tuple(call) for name, (known, *call) in _NEWER.items() if hasattr(base, known)}


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
