"""The library's own process groups, which can reconnect after a failed step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from torch_commhook.collectives.gloo_backend import MOST_UNDER_WAY
from torch_commhook.collectives.gloo_groups import (
    close_connections,
    connect_group,
    destroy_group,
    finish_exchanges,
    group_timeout,
    make_backend,
    make_group,
    move_backend,
)
from torch_commhook.collectives.lost_hosts import SECONDS, cut, notice_lost_hosts
from torch_commhook.step.rendezvous import hashed

_CPU = torch.device("cpu")


class ConnectedGroup:
    """A Gloo group of the library's own that can reconnect.

    Its ranks connect when it is made; with many ranks, only neighbours do.

    Args:
        store: a store in which nobody else uses ``name``.
        name: the same on its ranks, and different from other groups' names.
        like: a group over the same ranks, with the timeout to use.
        description: its purpose, for PyTorch's flight recorder.
        threads: the number of collectives that run at once.
        connect_within: how long ranks wait for each other to connect, and a connection for an
            answer of its host. None: as long as collectives may take to connect, and
            ``lost_hosts.SECONDS`` for an answer.
        greeting: as for ``gloo_backend.connect``.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        like: dist.ProcessGroup,
        description: str,
        threads: int = MOST_UNDER_WAY,
        connect_within: timedelta | None = None,
        greeting: bytes = b"",
    ) -> None:
        self.name = name
        self.threads = threads
        self.description = description
        self.rank: int = like.rank()
        self.ranks = dist.get_process_group_ranks(like)
        self.timeout: timedelta = group_timeout(like)
        own_store = dist.PrefixStore(f"{self.place}/1", store)
        self._connect_within = connect_within
        self._lost_after: float = SECONDS
        if connect_within is not None:
            self._lost_after = min(SECONDS, connect_within.total_seconds())

        def make() -> dist.ProcessGroup:
            group = make_group(
                own_store,
                self.rank,
                self.ranks,
                name,
                self.timeout,
                description=description,
                threads=threads,
            )
            try:
                self._connect(group, greeting)
            except BaseException:
                destroy_group(group)
                raise
            return group

        self.group = make() if connect_within is None else make_within(connect_within, make)

    @property
    def place(self) -> str:
        """The place in a store where the ranks meet; one name may belong to several groups."""
        return hashed(self.name, self.ranks)

    def _connect(self, group: dist.ProcessGroup, greeting: bytes = b"") -> None:
        connected = connect_group(group, greeting, self._connect_within)
        self._connections = connected.addresses
        notice_lost_hosts(self._connections, self._lost_after)

    def backend(self, store: dist.Store) -> dist.ProcessGroup:
        """Make new connections, in a group that is not registered anywhere.

        Raises:
            RuntimeError: a rank does not connect within the group's timeout, or its process has
                ended.
        """
        own_store = dist.PrefixStore(self.place, store)
        fresh = make_backend(own_store, self.rank, len(self.ranks), self.timeout, self.threads)
        try:
            self._connect(fresh)
        except BaseException:
            close_connections(fresh)
            raise
        return fresh

    def cut(self) -> None:
        """Close the connections, so that running collectives that wait for a silent rank fail."""
        cut(self._connections)

    def take(self, fresh: dist.ProcessGroup) -> None:
        """Communicate through the connections of :meth:`backend` from now on."""
        close_connections(self.group)
        move_backend(fresh, self.group)
        self._set_name()

    def take_fake(self) -> None:
        """Use a backend that does not communicate."""
        close_connections(self.group)
        fake = FakeProcessGroup._create_internal(self.rank, len(self.ranks))
        # The default one, which torch 2.14 and newer ask for the size.
        self.group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, fake)
        self._set_name()

    def _set_name(self) -> None:
        self.group._set_group_name(self.name)  # type: ignore[arg-type]
        self.group._set_group_desc(self.description)


def make_within(most: timedelta, make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    """Make a group within a time. If it takes longer, the group is destroyed once it is made.

    Gloo waits for missing ranks as long as for a collective.

    Raises:
        RuntimeError: the time is over.
    """
    lock = threading.Lock()
    made: list[dist.ProcessGroup | BaseException] = []
    is_late = False

    def run() -> None:
        try:
            found: dist.ProcessGroup | BaseException = make()
        except BaseException as error:
            found = error
        with lock:
            made.append(found)
        if is_late and isinstance(found, dist.ProcessGroup):
            destroy_group(found)

    thread = threading.Thread(target=run, name="commhook-connect", daemon=True)
    thread.start()
    thread.join(most.total_seconds())
    with lock:
        is_late = not made
    if is_late:
        raise RuntimeError(f"ranks did not connect within {most.total_seconds():g} s")
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]


def destroy_all(groups: Sequence[ConnectedGroup], *, in_background: bool = False) -> None:
    """Destroy groups.

    Args:
        groups: the groups.
        in_background: as for ``gloo_groups.close_connections``.
    """
    for each in groups:  # all before the first is destroyed: the next would take its connections
        finish_exchanges(each.group)
    for each in groups:
        destroy_group(each.group, in_background=in_background)
