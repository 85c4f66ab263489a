"""Messages between ranks through a store, for when their connections are closed."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist


class Rendezvous:
    """Where ranks say why a step failed, and that they are here to connect anew.

    Args:
        store: that all ranks reach.
        name: the same on all of them, and of nobody else.
        rank: this process's.
        size: how many there are.
        timeout: how long ranks wait for each other.

    Attributes:
        store: as given.
        epoch: of the connections; each failure ends one.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, size: int, timeout: timedelta
    ) -> None:
        self.store = store
        self.epoch = 1
        self._name = name
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._attempts = 0  # to connect anew
        self._met: dict[int, str | None] = {}  # on rank 0: what each said when they met last

    def tell(self, reason: str) -> None:
        """Say why the step has failed."""
        with suppress(RuntimeError):  # the store may have gone with its process, which all see
            # The first counts: who comes later may have failed because of it.
            self.store.compare_set(self._failed(self.epoch), "", reason)

    def reason(self) -> str | None:
        """Why the step has failed, where a rank has said so."""
        return self._read(self._failed(self.epoch))

    def catch_up(self) -> bool:
        """Go on to the next epoch, where another rank has failed in that already.

        Returns:
            Whether one has.
        """
        if self._read(self._failed(self.epoch + 1)) is None:
            return False
        self.epoch += 1
        return True

    def wait_for_all(self, purpose: str, rank: int, size: int) -> str | None:
        """Wait until ranks are here to connect for something, once an epoch.

        Args:
            purpose: what they connect for; the same on all of them.
            rank: this process's among those that connect.
            size: how many connect.

        Returns:
            None once all are here; or why the step has failed, where a rank has said so before.

        Raises:
            RuntimeError: not all have come within the group's timeout.
        """
        keys = [f"{self._name}/{self.epoch}/{purpose}/{each}" for each in range(size)]
        self.store.set(keys[rank], "")
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = 0.0005
        while not self.store.check(keys):
            reason = self.reason()
            if reason is not None:
                return reason
            if time.monotonic() > deadline:
                with suppress(RuntimeError):
                    self.store.delete_key(keys[rank])
                raise RuntimeError(
                    f"torch_commhook: not all ranks have come to connect for {purpose!r} within "
                    f"{self._timeout.total_seconds():g} s, the process group's timeout"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return None

    def meet(self) -> dist.Store:
        """Wait until all ranks want to connect anew, at whichever try of each.

        Each says in the store that it is here. Rank 0 says who has come, and who finds there what
        it has said itself goes on: so nobody connects with what a rank has left from an earlier
        try.

        Returns:
            A store for this one try.

        Raises:
            RuntimeError: not all have come within the group's timeout.
        """
        self._attempts += 1
        own = str(self._attempts)
        deadline = time.monotonic() + self._timeout.total_seconds()
        pause = 0.0005
        here = ""
        while True:
            self.catch_up()
            if here != self._here(self._rank):
                here = self._here(self._rank)
                self.store.set(here, own)
            all_here = f"{self._name}/{self.epoch + 1}/all"
            if self._rank == 0:
                tries = [self._read(self._here(rank)) for rank in range(self._size)]
                # Rank 0's own is always another one.
                if all(said not in (None, self._met.get(rank)) for rank, said in enumerate(tries)):
                    self._met = dict(enumerate(tries))
                    self.store.set(all_here, " ".join(map(str, tries)))
                    return self._store_of(f"{self.epoch + 1}/{own}")
            else:
                said = (self._read(all_here) or "").split()
                if len(said) == self._size and said[self._rank] == own:
                    return self._store_of(f"{self.epoch + 1}/{said[0]}")
            if time.monotonic() > deadline:
                with suppress(RuntimeError):
                    self.store.delete_key(here)
                raise RuntimeError("not all ranks have come")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _failed(self, epoch: int) -> str:
        return f"{self._name}/{epoch}/failed"

    def _here(self, rank: int) -> str:
        return f"{self._name}/{self.epoch + 1}/here/{rank}"

    def _read(self, key: str) -> str | None:
        try:
            return self.store.get(key).decode() if self.store.check([key]) else None
        except RuntimeError:
            return None

    def _store_of(self, connections: str) -> dist.Store:
        return dist.PrefixStore(f"{self._name}/{connections}", self.store)
