"""The library's own Gloo process groups, beside those of the user."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_commhook import _C
from torch_commhook.collectives.forks import keep_for_good
from torch_commhook.collectives.gloo_backend import (
    MOST_UNDER_WAY,
    GlooBackend,
    add_gloo,
    connect,
    partners,
)
from torch_commhook.native.dynamo import left_to_python

_CPU = torch.device("cpu")

#: Makes the group of second stages for another group.
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
#: Groups whose connections large messages use too, in each direction.
_more: weakref.WeakKeyDictionary[
    dist.ProcessGroup, list[tuple[dist.ProcessGroup, dist.ProcessGroup]]
] = weakref.WeakKeyDictionary()
_made: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
#: The backends of the library's own groups.
_backends: weakref.WeakKeyDictionary[dist.ProcessGroup, GlooBackend] = weakref.WeakKeyDictionary()
_providers: weakref.WeakKeyDictionary[dist.ProcessGroup, _Provider] = weakref.WeakKeyDictionary()


def is_gloo(group: dist.ProcessGroup, device: str = "cpu") -> bool:
    """Whether a group is PyTorch's own, with Gloo for the tensors of a device."""
    if type(group) is not dist.ProcessGroup or not dist.is_gloo_available():
        return False
    try:
        backend = group._get_backend(torch.device(device))
    except RuntimeError:  # it has none for the device
        return False
    return type(backend) is dist.ProcessGroupGloo


def is_or_was_gloo(group: dist.ProcessGroup) -> bool:
    """As :func:`is_gloo`; also for own groups after a failed step has dropped the backend."""
    # Newer compilers use another object while they trace.
    group = getattr(group, "real_obj", group)
    return group in _made or is_gloo(group)


def lacks_cpu(group: dist.ProcessGroup) -> bool:
    """Whether a group is PyTorch's own, without a backend for CPU tensors, such as NCCL's."""
    if type(group) is not dist.ProcessGroup or not dist.is_gloo_available():
        return False
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return bool(group._device_types)
    return False


def group_timeout(group: dist.ProcessGroup, device: torch.device = _CPU) -> timedelta:
    """A group's timeout for collectives; PyTorch's default if it does not report one.

    Args:
        group: the process group.
        device: the tensors' device. A group without a backend for it returns another device's
            timeout.
    """
    for each in (device, *getattr(group, "_device_types", ())):
        try:
            return group._get_backend(each).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return distributed_c10d.default_pg_timeout


def group_threads(group: dist.ProcessGroup) -> int:
    """The number of collectives that a Gloo group runs at once; for others, that of a new group.

    Groups of :func:`make_group` run ``gloo_backend.MOST_UNDER_WAY``.
    """
    if not dist.is_gloo_available():
        return 2
    backend: Any = dist.ProcessGroupGloo
    options: Any = backend._Options()
    if is_gloo(group):
        options = group._get_backend(_CPU).options
    return int(options._threads)


def group_store(group: dist.ProcessGroup) -> dist.Store | None:
    """The store through which a group's ranks have met; None if unknown."""
    entry = distributed_c10d._world.pg_map.get(group)
    return None if entry is None else entry[1]


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
    if type(group) is not dist.ProcessGroup or group in distributed_c10d._world.pg_map:
        return False
    try:
        name = group.group_name
    except RuntimeError:  # a group made by hand was never known
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
    """Make a Gloo process group that ``torch.distributed`` knows. All of its ranks must call this.

    It connects to no rank yet: see :func:`connect_group`.

    Args:
        store: a store for this group only.
        rank: this process's rank in it.
        ranks: its members, as ranks of the default group.
        name: a name that no other group has.
        timeout: the timeout of its collectives.
        description: the group's purpose, for PyTorch's flight recorder and logs.
        threads: the number of collectives that run at once.
    """
    # Not new_group(): all ranks of the default group would have to call it, and it gives a backend
    # two threads.
    if name in distributed_c10d._world.pg_names.values():
        raise ValueError(f"torch_commhook: there is a process group {name!r} already")
    group = dist.ProcessGroup(store, rank, len(ranks))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    own_store = dist.PrefixStore("cpu/", store)
    _backends[group] = add_gloo(group, own_store, rank, len(ranks), timeout, threads)
    group._set_group_name(name)  # type: ignore[arg-type]
    group._set_group_desc(description)
    _make_known(group, store, name, ranks)
    _made.add(group)
    return group


