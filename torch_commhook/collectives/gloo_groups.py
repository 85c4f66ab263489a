"""The library's own process groups, beside those of the user, and a rank's place in a group."""

from __future__ import annotations

import os
import stat
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_commhook import _C
from torch_commhook.collectives.wire import LOST_AFTER, endpoint
from torch_commhook.native.runtime import skip_dynamo

# ---- the library's own process groups, beside those of the user ----------------------------------


_CPU = torch.device("cpu")
# An object: PyTorch types it as an int here, and as a group where it returns it.
_NON_MEMBER: object = dist.GroupMember.NON_GROUP_MEMBER


@dataclass(eq=False, slots=True)
class GroupState:
    """The library's state of one process group. It must not refer to the group.

    Attributes:
        own_backend: the group's backend, if the library has made the group.
        exchange_backend: the backend of collectives in places, if a user has made the group.
        lock: held while that backend is made.
        subgroups: by ranks, the groups over some of its ranks; the last one is in use.
        link_tests, step_groups_made: how many have begun: the names of these in the store have
            numbers.
        obstacle: why its ranks do not share memory; "" if they do, None if unknown so far.
        shared_memory: the memory that its ranks share, by the buffers of a caller.
        proven_codecs: the texts of the codecs with which its ranks have tested shared memory.
        collectives_seen: the number of collectives that hooks were seen to begin.
        step_groups: the existing groups that take a model's steps over its ranks, by name.
        ports: the ports of which this process may be the server, for these ranks.
        is_lost: whether collectives of a failed step may still be running on it.
    """

    own_backend: _C.WireBackend | None = None
    exchange_backend: _C.WireBackend | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    subgroups: dict[tuple[int, ...], list[dist.ProcessGroup]] = field(default_factory=dict)
    link_tests: int = 0
    step_groups_made: int = 0
    obstacle: str | None = None
    shared_memory: weakref.WeakKeyDictionary[Any, Any] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    proven_codecs: set[str] = field(default_factory=set)
    collectives_seen: int = 0
    step_groups: weakref.WeakValueDictionary[str, Any] = field(
        default_factory=weakref.WeakValueDictionary
    )
    ports: set[int] = field(default_factory=set)
    is_lost: bool = False


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()


def state_of(group: dist.ProcessGroup) -> GroupState:
    """The library's state of a group, which exists as long as the group."""
    found = _states.get(group)
    # setdefault, since threads may ask for it at once.
    return _states.setdefault(group, GroupState()) if found is None else found


def every_state() -> list[GroupState]:
    """The states of all existing groups."""
    groups = [reference() for reference in _states.keyrefs()]  # other threads may make groups
    return [state_of(group) for group in groups if group is not None]


def is_gloo(group: dist.ProcessGroup, device: str = "cpu") -> bool:
    """Whether a group is PyTorch's own, with Gloo or ``commhook`` for the tensors of a device."""
    backend = _backend_for(group, torch.device(device))
    is_own = isinstance(backend, _C.WireBackend)
    return is_own or (dist.is_gloo_available() and type(backend) is dist.ProcessGroupGloo)


def _backend_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend for a device of a group that is PyTorch's own; None without one."""
    if type(group) is not dist.ProcessGroup:
        return None
    try:
        return group._get_backend(device)
    except RuntimeError:  # it has none for the device
        return None


def is_gloo_or_own(group: dist.ProcessGroup) -> bool:
    """As :func:`is_gloo`; also for the library's own groups."""
    # Newer compilers use another object while they trace.
    group = getattr(group, "real_obj", group)
    return state_of(group).own_backend is not None or is_gloo(group)


def devices_over_host(group: dist.ProcessGroup) -> set[str]:
    """The types of devices whose tensors pass through memory of the host in a group."""
    return {each for each in device_types(group) - {"cpu"} if is_gloo(group, each)}


def device_types(group: dist.ProcessGroup) -> set[str]:
    """The types of the devices of a group's tensors; none if the group does not tell."""
    return {device.type for device in getattr(group, "_device_types", ())}


def wire_backend(group: dist.ProcessGroup) -> _C.WireBackend | None:
    """The backend for the CPU of a group over the library's transport, a user's too."""
    if _CPU not in getattr(group, "_device_types", ()):  # else the search would raise an error
        return None
    backend = _backend_for(group, _CPU)
    return backend if isinstance(backend, _C.WireBackend) else None


