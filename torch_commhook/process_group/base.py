"""The base class of process groups in Python, their hooks, and their registration."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import (
    group_and_inner,
    group_rank,
    group_ranks,
    has_group,
    is_known,
    make_known,
)
from torch_commhook.metrics import ThreadValue, setting
from torch_commhook.native.runtime import skip_dynamo
from torch_commhook.process_group.operations import OPERATIONS, Call, describe
from torch_commhook.process_group.work import named, on_completion, take_over
from torch_commhook.wording import check_type

# ---- hooks of process groups ---------------------------------------------------------------------
#
# They have the names of torch 2.15, on every torch. There they exist for PyTorch's own backends;
# here for every ``torch_commhook.ProcessGroup``, whether Python or C++ calls it.


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


#: The hooks that this thread is running.
_running: ThreadValue[tuple[GroupHooks, ...]] = ThreadValue()


class GroupHooks:
    """The hooks of one group, by kind and id. They run in the order of their ids."""

    def __init__(self) -> None:
        self.by_kind: dict[str, dict[int, Hook]] = {
            kind: {} for kind in ("pre", "post", "completion", "abort")
        }
        self.op_ids = itertools.count()

    def __bool__(self) -> bool:
        return any(self.by_kind.values())

    def add(self, kind: str, hook_id: int, hook: Hook) -> None:
        check_type(f"register_{kind}_hook: hook_id", hook_id, "an int", int)
        if not -(1 << 63) <= hook_id < 1 << 63:
            raise ValueError(
                f"register_{kind}_hook: hook_id must be an int of 64 bits, got {hook_id}"
            )
        check_type(f"register_{kind}_hook: hook", hook, "callable", Callable)
        # A new dict, since other threads may be iterating over the old one.
        self.by_kind[kind] = dict(sorted({**self.by_kind[kind], hook_id: hook}.items()))

    def of(self, kind: str) -> list[Hook]:
        return list(self.by_kind[kind].values())

    def running(self) -> setting[tuple[GroupHooks, ...]]:
        """A block in which this thread tells these hooks of no operation."""
        return setting(_running, (*(_running.value or ()), self))

    def run_all(self, kind: str, *args: Any) -> None:
        """Call the hooks of a kind, whichever of them raise."""
        for hook in self.of(kind):
            try:
                hook(*args)
            except Exception as error:
                _C.report_unraisable(error, hook)


def run_with_hooks(
    group: ProcessGroup,
    operation: str,
    method: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> Any:
    """Call a method of a group with the group's hooks around it. C++ calls this."""
    hooks = group._hooks
    if hooks in (_running.value or ()):  # what a hook itself calls is not told to hooks
        return method(*arguments, **keywords)
    if operation == "abort":
        hooks.run_all("abort")
        return method(*arguments, **keywords)
    if operation not in OPERATIONS:
        return method(*arguments, **keywords)
    call = describe(operation, arguments[1:], keywords)
    op_id = next(hooks.op_ids)
    before = PreHookArgs(
        call.name, call.async_op, call.inputs, call.outputs, call.root, op_id, operation
    )
    with hooks.running():
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
    for_hooks = work if isinstance(work, dist.Work) else None
    if completed is not None:
        if for_hooks is not None:
            completed.key = _C.completion_key(for_hooks)
        work = on_completion(work, call.tensors, completed)
    after = PostHookArgs(call.name, call.async_op, for_hooks, op_id, operation)
    with hooks.running():
        for hook in hooks.of("post"):
            hook(after)
    return work


class _Completed:
    """Calls the completion hooks of one operation; on any thread, and never raises."""

    def __init__(self, hooks: GroupHooks, call: Call, op_id: int) -> None:
        self._hooks = hooks
        self.key = 0
        # Without the tensors, which belong to the caller.
        about = (call.name, op_id, call.operation, call.sizes, call.dtype, call.nbytes)
        self._issued = (*about, _C.steady_seconds())

    def __call__(self, end: float, error: BaseException | None) -> None:
        milliseconds = (end - self._issued[-1]) * 1e3
        args = CompletionHookArgs(self.key, milliseconds, *self._issued, end, error)
        with self._hooks.running():
            self._hooks.run_all("completion", args)


_C.set_run_with_hooks(skip_dynamo(run_with_hooks))


# ---- the base class of process groups in Python --------------------------------------------------


#: The key of the hook that PyTorch's older interface registers; it has no id.
_ON_COMPLETION_ID = -(1 << 63)
#: Ranks of a group, in its text.
_MOST_SHOWN = 16


def called_by_cpp(function: FunctionType, name: str) -> Any:
    """The attribute of a class of groups for a method that C++ calls too."""
    return _C.group_method(skip_dynamo(function), name)


def _unregister(kind: str) -> Any:
    def unregister(self: ProcessGroup, hook_id: int) -> None:
        """Remove a hook; do nothing if there is none."""
        hooks = self._hooks.by_kind
        hooks[kind] = {key: hook for key, hook in hooks[kind].items() if key != hook_id}
        self._hooked = bool(self._hooks)

    return named(unregister, "ProcessGroup", f"unregister_{kind}_hook")