def connect_group(
    group: dist.ProcessGroup, greeting: bytes = b"", within: timedelta | None = None
) -> GlooBackend:
    """Connect one of the library's own groups, as :func:`gloo_backend.connect` does.

    If each rank is then connected to each, this rank's address disappears from the store.

    Args:
        group: from :func:`make_group` or :func:`make_backend`.
        greeting: as for :func:`gloo_backend.connect`.
        within: how long to wait for the other ranks' addresses. Until then nothing else can use
            the group's connection to the store. ``None``: the group's timeout.

    Raises:
        RuntimeError: a rank does not connect in that time, or its process has ended.
    """
    backend = _backends[group]
    connect(group, backend, group_timeout(group) if within is None else within, greeting)
    if len(partners(group.rank(), group.size())) == group.size() - 1:
        # All have read this rank's address. They need not wait until the store has removed it, and
        # when the group ends, the store may have ended too.
        removal = threading.Thread(
            target=_remove_address, args=(backend.addresses,), name="commhook-address"
        )
        removal.start()
    return backend


def _remove_address(addresses: _C.AddressStore) -> None:
    with suppress(RuntimeError):
        addresses.remove_own()


def addresses_of(group: dist.ProcessGroup) -> _C.AddressStore:
    """The store with this rank's address in one of the library's own groups."""
    return _backends[group].addresses


def take_greeting(group: dist.ProcessGroup, own: bytes) -> bool | None:
    """Call :meth:`GlooBackend.take_greeting` of one of the library's own groups."""
    return _backends[group].take_greeting(own)


def make_backend(
    store: dist.Store, rank: int, size: int, timeout: timedelta, threads: int
) -> dist.ProcessGroup:
    """Make a new backend for a group that has lost its own, in an unregistered group.

    Args:
        store: a store for this backend only.
        rank, size: the group's rank and size.
        timeout, threads: as for :func:`make_group`.
    """
    group = dist.ProcessGroup(store, rank, size)
    _backends[group] = add_gloo(group, store, rank, size, timeout, threads)
    return group


def _make_known(
    group: dist.ProcessGroup, store: dist.Store, name: str, ranks: Sequence[int]
) -> None:
    """Register a Gloo group for the CPU with ``torch.distributed``."""
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
    """Give a group the backend of another one, and remove its last address from the store.

    Args:
        source: from :func:`make_backend`. It has no backend afterwards.
        group: from :func:`make_group`, with closed connections. All ranks have connected to the new
            backend.
    """
    before, _backends[group] = _backends[group], _backends.pop(source)
    group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, source._get_backend(_CPU))
    with suppress(RuntimeError):  # the store may have ended with its process
        before.addresses.remove_own()


@left_to_python
def destroy_group(group: dist.ProcessGroup, *, in_background: bool = False) -> None:
    """Destroy a group that :func:`make_group` has made, and end its threads.

    Args:
        group: the group.
        in_background: as for :func:`close_connections`.
    """
    world = distributed_c10d._world
    if group in world.pg_map:  # torch.distributed may have ended already
        # Not destroy_process_group(), which needs the backends that a failed step has dropped.
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
    """Remove groups' backends, so that the other ranks' collectives on them end.

    Args:
        groups: the groups.
        in_background: whether to return before connections are closed, which takes a tenth of a
            second. The interpreter waits for it at its end.
    """
    for group in groups:  # all before any is closed: they share connections
        stop_exchanges(group)
    taken = [_taken(group) for group in groups]
    # A thread that Python has not started may be a backend's own. It releases its callback's
    # objects, and must not wait for its own end.
    is_foreign = isinstance(threading.current_thread(), threading._DummyThread)
    # Handlers at the interpreter's end are too late for another thread.
    if is_foreign or (in_background and threading.main_thread().is_alive()):
        # The interpreter waits for it at its end.
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
    """The description of the group of second stages, from that of the first group."""
    return f"{description}, second stages"


