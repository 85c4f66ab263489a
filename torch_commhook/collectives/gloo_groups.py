"""Gloo process groups of the library's own, beside those that a user has made."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_commhook import _C
from torch_commhook.collectives.gloo_backend import (
    MOST_UNDER_WAY,
    GlooBackend,
    add_gloo,
    connect,
)
from torch_commhook.native.dynamo import left_to_python

_CPU = torch.device("cpu")

#: Makes the group of second stages for another.
_Provider = Callable[[], dist.ProcessGroup | None]

_seconds: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)
_firsts: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
_exchanges: weakref.WeakKeyDictionary[
    dist.ProcessGroup, tuple[_C.Exchanges, weakref.finalize[..., Any]]
] = weakref.WeakKeyDictionary()
#: Groups whose connections large messages take, too: in each direction.
_more: weakref.WeakKeyDictionary[
    dist.ProcessGroup, list[tuple[dist.ProcessGroup, dist.ProcessGroup]]
] = weakref.WeakKeyDictionary()
_made: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
#: Of groups of the library's own.
_backends: weakref.WeakKeyDictionary[dist.ProcessGroup, GlooBackend] = weakref.WeakKeyDictionary()
_providers: weakref.WeakKeyDictionary[dist.ProcessGroup, _Provider] = weakref.WeakKeyDictionary()


def is_gloo(group: dist.ProcessGroup, device: str = "cpu") -> bool:
    """Whether a group is PyTorch's own, with Gloo for the tensors of a device."""
    if type(group) is not dist.ProcessGroup or not dist.is_gloo_available():
        return False
    try:
        backend = group._get_backend(torch.device(device))
    except RuntimeError:  # none for it
        return False
    return type(backend) is dist.ProcessGroupGloo


def is_or_was_gloo(group: dist.ProcessGroup) -> bool:
    """:func:`is_gloo`, or one of the library's own, whose backend a failed step has dropped."""
    # Newer compilers have another object while they trace.
    group = getattr(group, "real_obj", group)
    return group in _made or is_gloo(group)


def lacks_cpu(group: dist.ProcessGroup) -> bool:
    """Whether a group is PyTorch's own, with no backend for tensors on the CPU, as one of NCCL."""
    if type(group) is not dist.ProcessGroup or not dist.is_gloo_available():
        return False
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return bool(group._device_types)
    return False


def group_timeout(group: dist.ProcessGroup, device: torch.device = _CPU) -> timedelta:
    """How long a group's collectives may take; PyTorch's default where it does not tell.

    Args:
        group: the process group.
        device: of the tensors. A group without a backend for it gives another device's timeout.
    """
    for each in (device, *getattr(group, "_device_types", ())):
        try:
            return group._get_backend(each).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return distributed_c10d.default_pg_timeout


def group_threads(group: dist.ProcessGroup) -> int:
    """How many collectives a Gloo group runs at once; for groups of other kinds, of a new one.

    Those of :func:`make_group` run ``gloo_backend.MOST_UNDER_WAY``.
    """
    if not dist.is_gloo_available():
        return 2
    backend: Any = dist.ProcessGroupGloo
    options: Any = backend._Options()
    if is_gloo(group):
        options = group._get_backend(_CPU).options
    return int(options._threads)


def group_store(group: dist.ProcessGroup) -> dist.Store | None:
    """The store through which a group's ranks have met; None where nobody knows."""
    entry = distributed_c10d._world.pg_map.get(group)
    return None if entry is None else entry[1]


def group_name(group: dist.ProcessGroup) -> str:
    """A group's name, or something like one."""
    try:
        return group.group_name
    except (RuntimeError, ValueError):  # one that was made by hand has none; torchft's say so, too
        return f"group {id(group):x}"


def group_description(group: dist.ProcessGroup) -> str:
    """What PyTorch's flight recorder and logs call a group."""
    described: str = group.group_desc
    return group_name(group) if described in ("", "undefined") else described


def group_ranks(group: dist.ProcessGroup) -> list[int] | None:
    """The global ranks of a group, or of the group that it wraps; None where none is known."""
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
    """Whether ``torch.distributed`` has known a group of its own, and knows it no longer."""
    if type(group) is not dist.ProcessGroup or group in distributed_c10d._world.pg_map:
        return False
    try:
        name = group.group_name
    except RuntimeError:  # one that was made by hand was never known
        return False
    try:
        return distributed_c10d._resolve_process_group(name) is not group
    except RuntimeError:
        return True


