"""A process group around another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import group_rank, is_seen_by_cpp
from torch_commhook.process_group.base import ProcessGroup, called_by_cpp
from torch_commhook.process_group.operations import COLLECTIVES, by_position
from torch_commhook.process_group.work import have_all_names, named
from torch_commhook.wording import check_type

#: Other methods that the parent handles.
_OTHERS = (
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
    "abort",
    "add_ephemeral_timeout",
    "get_reconfigure_handle",
    "merge_remote_group",
    "new_window",
    "reconfigure",
    "set_timeout",
    "shutdown",
    "split_group",
    "start_coalescing",
)


#: The name of each method in the installed torch: the newest name that it knows.
BINDINGS = {
    names[0]: name
    for names in _C.process_group_methods().values()
    for name in reversed(names)
    if hasattr(dist.ProcessGroup, name)
}


class WrapperProcessGroup(ProcessGroup):
    """A process group around another one, for subclasses that change a part.

    A subclass may define any method of a group (see ``docs/process_groups.md``). Or it defines one
    of the three methods that all collectives call, :meth:`change_arguments`, :meth:`context` and
    :meth:`wrap_work`, or their caller :meth:`run_collective`.

    Args:
        parent: the process group that does the work.

    Raises:
        TypeError: ``parent`` is not a process group.

    Example:
        >>> class Counting(process_group.WrapperProcessGroup):
        ...     calls = 0
        ...     def change_arguments(self, operation, arguments):
        ...         self.calls += 1
        ...         return super().change_arguments(operation, arguments)
        >>> def reduce(rank):
        ...     group = Counting(dist.group.WORLD)
        ...     group.allreduce([torch.ones(4)]).wait()
        ...     return group.calls
        >>> run_ranks(reduce, 2)
        [1, 1]
    """

    def __init__(self, parent: dist.ProcessGroup) -> None:
        check_type(f"{type(self).__name__}: parent", parent, "a ProcessGroup", dist.ProcessGroup)
        super().__init__(group_rank(parent), parent.size())
        self.parent = parent

    def __del__(self, drop: Callable[..., None] = _C.drop_on_main_thread) -> None:
        # A backend's own thread may release the last reference, as after a Future's callback. The
        # backend must not be destroyed there: it would wait for that thread. An argument, since
        # this module may be gone before the group is.
        drop(self, "parent")

    # Read each time: the ranks of groups like torchft's change.

    #: For this class only: C++ sees a subclass's own rank() anyway.
    _rank_is_the_parents = True

    def rank(self) -> int:
        """This process's rank in the parent, also if the parent does not report it to C++."""
        return group_rank(self.parent)

    def size(self) -> int:
        """The present number of the parent's ranks."""
        return self.parent.size()

    def change_arguments(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments for the parent's call: tensors, ranks and options, in order.

        Args:
            operation: the method's newest name.
            arguments: this group's arguments; keywords are in their positions.
        """
        return arguments

    def context(
        self, operation: str, arguments: tuple[Any, ...]
    ) -> AbstractContextManager[Any] | None:
        """Return a context manager around the parent's call that starts the work, or None."""
        return None

    def wrap_work(self, operation: str, arguments: tuple[Any, ...], work: Any) -> Any:
        """Return a Work in place of the parent's Work."""
        return work

    def run_collective(
        self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Run a collective on the parent. A subclass may omit or replace the whole call.

        Args:
            operation: the method's newest name.
            arguments: this group's arguments; keywords are in their positions.
            keywords: keyword arguments that have no position after these.

        Returns:
            The method's result: a Work, or None for ``monitored_barrier``.
        """
        arguments = self.change_arguments(operation, arguments)
        call = getattr(self.parent, BINDINGS[operation])
        return self._issue(operation, arguments, lambda: call(*arguments, **keywords))

    def _issue(self, operation: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Start a collective by ``call()``, inside the context, and wrap its Work."""
        around = self.context(operation, arguments)
        with nullcontext() if around is None else around:
            work = call()
        return self.wrap_work(operation, arguments, work)

    # Methods that torch.distributed calls beside those that C++ calls.

    def _get_backend(self, device: Any) -> Any:
        return self.parent._get_backend(device)

    @property
    def supports_reconfigure(self) -> bool:
        return bool(getattr(self.parent, "supports_reconfigure", False))

    @property
    def supports_window(self) -> bool:
        return bool(getattr(self.parent, "supports_window", False))

    @property
    def _device_types(self) -> Any:
        return self.parent._device_types


def seen_by_cpp(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group with the rank and size that Python sees: the group itself, or one around it."""
    return group if is_seen_by_cpp(group) else WrapperProcessGroup(group)


def _method(name: str) -> Any:
    def collective(self: WrapperProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        if keywords:
            arguments, keywords = by_position(name, arguments, keywords)
        return self.run_collective(name, arguments, keywords)

    def other(self: WrapperProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self.parent, BINDINGS[name])(*arguments, **keywords)

    return named(collective if name in COLLECTIVES else other, "WrapperProcessGroup", name)


for _names in _C.process_group_methods().values():
    if _names[0] in BINDINGS and _names[0] in COLLECTIVES.union(_OTHERS):
        have_all_names(WrapperProcessGroup, _names, called_by_cpp(_method(_names[0]), _names[0]))
