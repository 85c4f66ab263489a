"""Hooks of process groups: before an operation, after it was issued, when it has completed, and
before an abort.

They have the names of torch 2.15, on every torch. There they exist for PyTorch's own backends; here
for every ``torch_commhook.ProcessGroup``, whether Python or C++ calls it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_commhook import _C
from torch_commhook.native.dynamo import left_to_python
from torch_commhook.process_group.completion import on_completion
from torch_commhook.process_group.operations import Call, describe


@dataclass(frozen=True)
class PreHookArgs:
    """An operation that is about to be issued.

    Attributes:
        name: a ``HookOpName``.
        async_op: whether the caller asked for a Work.
        input_tensors: the tensors that are read.
        output_tensors: the tensors that are written; the same ones for an operation in place.
        root: the rank with the source or the result, or the peer; else -1.
        op_id: the call's number on this group, the same for all its hooks.
        operation: the method, by its newest name.

    Example:
        >>> def reduce(rank):
        ...     group = process_group.WrapperProcessGroup(dist.group.WORLD)
        ...     seen = []
        ...     group.register_pre_hook(1, lambda args: seen.append(args.input_tensors[0].numel()))
        ...     group.allreduce([torch.ones(4)]).wait()
        ...     return seen
        >>> run_ranks(reduce, 2)[0]
        [4]
    """

    name: Any
    async_op: bool
    input_tensors: list[Tensor]
    output_tensors: list[Tensor]
    root: int
    op_id: int
    operation: str


@dataclass(frozen=True)
class PostHookArgs:
    """An operation that was issued.

    Attributes:
        name, async_op, op_id, operation: as in :class:`PreHookArgs`.
        work: its Work; None if the method returns none.

    Example:
        >>> def reduce(rank):
        ...     group = process_group.WrapperProcessGroup(dist.group.WORLD)
        ...     seen = []
        ...     group.register_post_hook(1, lambda args: seen.append((args.operation, args.op_id)))
        ...     group.allreduce([torch.ones(4)]).wait()
        ...     return seen
        >>> run_ranks(reduce, 2)[0]
        [('allreduce', 0)]
    """

    name: Any
    async_op: bool
    work: Any
    op_id: int
    operation: str


@dataclass(frozen=True)
class CompletionHookArgs:
    """An operation that has completed.

    Attributes:
        completion_key: c10d's key of its Work; 0 if there is none.
        duration_ms: the time from issue to completion, in milliseconds.
        name, op_id, operation: as in :class:`PreHookArgs`.
        sizes: the sizes of its inputs, or of its outputs if it reads nothing.
        dtype: the dtype of the first of these; None without tensors.
        nbytes: the total bytes of these.
        start, end: the times of issue and completion, in seconds of a monotonic clock that all
            processes of a machine share.
        error: the operation's error, also if issuing it raised one; else None. (torch 2.15 calls
            completion hooks only after success.)

    Example:
        >>> def reduce(rank):
        ...     group = process_group.WrapperProcessGroup(dist.group.WORLD)
        ...     seen = []
        ...     group.register_completion_hook(1, lambda args: seen.append(args.nbytes))
        ...     group.allreduce([torch.ones(4)]).wait()
        ...     return seen
        >>> run_ranks(reduce, 2)[0]
        [16]
    """

    completion_key: int
    duration_ms: float
    name: Any
    op_id: int
    operation: str
    sizes: tuple[torch.Size, ...]
    dtype: torch.dtype | None
    nbytes: int
    start: float
    end: float
    error: BaseException | None


class WorkInfo(NamedTuple):
    """The argument of ``_register_on_completion_hook``'s hook, as PyTorch's ``WorkInfo``.

    Attributes:
        op_type: the operation, such as ``"ALLREDUCE"``.
        seq: the operation's number on the group.
        time_started, time_finished: times of a monotonic clock.
        active_duration: the time from start to end.

    Example:
        >>> def reduce(rank):
        ...     group = process_group.WrapperProcessGroup(dist.group.WORLD)
        ...     seen = []
        ...     group._register_on_completion_hook(seen.append)
        ...     group.allreduce([torch.ones(4)]).wait()
        ...     return seen[0].op_type
        >>> run_ranks(reduce, 2)[0]
        'ALLREDUCE'
    """

    op_type: str
    seq: int
    time_started: timedelta
    time_finished: timedelta
    active_duration: timedelta


Hook = Callable[..., None]
KINDS = ("pre", "post", "completion", "abort")


class GroupHooks:
    """The hooks of one group, by kind and id. They run in the order of their ids."""

    def __init__(self) -> None:
        self._hooks: dict[str, dict[int, Hook]] = {kind: {} for kind in KINDS}
        self.op_ids = itertools.count()

    def __bool__(self) -> bool:
        return any(self._hooks.values())

    def add(self, kind: str, hook_id: int, hook: Hook) -> None:
        if isinstance(hook_id, bool) or not isinstance(hook_id, int):
            raise TypeError(
                f"register_{kind}_hook: hook_id must be an int, got {_C.type_name(hook_id)}"
            )
        if not -(1 << 63) <= hook_id < 1 << 63:
            raise ValueError(
                f"register_{kind}_hook: hook_id must be an int of 64 bits, got {hook_id}"
            )
        if not callable(hook):
            raise TypeError(
                f"register_{kind}_hook: hook must be callable, got {_C.type_name(hook)}"
            )
        # A new dict, since other threads may be iterating over the old one.
        self._hooks[kind] = dict(sorted({**self._hooks[kind], hook_id: hook}.items()))

    def remove(self, kind: str, hook_id: int) -> None:
        self._hooks[kind] = {key: hook for key, hook in self._hooks[kind].items() if key != hook_id}

    def has(self, kind: str, hook_id: int) -> bool:
        return hook_id in self._hooks[kind]

    def of(self, kind: str) -> list[Hook]:
        return list(self._hooks[kind].values())


class HookedGroup(Protocol):
    """The interface of a group with hooks, such as ``ProcessGroup`` in ``base.py``."""

    @property
    def _hooks(self) -> GroupHooks: ...


def run_with_hooks(
    group: HookedGroup,
    operation: str,
    method: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> Any:
    """Call a method of a group with the group's hooks around it. C++ calls this."""
    hooks = group._hooks
    if hooks in _local.running:  # what a hook itself calls is not told to hooks
        return method(*arguments, **keywords)
    if operation == "abort":
        for hook in hooks.of("abort"):
            try:
                hook()
            except Exception as error:  # other hooks must still run
                _C.report_unraisable(error, hook)
        return method(*arguments, **keywords)
    call = describe(operation, arguments[1:], keywords)
    if call is None:
        return method(*arguments, **keywords)
    op_id = next(hooks.op_ids)
    before = PreHookArgs(
        call.name, call.async_op, call.inputs, call.outputs, call.root, op_id, operation
    )
    with _running(hooks):
        for hook in hooks.of("pre"):
            hook(before)
    completed = _Completed(hooks, call, op_id) if hooks.of("completion") else None
    try:
        work = method(*arguments, **keywords)
    except BaseException as error:
        if completed is not None:
            completed(_C.steady_seconds(), error)
        raise
    work = _C.as_work(work)
    for_hooks = work if isinstance(work, torch.distributed.Work) else None
    if completed is not None:
        if for_hooks is not None:
            completed.key = _C.completion_key(for_hooks)
        work = on_completion(work, [*call.inputs, *call.outputs], completed)
    after = PostHookArgs(call.name, call.async_op, for_hooks, op_id, operation)
    with _running(hooks):
        for hook in hooks.of("post"):
            hook(after)
    return work


