"""The library's own process groups, which begin anew after a failed step: who fails, who meets."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_commhook import _C
from torch_commhook._C import WireFailure
from torch_commhook.collectives.gloo_groups import (
    backend_of,
    destroy_group,
    group_timeout,
    make_group,
)
from torch_commhook.collectives.wire import LOST_AFTER, endpoint

# ---- messages between ranks through a store, for use while connections are closed ----------------


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
    return bool(store.has_extended_api())


def hashed(*what: object) -> str:
    """A short name in a store, for long names and many ranks."""
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


# ---- the library's own process groups, which can begin anew after a failed step ------------------


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
        devices: as for :func:`make_group`.

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
        devices: Collection[str] = (),
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
            devices=devices,
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


# ---- the error that ranks raise because of another rank, and the errors that it replaces ---------


class PeerError(RuntimeError):
    """Another rank's hook failed, or its process ended, so this step counts on no rank.

    Attributes:
        rank: the rank at fault in the default group; None if unknown.

    Example:
        >>> error = PeerError("rank 1 failed")  # backward() raises one on the other ranks
        >>> isinstance(error, RuntimeError), error.rank
        (True, None)
    """

    rank: int | None = None
    #: The reason as ranks send it to each other; None for an error that a user has made.
    _reason: Reason | None = None


def peer_error(reason: Reason) -> PeerError:
    """The error of a step, with the reason as ranks send it to each other."""
    error = PeerError(f"torch_commhook: this step failed {reason.text}")
    error.rank, error._reason = reason.rank, reason
    return error


def reason_of(error: BaseException | str) -> Reason | None:
    """The reason that ranks have sent to each other, if the error has one."""
    return error._reason if isinstance(error, PeerError) else None


def reason_of_loss(failure: Failure, error: BaseException, seen_by: int) -> Reason:
    """The reason to send to the other ranks for a rank that has gone.

    A rank that leaves says which reason it has, as it reports it in the store, which may have ended
    with the process of the rank at fault. Without a reason a process has ended, unless its host
    does not answer.
    """
    if failure.why:
        rank = failure.rank if failure.rank >= 0 else None
        return Reason(failure.why, rank, failure.kind != WireFailure.LOST)
    if failure.kind == WireFailure.TOLD:
        return Reason(f"on rank {failure.rank}: {failure.text}", failure.rank)
    has_ended = failure.kind != WireFailure.LOST
    text = (
        f"since the process of rank {failure.rank} ended, or left the others without saying why"
        if has_ended
        else f"since the host of rank {failure.rank} did not answer"
    )
    return Reason(f"{text}, as rank {seen_by} saw: {error}", failure.rank, has_ended)