def make_group(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    name: str,
    timeout: timedelta,
    *,
    description: str,
    threads: int = MOST_UNDER_WAY,
) -> dist.ProcessGroup:
    """A process group over Gloo, known to ``torch.distributed``. All of its ranks must make it.

    It connects to nobody yet: see :func:`connect_group`.

    Args:
        store: for this group alone.
        rank: this process's in it.
        ranks: its members, as ranks of the default group.
        name: that no other group has.
        timeout: of its collectives.
        description: what the group is for, as PyTorch's flight recorder and logs show it.
        threads: so many collectives are under way at once.
    """
    # Not new_group(), which all ranks of the default group would have to call, and which gives a
    # backend two threads.
    if name in distributed_c10d._world.pg_names.values():
        raise ValueError(f"torch_commhook: there is a process group {name!r} already")
    group = dist.ProcessGroup(store, rank, len(ranks))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    _backends[group] = add_gloo(group, dist.PrefixStore("cpu/", store), timeout, threads)
    group._set_group_name(name)  # type: ignore[arg-type]
    group._set_group_desc(description)
    _make_known(group, store, name, ranks)
    _made.add(group)
    return group


def connect_group(group: dist.ProcessGroup, greeting: bytes = b"") -> GlooBackend:
    """Connect a group of the library's own, as :func:`gloo_backend.connect` does.

    Args:
        group: by :func:`make_group` or :func:`make_backend`.
        greeting: as :func:`gloo_backend.connect`.

    Raises:
        RuntimeError: a rank does not come within the group's timeout, or its process has ended.
    """
    backend = _backends[group]
    connect(group, backend, group_timeout(group), greeting)
    return backend


def take_greeting(group: dist.ProcessGroup, own: bytes) -> bool | None:
    """:meth:`GlooBackend.take_greeting` of a group of the library's own."""
    return _backends[group].take_greeting(own)


def make_backend(
    store: dist.Store, rank: int, size: int, timeout: timedelta, threads: int
) -> dist.ProcessGroup:
    """A new backend for a group that has lost its own, in a group that nobody knows.

    Args:
        store: for this backend alone.
        rank, size: of the group.
        timeout, threads: as :func:`make_group`.
    """
    group = dist.ProcessGroup(store, rank, size)
    _backends[group] = add_gloo(group, store, timeout, threads)
    return group


def _make_known(
    group: dist.ProcessGroup, store: dist.Store, name: str, ranks: Sequence[int]
) -> None:
    """Enter a group of Gloo for the CPU where ``torch.distributed`` looks for groups."""
    world: Any = distributed_c10d._world
    config = distributed_c10d.BackendConfig(dist.Backend("cpu:gloo"))
    tag = f"ptd:{name}"
    world.pg_map[group] = (dist.Backend("cpu:gloo"), store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {r: index for index, r in enumerate(ranks)}
    world.pg_backend_config[group] = str(config)
    world.pg_to_tag[group] = tag
    world.tags_to_pg.setdefault("", []).append(group)
    world.tags_to_pg.setdefault(tag, []).append(group)
    torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]


def move_backend(source: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """Give a group the backend of another one, and take its last address out of the store.

    Args:
        source: by :func:`make_backend`. It has none from then on.
        group: by :func:`make_group`, with connections that are closed. All ranks have connected to
            the new backend.
    """
    before, _backends[group] = _backends[group], _backends.pop(source)
    group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, source._get_backend(_CPU))
    with suppress(RuntimeError):  # the store may have gone with its process
        before.addresses.remove_own()


@left_to_python
def destroy_group(group: dist.ProcessGroup, *, in_background: bool = False) -> None:
    """Forget a group that :func:`make_group` has made, and end its threads.

    Args:
        group: the group.
        in_background: as :func:`close_connections`.
    """
    world = distributed_c10d._world
    if group in world.pg_map:  # or torch.distributed has ended itself
        # Not destroy_process_group(), which asks the backends that a failed step has dropped.
        tag = world.pg_to_tag.get(group, "")
        for groups in (world.tags_to_pg.get(tag, []), world.tags_to_pg.get("", [])):
            if group in groups:
                groups.remove(group)
        name = world.pg_names[group]
        for table in (
            world.pg_map,
            world.pg_names,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
        ):
            table.pop(group, None)
        torch._C._distributed_c10d._unregister_process_group(name)
    close_connections(group, in_background=in_background)


def close_connections(*groups: dist.ProcessGroup, in_background: bool = False) -> None:
    """Take groups' backends off, so that the other ranks' collectives on them end.

    Args:
        groups: the groups.
        in_background: return before connections are closed, which takes a tenth of a second. The
            interpreter's end waits for that.
    """
    for group in groups:  # of all first, since they take the connections of two
        stop_exchanges(group)
    taken = [_taken(group) for group in groups]
    # A thread that Python has not started may be a backend's own, which drops what its callback has
    # kept, and must not wait for its own end.
    is_foreign = isinstance(threading.current_thread(), threading._DummyThread)
    # What the interpreter calls at its end is too late for another thread.
    if is_foreign or (in_background and threading.main_thread().is_alive()):
        # The interpreter's end waits for it.
        threading.Thread(target=_close, args=(taken,), name="commhook-close").start()
    else:
        _close(taken)