class _Local(threading.local):
    """The hooks that this thread is running."""

    def __init__(self) -> None:
        self.running: list[GroupHooks] = []


_local = _Local()


@contextmanager
def _running(hooks: GroupHooks) -> Iterator[None]:
    _local.running.append(hooks)
    try:
        yield
    finally:
        _local.running.pop()


class _Completed:
    """Calls the completion hooks of one operation; on any thread, and never raises."""

    def __init__(self, hooks: GroupHooks, call: Call, op_id: int) -> None:
        self._hooks = hooks
        # Without the tensors, which belong to the caller.
        self._about = (call.sizes, call.dtype, call.nbytes)
        self._name, self._operation, self._op_id = call.name, call.operation, op_id
        self._start = _C.steady_seconds()
        self.key = 0

    def __call__(self, end: float, error: BaseException | None) -> None:
        sizes, dtype, nbytes = self._about
        args = CompletionHookArgs(
            self.key,
            (end - self._start) * 1e3,
            self._name,
            self._op_id,
            self._operation,
            sizes,
            dtype,
            nbytes,
            self._start,
            end,
            error,
        )
        with _running(self._hooks):
            for hook in self._hooks.of("completion"):
                try:
                    hook(args)
                except Exception as raised:
                    _C.report_unraisable(raised, hook)


_C.set_run_with_hooks(left_to_python(run_with_hooks))
