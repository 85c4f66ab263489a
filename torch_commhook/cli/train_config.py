"""What decides the numbers of a run: a checkpoint holds it."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch_commhook.hooks.expressions import NO_HOOK

#: More ranks than this on one machine are a slip of the keyboard.
MOST_RANKS = 1024
#: The most that options take. What is far beyond would fail only inside the ranks.
MOST = {
    "timeout": 30 * 24 * 3600,  # 30 days
    "threads": 1024,
    "bucket_cap_mb": 10**6,
    "data_cap_mb": 10**6,
}


#: How a model is spread over the ranks: whole on each; in shards over all of them; or in replicas,
#: each of which is in shards over its own ranks.
PARALLEL = ("ddp", "fsdp", "hsdp")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the numbers of a run; a checkpoint holds it."""

    layers: int = 6
    dim: int = 384
    heads: int = 6
    seq: int = 128
    batch: int = 4
    steps: int = 200
    lr: float = 1e-3
    seed: int = 0
    ranks: int = 2
    hook: str = "cast(bfloat16)"
    #: A small first bucket, so that something travels early, and a small last one, for which
    #: everybody waits.
    bucket_cap_mb: tuple[float, ...] = (2.0, 12.0, 14.0, 10.0, 6.0)
    data: tuple[str, ...] | None = None
    data_cap_mb: float | None = None
    parallel: str = "ddp"
    #: Of ``"hsdp"`` alone: the ranks of a replica.
    shards: int | None = None
    shard_hook: str | None = None
    weights: str | None = None

    @property
    def shard_ranks(self) -> int:
        """The ranks that a parameter is sharded over."""
        if self.parallel == "hsdp":
            assert self.shards is not None
            return self.shards
        return self.ranks if self.parallel == "fsdp" else 1

    @property
    def replicas(self) -> int:
        """How many whole models there are."""
        return self.ranks // self.shard_ranks

    @property
    def is_plain(self) -> bool:
        """Whether there is no hook."""
        return is_no_hook(self.hook)

    @property
    def communication(self) -> str:
        """The hook, and what else compresses, as in a call of ``attach``."""
        beside = {"shard_hook": self.shard_hook, "weights": self.weights}
        given = [f"{name}={value}" for name, value in beside.items() if value is not None]
        return ", ".join([self.hook, *given])

    @property
    def cap_bytes(self) -> int | None:
        """The most bytes of text to use: 16 MB of the standard library, all of given files."""
        cap = self.data_cap_mb
        if cap is None and self.data is None:
            cap = 16.0
        return None if cap is None else int(cap * 1e6)

    def to_plain(self) -> dict[str, Any]:
        """The configuration as plain values, for JSON and for a checkpoint."""
        plain = asdict(self)
        plain["data"] = None if self.data is None else list(self.data)
        plain["bucket_cap_mb"] = list(self.bucket_cap_mb)
        return plain

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> TrainConfig:
        """The inverse of :meth:`to_plain`; unknown keys are ignored, missing ones get defaults.

        Raises:
            ValueError: a value is not one that the field can have.
        """
        known = {f.name: f.default for f in fields(TrainConfig)}
        values = {name: value for name, value in plain.items() if name in known}
        for name, value in values.items():
            if not _can_be(name, value, known[name]):
                raise ValueError(f"its {name} can't be {reprlib.repr(value)}")
        for name in ("data", "bucket_cap_mb"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return TrainConfig(**values)


def is_no_hook(expression: str) -> bool:
    """Whether a hook's expression says that there is none."""
    return expression.strip().lower() == NO_HOOK


def _can_be(name: str, value: Any, default: Any) -> bool:
    """Whether ``value`` is one that the field ``name`` of TrainConfig can have."""
    if name == "parallel":
        return value in PARALLEL
    if name == "shards":
        return value is None or (type(value) is int and 1 <= value <= MOST_RANKS)
    if name in ("shard_hook", "weights"):
        return value is None or isinstance(value, str)
    if name == "data":
        return value is None or (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        )
    if isinstance(default, tuple):
        own = isinstance(value, list) and len(value) > 0
        return own and all(_can_be(name, item, default[0]) for item in value)
    if isinstance(default, str):
        return isinstance(value, str)
    if isinstance(default, int):
        return type(value) is int and (0 if name == "seed" else 1) <= value < 2**63
    if value is None:
        return default is None
    return type(value) in (int, float) and 0 < value <= MOST.get(name, sys.float_info.max)


#: The fields that fix the shapes of the model: a checkpoint fits no others.
MODEL_FIELDS = ("layers", "dim", "heads", "seq")
#: The fields that what hooks remember is of; with others it is no use.
MEMORY_FIELDS = ("hook", "parallel", "shards", "shard_hook")
