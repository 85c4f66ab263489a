"""Which of its ranks this process is in a group, also in one that does not tell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import group_and_inner


def group_rank(group: dist.ProcessGroup) -> int:
    """This process's rank in a group.

    A class may override ``size()`` alone, as torchft's do: it is then made as rank 0 of 1 on every
    rank. In that case the rank comes from ``torch.distributed``, where the group is registered with
    as many ranks as it has, or else from the group that it wraps.

    Returns:
        What the group says itself, where nobody knows more; see :func:`check_place`.
    """
    if type(group) is dist.ProcessGroup:
        return group.rank()
    known = _known_rank(group)
    return group.rank() if known is None else known


def check_place(op: str, group: dist.ProcessGroup) -> None:
    """Refuse a group whose rank nobody knows: shards go by that.

    Args:
        op: named in errors.
        group: the group.

    Raises:
        ValueError: its class has a ``size()`` of its own and no ``rank()``, and neither
            ``torch.distributed`` nor the group that it wraps knows the rank; or its rank is none of
            its ranks.
    """
    if torch.compiler.is_compiling() or type(group) is dist.ProcessGroup or group.size() == 1:
        return
    rank = _known_rank(group)
    if rank is None:
        which = _class_of(_asked(group), _SIZE).__qualname__
        raise ValueError(
            f"{op}: the process group must tell its rank, of which each has a shard; class "
            f"{which} has a size() of its own, and no rank(). "
            "register(group, name, ranks=...) of torch_commhook.process_group tells it. Codecs "
            "whose messages all ranks get (topk, chunk_topk, randomk) and hooks such as "
            "allreduce() need none"
        )
    if not 0 <= rank < group.size():
        raise ValueError(
            f"{op}: the process group's rank must be below its size, {group.size()}, got {rank}"
        )


def check_not_managed(op: str, group: dist.ProcessGroup) -> None:
    """Refuse torchft's managed group, also inside of another.

    Its ``size()`` counts some of its ranks, and a rank that is not counted must send zeros.

    Args:
        op: named in errors.
        group: the group.

    Raises:
        ValueError: it is one.
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
    """Whether a class that overrides the size overrides the rank, too.

    Of a wrapper that has its parent's rank: whether the parent's class does.
    """
    group = _asked(group)
    if type(group) is dist.ProcessGroup:
        return True
    of_size, of_rank = _class_of(group, _SIZE), _class_of(group, _RANK)
    return of_size is of_rank or not issubclass(of_size, of_rank)


def all_tell_their_rank(group: dist.ProcessGroup) -> bool:
    """:func:`tells_its_rank`, of a group and of those that it wraps."""
    return all(map(tells_its_rank, group_and_inner(group)))


def gathers_flat(group: dist.ProcessGroup, names: Sequence[str]) -> bool:
    """Whether a group, and those that it wraps, gather into one tensor.

    PyTorch lets no class in Python override that before torch 2.14, so torchft's have lists alone.

    Args:
        group: the group.
        names: of the method.
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

    A group that has a ``size()`` of its own alone may count some of its ranks, as torchft's managed
    group does: the others take part all the same, with zeros.
    """
    return group.size() == 1 and tells_its_rank(group)


def is_seen_by_cpp(group: dist.ProcessGroup) -> bool:
    """Whether C++ sees the size that Python sees: of PyTorch's groups it sees ``getSize``."""
    if isinstance(group, _C.ProcessGroup) or hasattr(type(group), "getSize"):
        return True
    return _class_of(group, ("size",)) is dist.ProcessGroup


def _class_of(group: dist.ProcessGroup, names: tuple[str, ...]) -> type:
    """The class whose method of these names counts."""
    return next(each for each in type(group).__mro__ if any(name in vars(each) for name in names))


def _known_rank(group: dist.ProcessGroup) -> int | None:
    group = _real(group)
    if tells_its_rank(group):
        return group.rank()
    size = group.size()
    for each in group_and_inner(group):
        if each is not group and tells_its_rank(each) and each.size() == size:
            return each.rank()
        ranks = distributed_c10d._world.pg_group_ranks.get(each)
        if ranks is not None and len(ranks) == size and dist.is_initialized():
            own = ranks.get(dist.get_rank())
            if own is not None:
                return int(own)
    return None


def _asked(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group that tells the rank: a wrapper that asks its parent knows no more than that."""
    group = _real(group)
    while vars(_class_of(group, _RANK)).get("_rank_is_the_parents", False):
        group = _real(group.parent)  # type: ignore[attr-defined]
    return group


def _real(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group itself, for which newer compilers have another object while they trace."""
    return getattr(group, "real_obj", group)


# Compilers take the result for a constant, as they do with a group's own rank().
for _constant in (_known_rank, tells_its_rank):
    _constant._dynamo_marked_constant = True  # type: ignore[attr-defined]
