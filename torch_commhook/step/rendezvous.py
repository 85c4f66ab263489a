"""Messages between ranks through a store, for when their connections are closed."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist


class Reason(NamedTuple):
    """Why a step has failed.

    Attributes:
        text: as errors go on after "this step failed".
        rank: at fault, a rank of the default group; None where nobody knows.
        has_ended: whether the rank's process has ended, or the rank has left the step. Else it
            shows no sign of life.
    """

    text: str
    rank: int | None
    has_ended: bool = True


class Rendezvous:
    """Where ranks say why a step failed, and that they are here to connect anew.

    Args:
        store: that all ranks reach.
        name: the same on all of them, and of nobody else.
        rank: this process's.
        size: how many there are.
        timeout: how long ranks wait for each other.

    Attributes:
        store: what nobody else uses of the one that was given.
        epoch: of the connections; each failure ends one.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, size: int, timeout: timedelta
    ) -> None:
        self.store = dist.PrefixStore(hashed(name), store)
        self.epoch = 1
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._attempts = 0  # to connect anew
        self._met: dict[int, int] = {}  # on rank 0: the try of each when they met last
        self._tries = _Tries(self.store, size)

    def tell(self, reason: Reason) -> None:
        """Say why the step has failed."""
        with suppress(RuntimeError):  # the store may have gone with its process, which all see
            # The first counts: who comes later may have failed because of it.
            self.store.compare_set(self._failed(self.epoch), "", json.dumps(reason))

    def reason(self) -> Reason | None:
        """Why the step has failed, where a rank has said so."""
        told = self._read(self._failed(self.epoch))
        return None if told is None else Reason(*json.loads(told))

    def catch_up(self) -> bool:
        """Go on to the next epoch, where another rank has failed in that already.

        Returns:
            Whether one has.
        """
        if self._read(self._failed(self.epoch + 1)) is None:
            return False
        self.epoch += 1
        return True

    def wait_for_all(self, purpose: str, size: int) -> Reason | None:
        """Wait until ranks are here to connect for something, once an epoch.

        Args:
            purpose: what they connect for; the same on all of them.
            size: how many connect.

        Returns:
            None once all are here; or why the step has failed, where a rank has said so before.

        Raises:
            RuntimeError: not all have come within the group's timeout.
        """
        place = f"{self.epoch}/{hashed(purpose)}"
        all_here = f"{place}/all"
        if self.store.add(place, 1) == size:
            self.store.set(all_here, "")
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = 0.0005
        while not self.store.check([all_here]):
            reason = self.reason()
            if reason is not None:
                return reason
            if time.monotonic() > deadline:
                with suppress(RuntimeError):
                    self.store.add(place, -1)
                raise RuntimeError(
                    f"torch_commhook: not all ranks have come to connect for {purpose!r} within "
                    f"{self._timeout.total_seconds():g} s, the process group's timeout"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return None

    def meet(self) -> dist.Store:
        """Wait until all ranks want to connect anew, at whichever try of each.

        Each writes the number of its try to the store. Rank 0 writes the list of all tries. A rank
        goes on if it finds its last try in the list, so that no two connect in different tries.

        Returns:
            A store for this one try.

        Raises:
            RuntimeError: not all have come within the group's timeout.
        """
        self._attempts += 1
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = 0.0005
        epoch = 0  # for which this rank has written that it is here
        while True:
            self.catch_up()
            if epoch != self.epoch:
                epoch = self.epoch
                self._tries.write(self._here, self._rank, self._attempts)
            all_here = f"{self.epoch + 1}/all"
            if self._rank == 0:
                tries = self._tries.read(self._here)
                # Rank 0's own is always another one.
                if len(tries) == self._size and all(
                    said != self._met.get(rank) for rank, said in tries.items()
                ):
                    self._met = tries
                    said = " ".join(str(tries[rank]) for rank in range(self._size))
                    self.store.set(all_here, said)
                    self._forget()
                    return self._store_of(self._attempts)
            else:
                listed = (self._read(all_here) or "").split()
                if len(listed) == self._size and listed[self._rank] == str(self._attempts):
                    return self._store_of(int(listed[0]))
            if time.monotonic() > deadline:
                with suppress(RuntimeError):
                    self._tries.write(self._here, self._rank, None)
                raise RuntimeError("not all ranks have come")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _forget(self) -> None:
        """Take out of the store what no rank reads any more: all have come to the next epoch."""
        with suppress(RuntimeError):
            self.store.delete_key(self._failed(self.epoch - 1))
            self.store.delete_key(f"{self.epoch}/all")
            self._tries.remove(self._here)

    def _failed(self, epoch: int) -> str:
        return f"{epoch}/failed"

    @property
    def _here(self) -> str:
        return f"{self.epoch + 1}/here"

    def _read(self, key: str) -> str | None:
        try:
            return self.store.get(key).decode() if self.store.check([key]) else None
        except RuntimeError:
            return None

    def _store_of(self, attempt: int) -> dist.Store:
        return dist.PrefixStore(f"{self.epoch + 1}/{attempt}", self.store)


class _Tries:
    """The last try of each rank, in a store."""

    def __init__(self, store: Any, size: int) -> None:
        self._store = store
        self._size = size
        self._appends = can_append(store)

    def write(self, place: str, rank: int, attempt: int | None) -> None:
        """Write a rank's try; None where it tries no longer."""
        said = "" if attempt is None else str(attempt)
        if self._appends:
            self._store.append(place, f"{rank}:{said} ")
        else:
            self._store.set(f"{place}/{rank}", said)

    def read(self, place: str) -> dict[int, int]:
        """The last try of each rank that tries."""
        found: dict[int, str] = {}
        with suppress(RuntimeError):
            if not self._appends:
                for rank in range(self._size):
                    if self._store.check([f"{place}/{rank}"]):
                        found[rank] = self._store.get(f"{place}/{rank}").decode()
            elif self._store.check([place]):
                for entry in self._store.get(place).decode().split():
                    rank_text, _, said = entry.partition(":")
                    found[int(rank_text)] = said
        return {rank: int(said) for rank, said in found.items() if said}

    def remove(self, place: str) -> None:
        """Take all out of the store."""
        if self._appends:
            self._store.delete_key(place)
        else:
            for rank in range(self._size):
                self._store.delete_key(f"{place}/{rank}")


def innermost(store: dist.Store) -> dist.Store:
    """The store that others only put a prefix before."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def can_append(store: Any) -> bool:
    """Whether a store of ``torch.distributed`` has ``append``, which its type does not tell."""
    has: bool = store.has_extended_api()
    return has


def hashed(*what: object) -> str:
    """A short name in a store, of long ones and of many ranks."""
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]
