"""Messages between ranks through a store, for use while connections are closed."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from torch_commhook.collectives.forks import ServedPort

_NOTHING = "-"


class Reason(NamedTuple):
    """Why a step has failed.

    Attributes:
        text: the continuation of "this step failed" in errors.
        rank: the rank at fault in the default group; None if unknown.
        has_ended: whether the rank's process has ended, or the rank has left the step. Otherwise
            it shows no sign of life.
    """

    text: str
    rank: int | None
    has_ended: bool = True


class Rendezvous:
    """A place where ranks report why a step failed, and that they are ready to begin anew.

    Args:
        store: a store that all ranks reach.
        name: the same on all of them, and used by nobody else.
        rank: this process's rank.
        size: the number of ranks.
        timeout: how long ranks wait for each other.

    Attributes:
        store: the part of the given store that nobody else uses.
        epoch: the number of the present channels; each failure ends an epoch.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, size: int, timeout: timedelta
    ) -> None:
        self.store = dist.PrefixStore(hashed(name), store)
        self.epoch = 1
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._attempts = 0  # to reconnect
        self._met: dict[int, int] = {}  # on rank 0: each rank's attempt at their last meeting
        self._tries = _Tries(self.store, size)
        self._served = ServedPort(getattr(innermost(store), "port", None))

    def tell(self, reason: Reason) -> None:
        """Report why the step has failed."""
        with suppress(RuntimeError):  # the store may have ended with its process, which all notice
            # The first report counts: later failures may be consequences.
            self.store.compare_set(self._failed(self.epoch), "", json.dumps(reason))

    def reason(self) -> Reason | None:
        """Why the step has failed, if a rank has reported it; else None."""
        told = None
        with suppress(RuntimeError):
            # A rank that others have left may ask while they forget the reason.
            told = read_now(self.store, self._failed(self.epoch))
        return None if told is None else Reason(*json.loads(told))

    def catch_up(self) -> bool:
        """Advance to the next epoch, if another rank has failed in it already.

        Returns:
            Whether one has.
        """
        if self._read(self._failed(self.epoch + 1)) is None:
            return False
        self.epoch += 1
        return True

    def wait_for_all(self, purpose: str, size: int) -> Reason | None:
        """Wait until ranks are ready to connect for a purpose, once an epoch.

        Args:
            purpose: the same on all of them.
            size: the number of ranks that connect.

        Returns:
            None once all are ready; or the reason, if a rank has reported a failure before.

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
        with suppress(RuntimeError):
            if self.store.add(place, 1) == 2 * size:  # all have seen it
                self.store.delete_key(all_here)
                self.store.delete_key(place)
        return None

    def meet(self) -> dist.Store:
        """Wait until all ranks want to begin anew, whatever number of attempts each has made.

        Each rank writes the number of its attempt to the store. Rank 0 writes the list of all
        attempts. A rank continues if the list contains its latest attempt, so that no two ranks
        join in different attempts.

        Returns:
            A store for this attempt only.

        Raises:
            RuntimeError: not all have come within the group's timeout.
        """
        self._attempts += 1
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = 0.0005
        epoch = 0  # the epoch for which this rank has written its attempt
        while True:
            self.catch_up()
            if epoch != self.epoch:
                epoch = self.epoch
                self._tries.write(self._here, self._rank, self._attempts)
            all_here = f"{self.epoch + 1}/all"
            if self._rank == 0:
                tries = self._tries.read(self._here)
                # Rank 0's own attempt is always a new one.
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
        """Remove keys that no rank reads any more from the store: all are in the next epoch."""
        with suppress(RuntimeError):
            self.store.delete_key(self._failed(self.epoch - 1))
            self.store.delete_key(f"{self.epoch}/all")
            self._tries.remove(self._here)

    def forget_reason(self) -> None:
        """Remove the last reason from the store, once no rank asks for it any more."""
        with suppress(RuntimeError):
            self.store.delete_key(self._failed(self.epoch))

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
    """The latest attempt of each rank, in a store."""

    def __init__(self, store: Any, size: int) -> None:
        self._store = store
        self._size = size
        self._appends = can_append(store)

    def write(self, place: str, rank: int, attempt: int | None) -> None:
        """Write a rank's attempt; None if it no longer tries."""
        said = "" if attempt is None else str(attempt)
        if self._appends:
            self._store.append(place, f"{rank}:{said} ")
        else:
            self._store.set(f"{place}/{rank}", said)

    def read(self, place: str) -> dict[int, int]:
        """The latest attempt of each rank that tries."""
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
        """Remove all attempts from the store."""
        if self._appends:
            self._store.delete_key(place)
        else:
            for rank in range(self._size):
                self._store.delete_key(f"{place}/{rank}")


def innermost(store: dist.Store) -> dist.Store:
    """The store inside all prefix stores."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def read_now(store: Any, key: str) -> str | None:
    """The text of a key that any rank may delete at any time; None if there is no such key.

    ``get()`` would wait for a key that is deleted after ``check()``. A store's ``compare_set()``
    returns the expected text if the key is missing.

    Args:
        store: a store that supports ``compare_set``.
        key: a key whose text is never ``"-"``.
    """
    # Others may write bytes that are no text.
    found: str = store.compare_set(key, _NOTHING, _NOTHING).decode(errors="backslashreplace")
    return None if found == _NOTHING else found


def can_append(store: Any) -> bool:
    """Whether a store of ``torch.distributed`` supports ``append``. Its type does not show it."""
    has: bool = store.has_extended_api()
    return has


def hashed(*what: object) -> str:
    """A short name in a store, for long names and many ranks."""
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]