def lacks_cpu(group: dist.ProcessGroup) -> bool:
    """Whether a group is PyTorch's own, without a backend for CPU tensors, such as NCCL's."""
    if type(group) is not dist.ProcessGroup or not dist.is_gloo_available():
        return False
    return _backend_for(group, _CPU) is None and bool(group._device_types)


def group_timeout(group: dist.ProcessGroup, device: torch.device = _CPU) -> timedelta:
    """A group's timeout for collectives; PyTorch's default if it does not report one.

    A group without a backend for the device returns another device's timeout.
    """
    for each in (device, *getattr(group, "_device_types", ())):
        try:
            return group._get_backend(each).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return distributed_c10d.default_pg_timeout


# ---- forked processes ----------------------------------------------------------------------------
#
# A connection ends when the last process that has it ends or closes it. Other ranks must not wait
# for the end of a rank's workers, so a forked process closes the connections. It cannot use them:
# it has none of the threads that serve them. At its end it would wait for these threads, so it
# never destroys the objects that have them.


#: The TCP sockets of this host's network, on Linux. Python's sockets would change those of others,
#: if there is a default timeout.
_TABLES = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
_LISTENS = "0A"
_at_fork: list[tuple[int, int]] = []


def sockets_of(ports: set[int]) -> list[tuple[int, int]]:
    """The sockets of the ports of which this process is the server: file descriptors and inodes.

    They are those that listen, and those of their clients.
    """
    found = {inode: (port, listens) for inode, port, listens in _tcp_sockets(ports)}
    own = [(number, inode) for number, inode in _own_sockets() if inode in found] if found else []
    served = {found[inode][0] for _, inode in own if found[inode][1]}
    return [(number, inode) for number, inode in own if found[inode][0] in served]


def _tcp_sockets(ports: set[int]) -> Iterator[tuple[int, int, bool]]:
    """This host's TCP sockets with these ports: inode, port, and whether the socket listens."""
    for table in _TABLES:
        with suppress(OSError):  # another system
            for line in table.read_text().splitlines()[1:]:
                words = line.split()
                port = int(words[1].rpartition(":")[2], 16)
                if port in ports:
                    yield int(words[9]), port, words[3] == _LISTENS


def _own_sockets() -> Iterator[tuple[int, int]]:
    names = os.listdir("/proc/self/fd") if _TABLES[0].exists() else []
    for name in names:
        with suppress(OSError):  # closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                yield int(name), status.st_ino


def _note_sockets() -> None:
    # In the parent: in the child a thread that does not exist may hold a lock of the backend.
    ports = set[int]().union(*(state.ports for state in every_state()))
    _at_fork[:] = sockets_of(ports) if ports else []


def _close_sockets() -> None:
    if not _at_fork:
        return
    # The numbers stay taken: destructors may close them again.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, inode in _at_fork:
        with suppress(OSError):
            if os.fstat(number).st_ino == inode:
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)
    _at_fork.clear()


os.register_at_fork(before=_note_sockets, after_in_child=_close_sockets)


# ---- the tables of torch.distributed: only these functions use them ------------------------------


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether ``torch.distributed`` knows a group, so that its functions accept it."""
    return group in distributed_c10d._world.pg_map


def has_group(name: str) -> bool:
    """Whether ``torch.distributed`` knows a group of a name."""
    return name in distributed_c10d._world.pg_names.values()


def make_known(
    group: dist.ProcessGroup,
    name: str,
    ranks: Sequence[int],
    backend: str,
    store: dist.Store | None = None,
) -> None:
    """Make a group known to ``torch.distributed``, as ``new_group()`` does for those it makes.

    ``torch.distributed.destroy_process_group(group)`` forgets it.

    Args:
        name: a name that no other group has.
        ranks: its members, as ranks of the default group.
        backend: what ``torch.distributed.get_backend()`` returns for it.
        store: the store through which its ranks have met.
    """
    world: Any = distributed_c10d._world
    known: Any = name  # PyTorch's checkers have a type of their own for it
    group._set_group_name(known)
    distributed_c10d._register_process_group(known, group)
    world.pg_map[group] = backend, store
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    world.pg_backend_config[group] = backend
    tag = f"user:{name}"
    world.pg_to_tag[group] = tag
    world.tags_to_pg.setdefault(tag, []).append(group)


def group_store(group: dist.ProcessGroup) -> dist.Store | None:
    """The store through which a group's ranks have met; None if unknown."""
    entry = distributed_c10d._world.pg_map.get(group)
    if entry is not None and entry[1] is not None:
        return entry[1]
    try:
        found: dist.Store = group.get_group_store()
    except RuntimeError:  # a group without one
        return None
    return found


