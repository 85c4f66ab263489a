"""This process's rank in a group, even if the group does not report it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import group_and_inner, group_ranks


def group_rank(group: dist.ProcessGroup) -> int:
    """This process's rank in a group.

    A class may override only ``size()``, as torchft's do, and is then made with rank 0 of 1 on
    every rank. In this case the rank comes from ``torch.distributed``, if the group is registered
    with as many ranks as it has, or else from the group that it wraps.

    Returns:
        The rank; if it is unknown, the group's own answer. See :func:`check_place`.
    """
    if type(group) is dist.ProcessGroup:
        return group.rank()
    known = _known_rank(group)
    return group.rank() if known is None else known


def check_place(op: str, group: dist.ProcessGroup) -> None:
    """Refuse a group with an unknown rank, because shards depend on it.

    Args:
        op: the function's name in errors.
        group: the group.

    Raises:
        ValueError: its class has its own ``size()`` and no ``rank()``, and neither
            ``torch.distributed`` nor the group that it wraps knows the rank; or its rank is none of
            its ranks.
    """
    if torch.compiler.is_compiling() or type(group) is dist.ProcessGroup or group.size() == 1:
        return
    rank = _known_rank(group)
    if rank is None:
        which = _class_of(_asked(group), _SIZE).__qualname__
        raise ValueError(
            f"{op}: the process group must know its rank, since each rank has a shard; class "
            f"{which} has a size() of its own, and no rank(). Register its ranks with "
            "register(group, name, ranks=...) of torch_commhook.process_group. Codecs "
            "whose messages all ranks get (topk, chunk_topk, randomk) and hooks such as "
            "allreduce() need no rank"
        )
    if not 0 <= rank < group.size():
        raise ValueError(
            f"{op}: the process group's rank must be below its size, {group.size()}, got {rank}"
        )


def check_not_managed(op: str, group: dist.ProcessGroup) -> None:
    """Refuse torchft's managed group, also inside another group.

    Its ``size()`` counts some of its ranks, and a rank that is not counted must send zeros.

    Args:
        op: the function's name in errors.
        group: the group.

    Raises:
        ValueError: it is such a group.
    """
    for each in group_and_inner(group):
        for cls in type(each).__mro__:
            if (cls.__module__, cls.__qualname__) == _MANAGED:
                raise ValueError(
                    f"{op}: a ManagedProcessGroup of torchft must not be a hook's group, since "
                    "replicas join and leave it between steps; use "
                    "torch_commhook.integrations.torchft.attach_to(manager, model, hook)"
                )


_MANAGED = "torchft.process_group", "ManagedProcessGroup"
_RANK, _SIZE = ("rank", "getRank"), ("size", "getSize")


def tells_its_rank(group: dist.ProcessGroup) -> bool:
    """Whether a class that overrides the size also overrides the rank.

    A wrapper with its parent's rank answers for its parent's class.
    """
    group = _asked(group)
    if type(group) is dist.ProcessGroup:
        return True
    of_size, of_rank = _class_of(group, _SIZE), _class_of(group, _RANK)
    return of_size is of_rank or not issubclass(of_size, of_rank)


def all_tell_their_rank(group: dist.ProcessGroup) -> bool:
    """As :func:`tells_its_rank`, for a group and all groups that it wraps."""
    return all(map(tells_its_rank, group_and_inner(group)))


def gathers_flat(group: dist.ProcessGroup, names: Sequence[str]) -> bool:
    """Whether a group, and those that it wraps, can gather into one tensor.

    Before torch 2.14 a Python class cannot override that method, so torchft's groups only gather
    into lists.

    Args:
        group: the group.
        names: the method's names.
    """
    for each in group_and_inner(group):
        if type(each) is dist.ProcessGroup:
            return True
        own = any(getattr(type(each), name, None) is not _of_torch(name) for name in names)
        if not (own or isinstance(each, _C.ProcessGroup)):
            return False
    return True


def _of_torch(name: str) -> object:
    return getattr(dist.ProcessGroup, name, None)


def is_alone(group: dist.ProcessGroup) -> bool:
    """Whether no other rank takes part in the group's sums.

    A group that overrides only ``size()`` may count some of its ranks, as torchft's managed group
    does: the others still take part, with zeros.
    """
    return group.size() == 1 and tells_its_rank(group)


def is_seen_by_cpp(group: dist.ProcessGroup) -> bool:
    """Whether C++ sees the size that Python sees: for PyTorch's groups it calls ``getSize``."""
    if isinstance(group, _C.ProcessGroup) or hasattr(type(group), "getSize"):
        return True
    return _class_of(group, ("size",)) is dist.ProcessGroup


def _class_of(group: dist.ProcessGroup, names: tuple[str, ...]) -> type:
    """The class that defines a method with one of these names."""
    return next(each for each in type(group).__mro__ if any(name in vars(each) for name in names))


def _known_rank(group: dist.ProcessGroup) -> int | None:
    group = _real(group)
    if tells_its_rank(group):
        return group.rank()
    size = group.size()
    for each in group_and_inner(group):
        if each is not group and tells_its_rank(each) and each.size() == size:
            return each.rank()
        ranks = group_ranks(each)
        if ranks is not None and len(ranks) == size and dist.is_initialized():
            own = dist.get_rank()
            if own in ranks:
                return ranks.index(own)
    return None


def _asked(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group to ask for the rank: a wrapper that forwards to its parent knows no more."""
    group = _real(group)
    while vars(_class_of(group, _RANK)).get("_rank_is_the_parents", False):
        group = _real(group.parent)  # type: ignore[attr-defined]
    return group


def _real(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group itself; newer compilers use another object while they trace."""
    return getattr(group, "real_obj", group)


# Compilers treat the result as a constant, like a group's own rank().
for _constant in (_known_rank, tells_its_rank):
    _constant._dynamo_marked_constant = True  # type: ignore[attr-defined]