class ProcessGroup(_C.ProcessGroup):
    """The base class of process groups in Python: C++ calls the methods of a subclass.

    See ``docs/process_groups.md``. The constructor takes ``(rank, size)`` or
    ``(store, rank, size)``.

    Every group has hooks, in Python or C++, under the names of torch 2.15: before an operation is
    issued, after it, when it has completed, and before an abort. They are called in the order of
    their ids, for calls from Python and from C++. A new hook replaces one with the same id. If a
    pre- or post-hook raises, the operation raises; a pre-hook so prevents the operation. Exceptions
    of other hooks go to ``sys.unraisablehook``.

    Example:
        >>> class Done(Work):
        ...     def __init__(self, tensors):
        ...         super().__init__()
        ...         self.future = torch.futures.Future()
        ...         self.future.set_result(tensors)
        ...     def get_future(self):
        ...         return self.future
        >>> class Alone(ProcessGroup):
        ...     def allreduce(self, tensors, opts):
        ...         return Done(tensors)
        >>> group = Alone(0, 1)
        >>> group.size()
        1
        >>> group.allreduce([torch.ones(2)], dist.AllreduceOptions()).wait()
        True
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        take_over(cls, ProcessGroup, _C.process_group_methods(), called_by_cpp)

    def __repr__(self) -> str:
        try:
            text = _described(self)
        except Exception:  # of a group that is not whole yet, or a class that cannot tell
            text = super().__repr__().strip("<>")
        if is_known(self):
            return f"<{text}>"
        # If PyTorch cannot find a group, its error contains only this text.
        return (
            f"<{text}, which torch.distributed does not know; "
            "torch_commhook.process_group.register(group, name) makes it known>"
        )

    def _settings_text(self) -> str:
        """What a group of this class has been told, as in a call; empty for nothing."""
        return ""

    @cached_property
    def _hooks(self) -> GroupHooks:
        return GroupHooks()

    # A group in Python is its own backend, if it has no other: torch.distributed then calls these
    # methods of it (torch 2.14 and newer for a batch of sends and receives).

    supports_coalescing = False

    def _get_backend(self, device: Any) -> Any:
        try:
            return super()._get_backend(device)
        except RuntimeError:
            return self

    def _add_hook(self, kind: str, hook_id: int, hook: Callable[..., None]) -> None:
        self._hooks.add(kind, hook_id, hook)
        self._hooked = True

    def register_pre_hook(self, hook_id: int, hook: Callable[[PreHookArgs], None]) -> None:
        """Call ``hook(args)`` before each operation is issued."""
        self._add_hook("pre", hook_id, hook)

    unregister_pre_hook = _unregister("pre")

    def register_post_hook(self, hook_id: int, hook: Callable[[PostHookArgs], None]) -> None:
        """Call ``hook(args)`` after each operation was issued, with its Work."""
        self._add_hook("post", hook_id, hook)

    unregister_post_hook = _unregister("post")

    supports_completion_hooks = True

    def register_completion_hook(
        self, hook_id: int, hook: Callable[[CompletionHookArgs], None]
    ) -> None:
        """Call ``hook(args)`` when an operation has completed or failed.

        The call happens on the thread that completes the operation, often one of the backend's. For
        tensors on an accelerator it happens on a thread that polls every half a millisecond. If a
        Work has no Future, it happens on the thread that waits for it, and not before.
        """
        self._add_hook("completion", hook_id, hook)

    unregister_completion_hook = _unregister("completion")

    supports_abort_hooks = True

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call ``hook()`` before ``abort()`` does anything."""
        self._add_hook("abort", hook_id, hook)

    unregister_abort_hook = _unregister("abort")

    def _register_on_completion_hook(self, hook: Callable[[WorkInfo], None]) -> None:
        """Register a hook by PyTorch's older interface for NCCL: one hook for each group.

        Raises:
            TypeError: the hook is not callable.
            RuntimeError: the group has such a hook already.
        """
        if self._has_hooks():
            raise RuntimeError(
                f"{type(self).__name__}._register_on_completion_hook: there is a hook already"
            )
        check_type("_register_on_completion_hook: hook", hook, "callable", Callable)
        self._add_hook("completion", _ON_COMPLETION_ID, lambda args: hook(_work_info(args)))

    def _has_hooks(self) -> bool:
        """Whether ``_register_on_completion_hook`` has been called."""
        return _ON_COMPLETION_ID in self._hooks.by_kind["completion"]


def _described(group: ProcessGroup) -> str:
    """Class, settings and name of a group and those inside; its rank, size and global ranks."""
    text = " around ".join(_kind(each) for each in group_and_inner(group))
    text += f": rank {group_rank(group)} of {group.size()}"
    ranks = group_ranks(group)
    if ranks is None:
        return text
    more = f", and {len(ranks) - _MOST_SHOWN} more" if len(ranks) > _MOST_SHOWN else ""
    return f"{text}, global ranks {ranks[:_MOST_SHOWN]}{more}"


