"""What decides the numbers of a run: a checkpoint holds it."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

#: More ranks than this on one machine are a slip of the keyboard.
MOST_RANKS = 1024
#: The most that options take. What is far beyond would fail only inside the ranks.
MOST = {
    "timeout": 30 * 24 * 3600,  # 30 days
    "threads": 1024,
    "bucket_cap_mb": 10**6,
    "data_cap_mb": 10**6,
}


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
    bucket_cap_mb: float = 13.0  # three buckets of the model that these make
    data: tuple[str, ...] | None = None
    data_cap_mb: float | None = None

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
        if values.get("data") is not None:
            values["data"] = tuple(values["data"])
        return TrainConfig(**values)


def _can_be(name: str, value: Any, default: Any) -> bool:
    """Whether ``value`` is one that the field ``name`` of TrainConfig can have."""
    if name == "data":
        return value is None or (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        )
    if isinstance(default, str):
        return isinstance(value, str)
    if isinstance(default, int):
        return type(value) is int and (0 if name == "seed" else 1) <= value < 2**63
    if value is None:
        return default is None
    return type(value) in (int, float) and 0 < value <= MOST.get(name, sys.float_info.max)


#: The fields that fix the shapes of the model: a checkpoint fits no others.
MODEL_FIELDS = ("layers", "dim", "heads", "seq")
