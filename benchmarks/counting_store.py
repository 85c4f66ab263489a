"""A store of ``torch.distributed`` that counts a rank's requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class CountingStore(dist.Store):
    """Passes all requests to another store, and counts them.

    Args:
        store: the other store.
        rank: this process's rank.
        ranks: the number of ranks.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank = rank
        self.ranks = ranks
        self._store = store
        self._requests = 0
        self._bytes = 0

    @classmethod
    def of_environment(cls, timeout: timedelta) -> CountingStore:
        """Wraps the store at MASTER_ADDR and MASTER_PORT, which rank 0 runs."""
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            ranks,
            is_master=rank == 0,
            timeout=timeout,
        )
        return cls(store, rank, ranks)

    def counts(self) -> tuple[int, int]:
        """The requests so far, and the bytes of their keys and values, in both directions."""
        return self._requests, self._bytes

    def _ask(self, method: str, keys: Sequence[str], *arguments: Any) -> Any:
        whole = method in ("multi_get", "wait", "check")
        found = getattr(self._store, method)(list(keys) if whole else keys[0], *arguments)
        sent = [*keys, *(each for each in arguments if isinstance(each, (str, bytes)))]
        values = found if isinstance(found, list) else [found]
        self._requests += 1
        self._bytes += sum(len(each) for each in sent)
        self._bytes += sum(len(each) if isinstance(each, bytes) else 8 for each in values)
        return found

    def set(self, key: str, value: Any) -> None:
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        found: bytes = self._ask("get", [key])
        return found

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], amount))

    def append(self, key: str, value: Any) -> None:
        self._ask("append", [key], value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        found: bytes = self._ask("compare_set", [key], expected, desired)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, *([] if timeout is None else [timeout]))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found: list[bytes] = self._ask("multi_get", keys)
        return found

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", [key]))

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    # The name that C++ calls.
    deleteKey = delete_key  # noqa: N815