def _kind(group: dist.ProcessGroup) -> str:
    settings = group._settings_text() if isinstance(group, ProcessGroup) else ""
    text = type(group).__name__
    if settings:
        text += f"({settings})"
    if is_known(group):
        text += f" {group.group_name!r}"
        if type(group) is dist.ProcessGroup:
            text += f" over {dist.get_backend(group)}"
    return text


def _work_info(args: CompletionHookArgs) -> WorkInfo:
    started, finished = timedelta(seconds=args.start), timedelta(seconds=args.end)
    return WorkInfo(args.name.name, args.op_id, started, finished, finished - started)


# ---- registers process groups in Python with torch.distributed -----------------------------------


def register(
    group: dist.ProcessGroup | Callable[..., dist.ProcessGroup],
    name: str,
    *,
    devices: str | Sequence[str] = ("cpu", "cuda"),
    ranks: Sequence[int] | None = None,
) -> None:
    """Register a process group, or a class of them, with ``torch.distributed``.

    A class becomes a backend: ``init_process_group(name, ...)`` and ``new_group(backend=name)``
    make groups of it. A group becomes known under ``name``: the functions of ``torch.distributed``
    and ``DeviceMesh.from_group`` accept it, and functional collectives find it by its name, also in
    compiled code. ``torch.distributed.destroy_process_group(group)`` removes it.

    Args:
        group: a subclass of ``torch.distributed.ProcessGroup``, or another callable
            ``group(store, rank, size)``; or a process group.
        name: for a class: lower-case letters, digits and underscores. For a group: a name that no
            other group has.
        devices: for a class: the device types that it supports, one or several.
        ranks: for a group: the global rank of each of its ranks. The default is those of the group
            that it wraps, or 0, 1, 2 and so on for a group of your own.

    Raises:
        TypeError: ``group`` is neither a class nor a group; ``name`` is not a string.
        ValueError: the name is taken, or no backend's name; the number of ``ranks`` is not the
            group's size; they are not given, and this rank is not 0, 1, 2 and so on.

    Example:
        >>> def reduce(rank):
        ...     group = process_group.WrapperProcessGroup(dist.group.WORLD)
        ...     process_group.register(group, "wrapped")
        ...     values = torch.ones(2)
        ...     dist.all_reduce(values, group=group)
        ...     dist.destroy_process_group(group)
        ...     return values
        >>> run_ranks(reduce, 2)[0]
        tensor([2., 2.])
    """
    check_type("register: name", name, "a str", str)
    if not name:
        raise ValueError("register: name must have at least one character, got ''")
    if isinstance(group, dist.ProcessGroup):
        _register_group(group, name, ranks)
    elif callable(group):
        _register_backend(group, name, devices)
    else:
        raise TypeError(
            f"register: group must be a ProcessGroup, or a class of them, got {_C.type_name(group)}"
        )


def _register_backend(make: Callable[..., Any], name: str, devices: str | Sequence[str]) -> None:
    if not name.isidentifier() or not name.isascii() or name != name.lower():
        raise ValueError(
            "register: name must be of lower-case letters, digits and underscores for a backend, "
            f"got {name!r}"
        )
    if name in dist.Backend.backend_list:
        raise ValueError(f"register: there is a backend {name!r} already")

    def checked(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        group = make(store, rank, size)
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"torch_commhook: backend {name!r} must make a ProcessGroup, got "
                f"{_C.type_name(group)}"
            )
        try:
            group.set_timeout(timeout)
        except RuntimeError as error:  # of backends without a timeout
            if "does not support setting timeout" not in str(error):
                raise
        return group

    devices = [devices] if isinstance(devices, str) else list(devices)
    dist.Backend.register_backend(name, checked, devices=devices)


def _register_group(group: dist.ProcessGroup, name: str, ranks: Sequence[int] | None) -> None:
    if has_group(name):
        raise ValueError(f"register: there is a process group {name!r} already")
    if is_known(group):
        raise ValueError(
            f"register: the group is known already, as {group.group_name!r}; "
            "torch.distributed.destroy_process_group(group) forgets it"
        )
    if ranks is None:
        ranks = _default_ranks(group)
    if not isinstance(ranks, Sequence) or any(not isinstance(rank, int) for rank in ranks):
        raise TypeError(f"register: ranks must be a list of ints or None, got {ranks!r}")
    if any(rank < 0 for rank in ranks):
        raise ValueError(f"register: ranks must be at least 0, got {list(ranks)}")
    if len(ranks) != group.size() or len(set(ranks)) != len(ranks):
        raise ValueError(
            f"register: ranks must be {group.size()} different ones, got {list(ranks)}"
        )
    make_known(group, name, ranks, group.name())


def _default_ranks(group: dist.ProcessGroup) -> Sequence[int]:
    """The global ranks of a group, if the user does not give them."""
    known = group_ranks(group)
    if known is not None:
        return known
    ranks, own = range(group.size()), group_rank(group)
    if dist.is_initialized() and own != dist.get_rank():
        raise ValueError(
            f"register: ranks must be given, since torch.distributed does not know those of "
            f"{_C.type_name(group)}, nor of a group that it wraps; it has rank {own} of "
            f"{group.size()} on global rank {dist.get_rank()}"
        )
    return ranks