def group_name(group: dist.ProcessGroup) -> str:
    """A group's name, or a text in its place."""
    try:
        return group.group_name
    except (RuntimeError, ValueError):  # a group without a name, and torchft's, raise these
        return f"group {id(group):x}"


def group_description(group: dist.ProcessGroup) -> str:
    """A group's name in PyTorch's flight recorder and logs."""
    described: str = group.group_desc
    return group_name(group) if described in ("", "undefined") else described


def group_ranks(group: dist.ProcessGroup) -> list[int] | None:
    """The global ranks of a group, or of the group that it wraps; None if unknown."""
    for each in group_and_inner(group):
        known = distributed_c10d._world.pg_group_ranks.get(each)
        if known is not None:
            return list(known)
    return None


def group_and_inner(group: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """A group, the one that it wraps, and so on."""
    each: object = group
    while isinstance(each, dist.ProcessGroup):
        yield each
        try:
            each = getattr(each, "parent", None)
        except AssertionError:  # by torchft's before their first quorum
            return


def is_destroyed(group: dist.ProcessGroup) -> bool:
    """Whether ``torch.distributed`` once knew a group of its own, and no longer does."""
    if type(group) is not dist.ProcessGroup or is_known(group):
        return False
    try:
        name = group.group_name
    except RuntimeError:  # a group made by hand was never known
        return False
    try:
        return distributed_c10d._resolve_process_group(name) is not group
    except RuntimeError:
        return True


def resolve_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return the process group itself; the default group for None.

    Args:
        group: a process group, or None.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: this rank is not in the group, or the group has been destroyed.
        TypeError: ``group`` is not a process group.

    Example:
        >>> run_ranks(lambda rank: collectives.resolve_group(None).size(), 2)
        [2, 2]
    """
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch_commhook: a process group is needed; call "
                "torch.distributed.init_process_group() first, or pass process_group="
            )
        group = dist.group.WORLD
    if torch.compiler.is_dynamo_compiling():  # it was checked where it was made
        return group  # type: ignore[return-value]
    if group is _NON_MEMBER:
        raise ValueError("torch_commhook: this rank is not a member of the given process group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"torch_commhook: process_group must be a ProcessGroup, got {_C.type_name(group)}"
        )
    if is_destroyed(group):
        raise ValueError(f"torch_commhook: process group {group_name(group)!r} has been destroyed")
    return group


def make_group(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    name: str,
    timeout: timedelta,
    *,
    description: str,
    within: timedelta | None = None,
    lost_after: float = LOST_AFTER,
    rails: int = 1,
    is_held: bool = False,
    devices: Collection[str] = (),
) -> dist.ProcessGroup:
    """Make a group over the library's transport that ``torch.distributed`` knows.

    All of its ranks call this; each waits for the others' addresses. Two ranks connect when one
    first expects a message of the other.

    Args:
        store: a store for this group only.
        ranks, name: as for :func:`make_known`.
        description: the group's purpose, for PyTorch's flight recorder and logs.
        within: how long to wait for addresses; None: ``timeout``, that of its collectives.
        lost_after, rails: as for :func:`wire.endpoint`.
        is_held: whether the other ranks learn of a failure only when this one closes the backend.
        devices: types of devices whose tensors it takes, beside those on the CPU.

    Raises:
        torch.distributed.DistStoreError: a rank has not come in that time.
    """
    # Not new_group(): all ranks of the default group would have to call it.
    if has_group(name):
        raise ValueError(f"torch_commhook: there is a process group {name!r} already")
    where = endpoint(lost_after, rails)
    backend = _C.WireBackend(
        where, store, name, rank, len(ranks), timeout, within, list(ranks), is_held=is_held
    )
    group = dist.ProcessGroup(store, rank, len(ranks))
    types = ["cpu", *sorted(devices)]
    for each in types:
        group._register_backend(torch.device(each), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._set_group_desc(description)
    make_known(group, name, ranks, ",".join(f"{each}:commhook" for each in types), store)
    state_of(group).own_backend = backend
    return group


@skip_dynamo
def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group that :func:`make_group` has made: this rank leaves it."""
    if is_known(group):  # torch.distributed may have ended already
        dist.destroy_process_group(group)
    state = state_of(group)
    found, state.own_backend = state.own_backend, None
    if found is not None:
        found.close()


# ---- the backend of collectives in places --------------------------------------------------------


def exchanges(group: dist.ProcessGroup, device: torch.device = _CPU) -> bool:
    """Whether a group's collectives of tensors on a device can have places. As on its other ranks.

    Then tensors that are not on the CPU pass through memory of the host.
    """
    if group.size() == 1:
        return False
    if device.type == "cpu":
        return is_gloo_or_own(group) or has_places(group)
    return is_gloo(getattr(group, "real_obj", group), device.type)


# Compilers treat the result as a constant.
exchanges._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_places(group: dist.ProcessGroup) -> bool:
    """Whether a group is around another one, and uses that one's places."""
    return getattr(group, "_commhook_has_places", False)


def backend_of(group: dist.ProcessGroup) -> _C.WireBackend:
    """The backend of a group's collectives in places.

    The first call for a group of Gloo makes one over the same ranks, on all of them at the same
    point.
    """
    state = state_of(group)
    found = state.own_backend or state.exchange_backend
    if found is not None:
        return found
    with state.lock:
        found = state.exchange_backend
        if found is None:
            store = group_store(group)
            assert store is not None
            found = state.exchange_backend = _C.WireBackend(
                endpoint(),
                dist.PrefixStore("commhook/exchanges", store),
                "exchanges",
                group.rank(),
                group.size(),
                group_timeout(group),
                names=group_ranks(group) or (),
            )
    return found


# ---- this process's rank in a group, even if the group does not report it ------------------------


def group_rank(group: dist.ProcessGroup) -> int:
    """This process's rank in a group, or the group's own answer if unknown (:func:`check_place`).

    A class may override only ``size()``, as torchft's do, and is then made with rank 0 of 1 on
    every rank. In this case the rank comes from ``torch.distributed``, if the group is registered
    with as many ranks as it has, or else from the group that it wraps.
    """
    if type(group) is dist.ProcessGroup:
        return group.rank()
    known = _known_rank(group)
    return group.rank() if known is None else known


def check_place(op: str, group: dist.ProcessGroup) -> None:
    """Refuse a group with an unknown rank, because segments depend on it; ``op`` is in the error.

    Raises:
        ValueError: its class has its own ``size()`` and no ``rank()``, and neither
            ``torch.distributed`` nor the group that it wraps knows the rank; or its rank is none of
            its ranks.
    """
    is_traced = torch.compiler.is_dynamo_compiling()
    if is_traced or type(group) is dist.ProcessGroup or group.size() == 1:
        return
    rank = _known_rank(group)
    if rank is None:
        which = _class_of(_asked(group), _SIZE).__qualname__
        raise ValueError(
            f"{op}: the process group must know its rank, since each rank has a segment; class "
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
    """Raise a ValueError that names ``op`` for torchft's managed group, also inside another group.

    Its ``size()`` counts some of its ranks, and a rank that is not counted must send zeros.
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


def gathers_flat(group: dist.ProcessGroup, names: Sequence[str]) -> bool:
    """Whether a group, and those that it wraps, have a method of these names that fills one tensor.

    Before torch 2.14 a Python class cannot override that method, so torchft's groups only gather
    into lists.
    """
    for each in group_and_inner(group):
        if type(each) is dist.ProcessGroup:
            return True
        own = any(
            getattr(type(each), name, None) is not getattr(dist.ProcessGroup, name, None)
            for name in names
        )
        if not (own or isinstance(each, _C.ProcessGroup)):
            return False
    return True


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
