"""The configuration of a run of ``train``: all settings that decide its numbers."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch_commhook.hooks.expressions import NO_HOOK

#: The most ranks on one machine. More are a typing error.
MOST_RANKS = 1024
#: The largest values of options. Far larger ones would only fail in the ranks.
MOST = {
    "layers": 10**4,
    "dim": 10**6,
    "heads": 10**6,
    "seq": 10**6,
    "batch": 10**6,
    "steps": 10**9,
    "timeout": 30 * 24 * 3600,  # 30 days
    "threads": 1024,
    "bucket_cap_mb": 10**6,
    "data_cap_mb": 10**6,
}


#: The distribution of a model over the ranks: whole on each rank, sharded over all ranks, or in
#: replicas that are each sharded over some ranks.
PARALLEL = ("ddp", "fsdp", "hsdp")


@dataclass(frozen=True)
class TrainConfig:
    """The settings that decide the numbers of a run. A checkpoint contains them."""

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
    #: The first bucket is small, so that communication starts early. The last one is small, because
    #: the step waits for it.
    bucket_cap_mb: tuple[float, ...] = (2.0, 12.0, 14.0, 10.0, 6.0)
    data: tuple[str, ...] | None = None
    data_cap_mb: float | None = None
    parallel: str = "ddp"
    #: Only with ``"hsdp"``: the ranks of a replica.
    shards: int | None = None
    shard_hook: str | None = None
    weights: str | None = None

    @property
    def shard_ranks(self) -> int:
        """The number of ranks that a parameter is sharded over; 1 with DDP."""
        if self.parallel == "hsdp":
            assert self.shards is not None
            return self.shards
        return self.ranks if self.parallel == "fsdp" else 1

    @property
    def replicas(self) -> int:
        """The number of replicas of the model."""
        return self.ranks // self.shard_ranks

    @property
    def is_plain(self) -> bool:
        """Whether there is no hook."""
        return is_no_hook(self.hook)

    @property
    def communication(self) -> str:
        """The hook, ``shard_hook`` and ``weights``, as in a call of ``attach``."""
        options = {"shard_hook": self.shard_hook, "weights": self.weights}
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        return ", ".join([self.hook, *given])

    @property
    def cap_bytes(self) -> int | None:
        """The most bytes of text to use; None for all. By default 16 MB of the standard library."""
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
        """The inverse of :meth:`to_plain`. Ignores unknown keys; missing ones get defaults.

        Raises:
            ValueError: a field can't have its value.
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
    """Whether the text of a hook stands for no hook: ``none``."""
    return expression.strip().lower() == NO_HOOK


def _can_be(name: str, value: Any, default: Any) -> bool:
    """Whether the field ``name`` of TrainConfig can have ``value``."""
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
        return type(value) is int and (0 if name == "seed" else 1) <= value <= MOST.get(
            name, 2**63 - 1
        )
    if value is None:
        return default is None
    return type(value) in (int, float) and 0 < value <= MOST.get(name, sys.float_info.max)


#: The fields that decide the shapes of the model. A checkpoint fits only these values.
MODEL_FIELDS = ("layers", "dim", "heads", "seq")
#: The fields that a hook's memory depends on. With other values, a checkpoint's memory is useless.
MEMORY_FIELDS = ("hook", "parallel", "shards", "shard_hook")
