"""Registers process groups in Python with ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import group_ranks, has_group, is_known, make_known
from torch_commhook.collectives.group_place import group_rank


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
    if not isinstance(name, str):
        raise TypeError(f"register: name must be a str, got {_C.type_name(name)}")
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
    """The global ranks of a group, if the user does not give them.

    Raises:
        ValueError: they are unknown, and this process has another rank than its number suggests.
    """
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
