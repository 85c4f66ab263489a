"""What communication costs: bytes that a rank puts on the wire, per bucket and step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

_current = threading.local()


def ring_all_reduce_bytes(payload_bytes: int, world_size: int) -> int:
    """Bytes that each rank sends to all-reduce ``payload_bytes``: ``2 (W - 1) / W`` times these.

    A reduce-scatter and an all-gather around a ring each move ``(W - 1) / W`` of the payload, the
    least that any algorithm can.
    """
    return round(2 * payload_bytes * (world_size - 1) / world_size)


@dataclass
class BucketStats:
    """One bucket's traffic. Byte counts are None where a hook goes past the library's collectives.

    Attributes:
        index: of the bucket.
        numel: elements in it.
        dtype: of its gradients.
        bytes_sent: by this rank, since the hook was attached.
        bytes_sent_last_step: in the last backward that communicated.
    """

    index: int
    numel: int
    dtype: torch.dtype
    bytes_sent: int | None = 0
    bytes_sent_last_step: int | None = 0


@dataclass
class HookStats:
    """What a hook has sent since it was attached, on this rank.

    Attributes:
        steps: backward passes that communicated.
        bytes_sent: in all; None where the hook goes past the library's collectives, so that
            nothing counts.
        bytes_sent_last_step: in the last of the steps, over all buckets.
        buckets: the buckets as they are now; DDP forms them anew after the first step.
    """

    steps: int = 0
    bytes_sent: int | None = 0
    bytes_sent_last_step: int | None = 0
    buckets: list[BucketStats] = field(default_factory=list)


class WireMeter:
    """Counts the bytes of one call of a hook, while :func:`counting` has it on this thread."""

    __slots__ = ("bytes_sent", "collectives")

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.collectives = 0

    def add(self, bytes_sent: int) -> None:
        """Note one collective that sends ``bytes_sent`` from this rank."""
        self.bytes_sent += bytes_sent
        self.collectives += 1


@contextmanager
def counting(meter: WireMeter) -> Iterator[None]:
    """Let ``meter`` count the collectives that this thread issues inside."""
    before = getattr(_current, "meter", None)
    _current.meter = meter
    try:
        yield
    finally:
        _current.meter = before


def note_collective(bytes_sent: int) -> None:
    """Tell the meter of this thread, where there is one, of a collective."""
    meter = getattr(_current, "meter", None)
    if meter is not None:
        meter.add(bytes_sent)