def provide_second_group(group: dist.ProcessGroup, provider: _Provider) -> None:
    """Let :func:`second_group` call ``provider`` for this group."""
    _providers[group] = provider


def second_group(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The group over the same ranks that issues the second stage of collectives.

    On Gloo the thread that ends one stage issues the next, so each stage needs a group of its own:
    collectives on one group must have the same order on all ranks. The first call makes it, on all
    ranks at the same point.

    Returns:
        The group; None for groups of other kinds.
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
    """The exchanges of a group.

    For a group of second stages they are made before its first exchange, because a thread of the
    first group may issue that one, and must not reference the group.
    """
    found = _exchanges.get(group)
    if found is None:
        is_second = group in _firsts
        up: Any = _firsts[group]() if is_second else group
        down = _seconds.get(up, up)  # the same if there is only one
        names = list(distributed_c10d._world.pg_group_ranks.get(group, ()))
        exchanges = _C.Exchanges(up, down, is_second, names)
        _use_more(exchanges, _more.get(up, ()))
        # The threads that wait for them must end before the interpreter does.
        found = _exchanges[group] = exchanges, weakref.finalize(group, exchanges.stop)
    return found[0]


def use_more_connections(
    group: dist.ProcessGroup, more: Sequence[tuple[dist.ProcessGroup, dist.ProcessGroup]]
) -> None:
    """Let large messages of a group, and of its second stages, use more connections.

    All ranks call this between the same two exchanges, while none is running.

    Args:
        group: the group of the messages.
        more: Gloo groups over the same ranks, in pairs: for messages to higher ranks, and for those
            to lower ranks. They replace earlier ones.
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


def finish_messages(
    group: dist.ProcessGroup, messages: MutableSequence[tuple[int, dist.Work]]
) -> None:
    """Wait until messages have arrived or are sent.

    Gloo reports the end of a connection neither to a send that waits for its turn, nor to a receive
    of which a part has come. Alone these wait until the group's timeout.

    Args:
        group: the group of the messages.
        messages: the other rank and the Work of each. Afterwards the list is empty: a Work in use,
            as by an error's traceback, keeps its connection open.

    Raises:
        RuntimeError: a connection was lost.
    """
    if not is_or_was_gloo(group):
        while messages:
            messages.pop(0)[1].wait()
        return
    ranks, works = [rank for rank, _ in messages], [work for _, work in messages]
    messages.clear()
    try:
        exchanges_of(group).finish_messages(ranks, works)
    finally:
        works.clear()


def finish_exchanges(group: dist.ProcessGroup) -> None:
    """Wait until no exchange of a group is running, as Gloo's own end waits for collectives."""
    found = _exchanges.get(group)
    if found is not None:
        found[0].finish()


def stop_exchanges(group: dist.ProcessGroup) -> None:
    """Fail the running exchanges of a group; new connections have new exchanges."""
    found = _exchanges.pop(group, None)
    if found is not None:
        _, stop = found
        stop()


def _keep_in_child() -> None:
    for exchanges, stop in _exchanges.values():
        stop.detach()
        keep_for_good(exchanges)
    _exchanges.clear()
    for group in _backends:
        with suppress(RuntimeError):  # its connections are closed
            keep_for_good(group._get_backend(_CPU))


os.register_at_fork(after_in_child=_keep_in_child)
