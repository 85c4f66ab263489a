"""A process group around another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.collectives.group_place import group_rank, is_seen_by_cpp
from torch_commhook.process_group.base import ProcessGroup, called_by_cpp
from torch_commhook.process_group.operations import COLLECTIVES, by_position
from torch_commhook.process_group.work import have_all_names

#: Other methods that the parent answers.
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


def _bindings() -> dict[str, str]:
    """What each method is called in the torch at hand: the newest name that it knows."""
    known: dict[str, str] = {}
    for names in _C.process_group_methods().values():
        for name in names:
            if hasattr(dist.ProcessGroup, name):
                known.setdefault(names[0], name)
    return known


#: What each method is called in the torch at hand.
BINDINGS = _bindings()


class WrapperProcessGroup(ProcessGroup):
    """A process group that leaves everything to another one, for subclasses that change a part.

    A subclass may define any method of a group (see ``docs/process_groups.md``), or one of the
    three through which all collectives pass: :meth:`change_arguments`, :meth:`context` and
    :meth:`wrap_work`; or :meth:`run_collective`, which calls these.

    Args:
        parent: the process group that does the work.

    Raises:
        TypeError: no process group.

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
        if not isinstance(parent, dist.ProcessGroup):
            raise TypeError(
                f"{type(self).__name__}: parent must be a ProcessGroup, got {_C.type_name(parent)}"
            )
        super().__init__(group_rank(parent), parent.size())
        self.parent = parent

    def __del__(self, drop: Callable[..., None] = _C.drop_on_main_thread) -> None:
        # Where a backend's own thread drops the last reference, as after a callback of a Future,
        # the backend must not end there: it would wait for that thread. As an argument, since this
        # module may have ended before the group does.
        drop(self, "parent")

    # Asked each time: the ranks of groups like torchft's change.

    #: Of this class alone: a class that overrides rank() knows it by itself.
    _rank_is_the_parents = True

    def rank(self) -> int:
        """This process's rank in the parent; also where the parent itself does not tell."""
        return group_rank(self.parent)

    def size(self) -> int:
        """The number of the parent's ranks at the moment."""
        return self.parent.size()

    def change_arguments(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the parent is called with: tensors, ranks and options, in their order.

        Args:
            operation: the method's newest name.
            arguments: what this group was called with; keywords are in their places.
        """
        return arguments

    def context(
        self, operation: str, arguments: tuple[Any, ...]
    ) -> AbstractContextManager[Any] | None:
        """What is entered while the parent is called, which starts the work; None for nothing."""
        return None

    def wrap_work(self, operation: str, arguments: tuple[Any, ...], work: Any) -> Any:
        """What is returned for the parent's Work."""
        return work

    def run_collective(
        self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Have the parent do a collective: one call around all of it, which may leave it out.

        Args:
            operation: the method's newest name.
            arguments: what this group was called with; keywords are in their places.
            keywords: those that have no place after these.

        Returns:
            What the group's method returns: a Work, or None of ``monitored_barrier``.
        """
        arguments = self.change_arguments(operation, arguments)
        call = getattr(self.parent, BINDINGS[operation])
        return self._issue(operation, arguments, lambda: call(*arguments, **keywords))

    def _issue(self, operation: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Start a collective by ``call()``, inside of the context, and wrap its Work."""
        around = self.context(operation, arguments)
        if around is None:
            work = call()
        else:
            with around:
                work = call()
        return self.wrap_work(operation, arguments, work)

    # What torch.distributed asks a group for, past the methods that C++ calls.

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
    """A group whose rank and size C++ sees as Python does: the group itself, or one around it."""
    return group if is_seen_by_cpp(group) else WrapperProcessGroup(group)


def _collective(operation: str) -> Any:
    def method(self: WrapperProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        if keywords:
            arguments, keywords = by_position(operation, arguments, keywords)
        return self.run_collective(operation, arguments, keywords)

    method.__name__ = operation
    method.__qualname__ = f"WrapperProcessGroup.{operation}"
    return method


def _other(name: str) -> Any:
    def method(self: WrapperProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self.parent, BINDINGS[name])(*arguments, **keywords)

    method.__name__ = name
    method.__qualname__ = f"WrapperProcessGroup.{name}"
    return method


for _names in _C.process_group_methods().values():
    if _names[0] in BINDINGS and _names[0] in COLLECTIVES.union(_OTHERS):
        _make = _collective if _names[0] in COLLECTIVES else _other
        have_all_names(WrapperProcessGroup, _names, called_by_cpp(_make(_names[0]), _names[0]))
