"""The library's own process groups, which can begin anew after a failed step."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import (
    backend_of,
    destroy_group,
    group_timeout,
    make_group,
)
from torch_commhook.collectives.wire import LOST_AFTER, endpoint
from torch_commhook.step.rendezvous import Reason, hashed

#: The length of every greeting.
_GREETING_BYTES = 32


class Failure(NamedTuple):
    """Why the messages of a group fail.

    Attributes:
        kind: what has happened.
        rank: the rank at fault in the default group; -1 if unknown.
        text: what errors say.
        why: what a rank has told that has left the group because of that; empty if nothing.
    """

    kind: _C.WireFailure
    rank: int
    text: str
    why: str = ""


class ConnectedGroup:
    """A group of the library's own that can begin anew.

    When it is made, up to 16 ranks connect to all others, and of more each to a few.

    Args:
        store: a store in which nobody else uses ``name``.
        name: the same on its ranks, and different from other groups' names.
        like: a group over the same ranks, with the timeout to use.
        description: its purpose, for PyTorch's flight recorder.
        connect_within: how long ranks wait for each other to connect, and for a sign of their
            hosts. None: as long as collectives take at most, and ``wire.LOST_AFTER``.
        greeting: a digest of at most 32 bytes, which the ranks compare; see :meth:`is_alike`.

    Raises:
        RuntimeError: a rank does not come within the time, or its process has ended.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        like: dist.ProcessGroup,
        description: str,
        connect_within: timedelta | None = None,
        greeting: bytes = b"",
    ) -> None:
        self.name = name
        self.rank: int = like.rank()
        self.ranks = dist.get_process_group_ranks(like)
        self._within: timedelta = group_timeout(like) if connect_within is None else connect_within
        self._lost_after = LOST_AFTER
        self._rails = 1
        self._changes = 0  # of their number
        if connect_within is not None:
            self._lost_after = max(1.0, min(LOST_AFTER, connect_within.total_seconds()))
        self._greeting: tuple[bytes, bool] | None = None
        own_store = dist.PrefixStore(f"{self.place}/1", store)
        self.group = make_group(
            own_store,
            self.rank,
            self.ranks,
            name,
            group_timeout(like),
            description=description,
            within=self._within,
            lost_after=self._lost_after,
            is_held=True,
        )
        self.backend = backend_of(self.group)
        try:
            self._greet(own_store, greeting)
        except BaseException:
            destroy_group(self.group)
            raise

    @property
    def place(self) -> str:
        """The place in a store where the ranks meet; one name may belong to several groups."""
        return hashed(self.name, self.ranks)

    def _greet(self, store: dist.Store, greeting: bytes = b"") -> None:
        """Hear from all ranks. Then all have this one's address."""
        if len(self.ranks) == 1:
            return
        told = torch.frombuffer(
            bytearray(greeting.ljust(_GREETING_BYTES, b"\0")), dtype=torch.uint8
        )
        every = told.new_empty((len(self.ranks), _GREETING_BYTES))
        every[self.rank] = told
        found = self.backend.exchanges()
        found.gather(list(every), every, found.reserve(), self._within).wait()
        self._greeting = greeting, bool((every == told).all())
        # All have read this rank's address. When the group ends, the store may have ended, too.
        removal = threading.Thread(
            target=remove_address, args=(store, self.rank), name="commhook-address"
        )
        removal.start()

    def is_alike(self, greeting: bytes) -> bool | None:
        """Whether all ranks have made the group with this greeting; None if this one has not.

        The next call returns None.
        """
        found, self._greeting = self._greeting, None
        return found[1] if found is not None and found[0] == greeting else None

    def renew(self, store: dist.Store) -> None:
        """Begin anew after a failure. All ranks call this.

        Args:
            store: a store for this attempt only.

        Raises:
            RuntimeError: a rank does not come within the time, or its process has ended.
        """
        own_store = dist.PrefixStore(self.place, store)
        where = endpoint(self._lost_after, self._rails)
        self.backend.join(where, own_store, self.name, self._within, self.ranks, is_held=True)
        self._greet(own_store)

    def use_rails(self, count: int, store: dist.Store) -> None:
        """Use so many connections to each rank. All ranks call this, with nothing under way."""
        if count != self._rails:
            self._rails = count
            self._changes += 1
            self.renew(dist.PrefixStore(str(self._changes), store))

    def close(self, reason: Reason) -> None:
        """Leave the group: ranks that wait for messages of this one fail with this reason."""
        kind = _C.WireFailure.ENDED if reason.has_ended else _C.WireFailure.LOST
        rank = self.ranks.index(reason.rank) if reason.rank in self.ranks else -1
        self.backend.close(reason.text, kind, rank)

    def drain(self, until: float) -> bool:
        """After :meth:`close`: wait until no callback of messages runs. Returns whether one did.

        Args:
            until: a time of ``time.monotonic()``.

        Raises:
            RuntimeError: one still runs then.
        """
        found = self.backend.drain(timedelta(seconds=max(0.0, until - time.monotonic())))
        if found is None:
            raise RuntimeError(
                f"torch_commhook: a callback of group {self.name!r} still runs in a failed step"
            )
        return found

    def failure(self) -> Failure | None:
        """Why messages fail, if they do."""
        found = self.backend.failure()
        if found is None:
            return None
        kind, rank, text, why = found
        return Failure(kind, self.ranks[rank] if rank >= 0 else -1, text, why)


def remove_address(store: dist.Store, rank: int) -> None:
    """Remove a rank's address in a group from the group's store."""
    with suppress(RuntimeError):
        store.delete_key(f"wire/{rank}")
