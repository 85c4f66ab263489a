"""The base class of process groups in Python."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import group_and_inner, group_ranks, is_known
from torch_commhook.collectives.group_place import group_rank
from torch_commhook.native.dynamo import left_to_python
from torch_commhook.process_group.group_hooks import (
    CompletionHookArgs,
    GroupHooks,
    PostHookArgs,
    PreHookArgs,
    WorkInfo,
)
from torch_commhook.process_group.work import take_over

#: The key of the hook that PyTorch's older interface registers; it has no id.
_ON_COMPLETION_ID = -(1 << 63)
#: Ranks of a group, in its text.
_MOST_SHOWN = 16


def called_by_cpp(function: FunctionType, name: str) -> Any:
    """The attribute of a class of groups for a method that C++ calls too."""
    return _C.group_method(left_to_python(function), name)


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

    _hook_registry: GroupHooks | None = None

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

    @property
    def _hooks(self) -> GroupHooks:
        if self._hook_registry is None:
            self._hook_registry = GroupHooks()
        return self._hook_registry

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

    def _remove_hook(self, kind: str, hook_id: int) -> None:
        self._hooks.remove(kind, hook_id)
        self._hooked = bool(self._hooks)

    def register_pre_hook(self, hook_id: int, hook: Callable[[PreHookArgs], None]) -> None:
        """Call ``hook(args)`` before each operation is issued."""
        self._add_hook("pre", hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Remove a hook; do nothing if there is none."""
        self._remove_hook("pre", hook_id)

    def register_post_hook(self, hook_id: int, hook: Callable[[PostHookArgs], None]) -> None:
        """Call ``hook(args)`` after each operation was issued, with its Work."""
        self._add_hook("post", hook_id, hook)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove a hook; do nothing if there is none."""
        self._remove_hook("post", hook_id)

    @property
    def supports_completion_hooks(self) -> bool:
        """True."""
        return True

    def register_completion_hook(
        self, hook_id: int, hook: Callable[[CompletionHookArgs], None]
    ) -> None:
        """Call ``hook(args)`` when an operation has completed or failed.

        The call happens on the thread that completes the operation, often one of the backend's. For
        tensors on an accelerator it happens on a thread that polls every half a millisecond. If a
        Work has no Future, it happens on the thread that waits for it, and not before.
        """
        self._add_hook("completion", hook_id, hook)

    def unregister_completion_hook(self, hook_id: int) -> None:
        """Remove a hook; do nothing if there is none."""
        self._remove_hook("completion", hook_id)

    @property
    def supports_abort_hooks(self) -> bool:
        """True."""
        return True

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call ``hook()`` before ``abort()`` does anything."""
        self._add_hook("abort", hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Remove a hook; do nothing if there is none."""
        self._remove_hook("abort", hook_id)

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
        if not callable(hook):
            raise TypeError(
                f"_register_on_completion_hook: hook must be callable, got {_C.type_name(hook)}"
            )
        self._add_hook("completion", _ON_COMPLETION_ID, lambda args: hook(_work_info(args)))

    def _has_hooks(self) -> bool:
        """Whether ``_register_on_completion_hook`` has been called."""
        registry = self._hook_registry
        return registry is not None and registry.has("completion", _ON_COMPLETION_ID)


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
