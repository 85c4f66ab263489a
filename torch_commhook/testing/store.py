"""A store for threads as ranks: a rank that waits for a key lets the others run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_commhook.testing.scheduler import Scheduler, current_rank


class _Keys:
    """Keys that a rank waits for."""

    def __init__(self, owner: int, keys: Sequence[str]) -> None:
        self.is_done = False
        self.owner = owner
        self.keys = keys

    def describe(self) -> str:
        return f"{', '.join(self.keys)} in the store"

    def is_hopeless(self, ended: Collection[int]) -> bool:
        return False

    def deliver(self) -> None:
        """Do nothing: there is no Future of it."""


class SimulatedStore(dist.Store):
    """The store of ``torch.distributed`` inside ``run_ranks``.

    It works as other stores, except that a key which never appears raises a ``DeadlockError`` and
    not a timeout.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._values: dict[str, bytes] = {}
        self._waiting: list[_Keys] = []

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = _bytes(value)
        for keys in [keys for keys in self._waiting if self.check(keys.keys)]:
            self._waiting.remove(keys)
            self._scheduler.complete(keys)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        number = int(self._values.get(key, b"0")) + amount
        self.set(key, str(number))
        return number

    def append(self, key: str, value: str | bytes) -> None:
        self.set(key, self._values.get(key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if its value is as expected, or if it is missing and nothing is expected."""
        current = self._values.get(key)
        if current == _bytes(expected) or (current is None and not expected):
            self.set(key, desired)
            return _bytes(desired)
        return _bytes(expected) if current is None else current

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Let other ranks run until the keys exist."""
        if self.check(keys):
            return
        rank = current_rank()
        if rank is None:
            raise RuntimeError(
                f"store: keys must be there, or waited for by a rank, got {', '.join(keys)}"
            )
        rank = self._scheduler.enter(rank.number, "store")
        missing = _Keys(rank.number, list(keys))
        self._waiting.append(missing)
        self._scheduler.wait(rank, missing)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: there is no timeout."""

    def clone(self) -> Any:
        return self

    # The names that C++ calls.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