def _taken(group: dist.ProcessGroup) -> _C.TakenBackends:
    backend = _backends.get(group)
    if backend is None:
        return _C.TakenBackends(group, None, None)
    last, backend.last = backend.last, None
    return _C.TakenBackends(group, backend.addresses, last)


def _close(taken: Sequence[_C.TakenBackends]) -> None:
    for backends in taken:
        backends.close()


# ---- for second stages ---------------------------------------------------------------------------


def second_stages(description: str) -> str:
    """What describes the group of second stages beside the one of that description."""
    return f"{description}, second stages"


def provide_second_group(group: dist.ProcessGroup, provider: _Provider) -> None:
    """Have :func:`second_group` ask ``provider`` for this group."""
    _providers[group] = provider


def second_group(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The group over the same ranks on which the second stage of a collective is issued.

    On Gloo, where stages are issued by whatever thread has ended the one before, each needs a group
    of its own: the order of collectives on one must be the same on all ranks. It is made when it is
    asked for first, by all ranks at the same point.

    Returns:
        None for groups of other kinds.
    """
    found = _seconds.get(group)
    if found is not None:
        return found
    provider = _providers.get(group)
    if provider is not None:
        found = provider()
    elif is_gloo(group) and (parent_store := group_store(group)) is not None:
        name = f"{group_name(group)}/commhook-second"
        store = dist.PrefixStore(name, parent_store)
        ranks = dist.get_process_group_ranks(group)
        description = second_stages(f"commhook: collectives of {group_description(group)}")
        timeout = group_timeout(group)
        found = make_group(store, group.rank(), ranks, name, timeout, description=description)
        try:
            connect_group(found)
        except BaseException:
            destroy_group(found)
            raise
        # Gloo's threads must end before the interpreter does.
        weakref.finalize(group, destroy_group, found)
    if found is not None:
        _seconds[group] = found
        _firsts[found] = weakref.ref(group)
        of_group = _exchanges.get(group)
        if of_group is not None:
            of_group[0].use_down(found)
    return found


# ---- exchanges -----------------------------------------------------------------------------------


def exchanges_of(group: dist.ProcessGroup) -> _C.Exchanges:
    """Those that are issued on a group.

    Of the group of second stages they are made before the first of these, since that may be issued
    by a thread of the first group's, which must not hold it.
    """
    found = _exchanges.get(group)
    if found is None:
        is_second = group in _firsts
        up: Any = _firsts[group]() if is_second else group
        down = _seconds.get(up, up)  # the same where it is alone
        names = list(distributed_c10d._world.pg_group_ranks.get(group, ()))
        exchanges = _C.Exchanges(up, down, is_second, names)
        _use_more(exchanges, _more.get(up, ()))
        # The threads that wait for them must end before the interpreter does.
        found = _exchanges[group] = exchanges, weakref.finalize(group, exchanges.stop)
    return found[0]


def use_more_connections(
    group: dist.ProcessGroup, more: Sequence[tuple[dist.ProcessGroup, dist.ProcessGroup]]
) -> None:
    """Have large messages of a group, and of its second stages, take more connections.

    All ranks call this between the same two exchanges, with none under way.

    Args:
        group: of which the messages are.
        more: groups of Gloo over the same ranks, in pairs: of messages to higher ranks, and of
            those to lower ranks. Instead of those that were given before.
    """
    _more[group] = list(more)
    for each in (group, _seconds.get(group)):
        found = None if each is None else _exchanges.get(each)
        if found is not None:
            _use_more(found[0], more)


def has_more_connections(group: dist.ProcessGroup) -> bool:
    """Whether :func:`use_more_connections` has given a group any."""
    return bool(_more.get(group))


def _use_more(
    exchanges: _C.Exchanges, more: Sequence[tuple[dist.ProcessGroup, dist.ProcessGroup]]
) -> None:
    exchanges.use_more([up for up, _ in more], [down for _, down in more])


def finish_exchanges(group: dist.ProcessGroup) -> None:
    """Wait until none is under way on a group, as Gloo's own end waits for its collectives."""
    found = _exchanges.get(group)
    if found is not None:
        found[0].finish()


def stop_exchanges(group: dist.ProcessGroup) -> None:
    """Let those that are under way on a group fail; new connections have others."""
    found = _exchanges.pop(group, None)
    if found is not None:
        _, stop = found
        stop()
