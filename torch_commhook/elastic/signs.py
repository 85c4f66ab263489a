"""Detects which members of a training are alive, by signs that they write to its store."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from torch_commhook import _C
from torch_commhook.collectives.forks import keep_for_good
from torch_commhook.elastic.membership import VIEW_NUMBER

#: The number of signs in the time after which a rank counts as lost.
_SIGNS = 5

_running: weakref.WeakSet[_C.SignsOfLife] = weakref.WeakSet()


def _keep_in_child() -> None:
    for each in _running:
        keep_for_good(each)


os.register_at_fork(after_in_child=_keep_in_child)


class StoreSigns:
    """This process's signs of life, and those of others.

    Args:
        store: a store of ``torch.distributed``, read through a connection of its own.
        own: this process's number.
        silent_after: seconds without a sign after which a process counts as lost.
    """

    #: The number of requests to join.
    WANTED = "wanted"

    def __init__(self, store: Any, own: int, silent_after: float) -> None:
        self._store = store
        self._own = own
        self._silent_after = silent_after
        self._signs = _C.SignsOfLife(store.clone(), _key(own), silent_after / _SIGNS)
        _running.add(self._signs)
        self._watched: set[int] = set()
        self.watch(())

    def watch(self, ranks: Collection[int]) -> None:
        """Watch these processes, and no others."""
        self._watched = set(ranks)
        self._signs.watch([self.WANTED, VIEW_NUMBER, *map(_key, sorted(self._watched))])

    def silent(self, ranks: Collection[int]) -> set[int]:
        """Return those that show no sign of life. They are watched from now on."""
        if not set(ranks) <= self._watched:
            self.watch(self._watched | set(ranks))
        signs = self._signs.signs()
        return {
            rank
            for rank in ranks
            if _key(rank) in signs and signs[_key(rank)][1] > self._silent_after
        }

    def wanted(self) -> int:
        """The number of requests to join that this process has seen."""
        return self._number(self.WANTED)

    def view_number(self) -> int:
        """The number of the last view that this process has seen in the store; 0 if none."""
        return self._number(VIEW_NUMBER)

    def _number(self, key: str) -> int:
        return self._signs.signs().get(key, (0, 0.0))[0]

    def seconds_without_store(self) -> float:
        """Seconds since the store's last answer."""
        return self._signs.seconds_without_store()

    def stop(self) -> None:
        """Send no more signs, and remove the last one from the store."""
        self._signs.stop()
        with suppress(RuntimeError):  # the store may be gone
            self._store.delete_key(_key(self._own))


def _key(rank: int) -> str:
    return f"alive/{rank}"
