"""Statistics of communication, by bucket and step, and values that a thread sets for callees."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch

from torch_commhook.wording import pluralize

T = TypeVar("T")

# ---- values that code sets for functions that it calls on the same thread ------------------------


class ThreadValue(threading.local, Generic[T]):
    """A value of each thread: None, unless the thread is inside :class:`setting`."""

    value: T | None = None


class setting(Generic[T]):  # noqa: N801 (a context manager)
    """Sets this thread's value of ``of`` inside a block, and restores the earlier one after it."""

    __slots__ = ("_before", "_of", "_value")

    def __init__(self, of: ThreadValue[T], value: T) -> None:
        self._of = of
        self._value = value

    def __enter__(self) -> None:
        self._before = self._of.value
        self._of.value = self._value

    def __exit__(self, *error: object) -> None:
        self._of.value = self._before


# ---- statistics ----------------------------------------------------------------------------------

_meter: ThreadValue[WireMeter] = ThreadValue()


def ring_all_reduce_bytes(payload_bytes: int, world_size: int) -> int:
    """Bytes that each rank sends to all-reduce ``payload_bytes``: ``2 (W - 1) / W`` times this.

    A reduce-scatter and an all-gather around a ring each send ``(W - 1) / W`` of the payload, the
    minimum of all algorithms.
    """
    return round(2 * payload_bytes * (world_size - 1) / world_size)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse tensor's indices and values."""
    if tensor.layout is torch.sparse_coo:
        return sum(tensor_bytes(part) for part in (tensor._indices(), tensor._values()))
    return tensor.numel() * tensor.element_size()


STAGES = ("encode", "wire", "decode")


class CallMeter:
    """Measurements of one bucket's messages, over the steps.

    Attributes:
        seconds: the time of each stage of ``STAGES``.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._squares: torch.Tensor | None = None
        self._calls = 0

    @property
    def squares(self) -> tuple[float, float] | None:
        """The squared lengths of the last measured error of this rank's message, and of the exact
        values. Waits for the device."""
        if self._squares is None:
            return None
        lost, values = self._squares.tolist()
        return lost, values

    def note_squares(self, lost: torch.Tensor, values: torch.Tensor) -> None:
        """Record two squared lengths: float64, one element each. Waits for no device."""
        self._squares = torch.stack([lost, values])

    def add(self, stage: str, seconds: float) -> None:
        """Record the duration of a stage."""
        self.seconds[stage] += seconds

    def is_due(self) -> bool:
        """Count a call. Returns whether to measure its error: in the first and every hundredth."""
        self._calls += 1
        return self._calls % _CALLS_PER_MEASUREMENT == 1


#: Measuring an error takes a few passes over a sample of this many values.
_CALLS_PER_MEASUREMENT = 100


@dataclass
class BucketStats:
    """One bucket's traffic on this rank.

    Counted are the library's collectives, those on a ``RecordingProcessGroup``, and those that a
    hook issues on PyTorch's groups while it is called. Byte counts are None if a hook issues
    others: in callbacks of a Future, in compiled code, or on groups in Python.

    Attributes:
        index: the bucket's number.
        numel: the number of its elements.
        dtype: the dtype of its gradients.
        bytes_sent: bytes that this rank has sent since the hook was attached.
        bytes_sent_last_step: bytes sent in the last backward that communicated.
        bytes_received: bytes that this rank has received since the hook was attached.
        bytes_received_last_step: bytes received in the last backward that communicated.
        relative_error: the length of the error of this rank's own message, relative to the length
            of the exact values. Measured in the first step and every hundredth, on a sample of
            16,384 to 1,048,576 values. None if messages are exact. Compiled backward passes
            measure nothing.
        encode_seconds, wire_seconds, decode_seconds: time since the hook was attached, for
            compressing hooks in eager code on the CPU. Wire time runs from a collective's start to
            its end; computation may have hidden a part of it.

    Example:
        >>> def train(rank):
        ...     model = nn.Linear(4, 1)
        ...     handle = attach(model, hooks.allreduce())
        ...     model(torch.ones(1, 4)).sum().backward()
        ...     return handle.stats().buckets[0]
        >>> bucket = run_ranks(train, 2)[0]
        >>> bucket.numel, bucket.dtype, bucket.bytes_sent
        (5, torch.float32, 20)
    """

    index: int
    numel: int
    dtype: torch.dtype
    bytes_sent: int | None = 0
    bytes_sent_last_step: int | None = 0
    bytes_received: int | None = 0
    bytes_received_last_step: int | None = 0
    relative_error: float | None = None
    encode_seconds: float = 0.0
    wire_seconds: float = 0.0
    decode_seconds: float = 0.0

    def measured(self, meters: Sequence[CallMeter]) -> None:
        """Copy the measurements of the bucket's messages."""
        for stage in STAGES:
            setattr(self, f"{stage}_seconds", sum(m.seconds[stage] for m in meters))
        squares = [found for found in (m.squares for m in meters) if found is not None]
        if squares:
            lost, values = (sum(both) for both in zip(*squares, strict=True))
            self.relative_error = math.sqrt(lost / values) if values else 0.0


@dataclass(frozen=True, kw_only=True)
class MembershipEvent:
    """A change of the ranks in training with ``elastic``: ranks were lost or have joined.

    Each rank has a number for life, as in the log.

    Attributes:
        steps: the number of training steps done before the change.
        size: the number of ranks afterwards.
        lost: the numbers of ranks that were lost, have left, or were left out.
        joined: the numbers of ranks that have joined.
        reason: why ranks were lost, as this rank observed it; empty if none were.
        error_lost: whether the error memory of the lost ranks is lost.

    Example:
        >>> event = MembershipEvent(steps=100, size=7, lost=(3,), reason="its process ended")
        >>> event.lost, event.size
        ((3,), 7)
    """

    steps: int
    size: int
    lost: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    reason: str = ""
    error_lost: bool = False

    def __str__(self) -> str:
        parts = []
        if self.lost:
            with_error = ", with its share of the error memory" if self.error_lost else ""
            because = f" ({self.reason})" if self.reason else ""
            parts.append(f"lost {_ranks(self.lost)}{with_error}{because}")
        if self.joined:
            parts.append(f"{_ranks(self.joined)} joined")
        goes_on = f"{pluralize(self.size, 'rank')} continue{'s' if self.size == 1 else ''}"
        return f"after {pluralize(self.steps, 'step')}: {'; '.join(parts)}; {goes_on}"


def _ranks(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"


@dataclass
class HookStats:
    """Statistics of a hook on this rank, since it was attached.

    Attributes:
        steps: the number of backward passes that communicated; with ``local_sgd``, of exchanges.
        local_steps: with ``local_sgd`` the number of optimizer steps, else 0.
        gradient_bytes: bytes of the gradients in all steps before compression, local steps too.
        bytes_sent: bytes sent in total; None if unknown, as in :class:`BucketStats`.
        bytes_sent_last_step: bytes sent in the last step, over all buckets.
        bytes_received, bytes_received_last_step: the same for received bytes.
        bytes_gathered: bytes sent in all-gathers of a sharded model's parameters, with and without
            ``weights``; also in forwards that do not train.
        bytes_scattered: bytes sent in reduce-scatters among the shards of a replica, with and
            without ``shard_hook``, if the hook averages across replicas.
        world_size: the number of ranks.
        buckets: the present buckets; DDP rebuilds them after the first step.
        of_shards: whether the hook takes part in reduce-scatters, where each rank needs only its
            shard of the sum.
        membership: with ``elastic``: the ranks that were lost or have joined, in order.
        stragglers: with ``elastic`` and its ``straggler``: the ranks that are slow at the moment,
            by their numbers for life, and their computing time relative to the median.
        choice: with ``auto``: the expression of the hook that averages. Else empty.
        reason: with ``auto``: the reason for the choice, in words. Else empty.

    Example:
        >>> def train(rank):
        ...     model = nn.Linear(1000, 1)
        ...     handle = attach(model, hooks.blockwise(bits=8))
        ...     model(torch.ones(1, 1000)).sum().backward()
        ...     return handle.stats()
        >>> stats = run_ranks(train, 2)[0]
        >>> stats.steps, stats.bytes_sent, round(stats.compression_ratio, 1)
        (1, 1040, 3.9)
        >>> sorted(stats.scalars())[:3]
        ['bytes_received_last_step', 'bytes_sent', 'bytes_sent_last_step']
    """

    steps: int = 0
    local_steps: int = field(default=0, repr=False)
    gradient_bytes: int = field(default=0, repr=False)
    bytes_sent: int | None = 0
    bytes_sent_last_step: int | None = 0
    bytes_received: int | None = 0
    bytes_received_last_step: int | None = 0
    bytes_gathered: int = 0
    bytes_scattered: int = 0
    world_size: int = 1
    buckets: list[BucketStats] = field(default_factory=list)
    of_shards: bool = field(default=False, repr=False)
    membership: list[MembershipEvent] = field(default_factory=list, repr=False)
    stragglers: dict[int, float] = field(default_factory=dict, repr=False)
    choice: str = field(default="", repr=False)
    reason: str = field(default="", repr=False)

    @property
    def compression_ratio(self) -> float | None:
        """How many times fewer bytes the last step sent than an all-reduce sends.

        With ``of_shards``, than a reduce-scatter sends, which is half of that. None if the bytes
        are unknown, or nothing was sent.
        """
        plain: float = sum(
            ring_all_reduce_bytes(bucket.numel * bucket.dtype.itemsize, self.world_size)
            for bucket in self.buckets
        )
        if self.of_shards:
            plain /= 2
        return plain / self.bytes_sent_last_step if self.bytes_sent_last_step else None

    @property
    def total_ratio(self) -> float | None:
        """How many times fewer bytes all steps sent than all-reduces of all gradients send.

        With ``local_sgd``, than an all-reduce in each optimizer step sends. With ``of_shards``,
        than reduce-scatters send. None if the bytes are unknown, or nothing was sent.
        """
        plain: float = ring_all_reduce_bytes(self.gradient_bytes, self.world_size)
        if self.of_shards:
            plain /= 2
        return plain / self.bytes_sent if self.bytes_sent else None

    def __str__(self) -> str:
        """Return a table: the bytes sent in total, and each bucket's in the last step."""
        return _table(self)

    def scalars(self, before: HookStats | None = None) -> dict[str, float]:
        """Return numbers for a log, by name. Unknown numbers are left out.

        Args:
            before: earlier statistics; times then count from their last step. None counts all
                steps.

        Returns:
            ``steps`` and ``bytes_sent``. For the last step ``bytes_sent_last_step``,
            ``bytes_received_last_step``, ``compression_ratio`` and ``relative_error`` (the largest
            of all buckets). ``encode_seconds``, ``wire_seconds`` and ``decode_seconds``: means per
            step, over all buckets.
        """
        steps = self.steps - (before.steps if before else 0)
        found: dict[str, float | None] = {
            "steps": self.steps,
            "bytes_sent": self.bytes_sent,
            "bytes_sent_last_step": self.bytes_sent_last_step,
            "bytes_received_last_step": self.bytes_received_last_step,
            "compression_ratio": self.compression_ratio,
            "relative_error": max(
                (b.relative_error for b in self.buckets if b.relative_error is not None),
                default=None,
            ),
        }
        for stage in STAGES:
            name = f"{stage}_seconds"
            now, then = (
                sum(getattr(bucket, name) for bucket in each.buckets)
                for each in (self, before or HookStats())
            )
            # Rebuilt buckets count times from zero.
            if now and steps:
                found[name] = (now - then if now >= then else now) / steps
        return {name: value for name, value in found.items() if value is not None}


class BucketTraffic(NamedTuple):
    """Elements, dtype and bytes on the wire of a bucket in one step."""

    numel: int
    dtype: torch.dtype
    bytes_sent: int | None
    bytes_received: int | None


def count_bucket(
    stats: HookStats,
    index: int,
    bucket_count: int,
    traffic: BucketTraffic,
    *,
    first: bool,
    steps: int = 1,
    of_gradients: bool = True,
) -> None:
    """Add one bucket's traffic in each of some steps to the statistics.

    Args:
        first: whether a step begins with this bucket.
        of_gradients: whether the bucket's values are gradients of these steps.
    """
    numel, dtype, sent, received = traffic
    if of_gradients:
        stats.gradient_bytes += steps * numel * dtype.itemsize
    if first:
        stats.steps += steps
        stats.bytes_sent_last_step = stats.bytes_received_last_step = 0
        del stats.buckets[bucket_count:]
    if index == len(stats.buckets):
        stats.buckets.append(BucketStats(index, numel, dtype))
    entry = stats.buckets[index]
    entry.numel, entry.dtype = numel, dtype
    entry.bytes_sent_last_step, entry.bytes_received_last_step = sent, received
    for counted in (entry, stats):
        counted.bytes_sent = _sum(counted.bytes_sent, sent, steps)
        counted.bytes_received = _sum(counted.bytes_received, received, steps)
    stats.bytes_sent_last_step = _sum(stats.bytes_sent_last_step, sent)
    stats.bytes_received_last_step = _sum(stats.bytes_received_last_step, received)


def forget_bytes(stats: HookStats) -> None:
    """Let what was sent and received be unknown, since not everything was counted."""
    known: list[HookStats | BucketStats] = [stats, *stats.buckets]
    for counted in known:
        counted.bytes_sent = counted.bytes_sent_last_step = None
        counted.bytes_received = counted.bytes_received_last_step = None


def _table(stats: HookStats) -> str:
    steps = pluralize(stats.steps, "step")
    if stats.local_steps:
        exchanges = pluralize(stats.steps, "exchange")
        steps = f"{exchanges} after {pluralize(stats.local_steps, 'step')}"
    sent = "an unknown number of bytes" if stats.bytes_sent is None else _bytes(stats.bytes_sent)
    ratio = stats.total_ratio
    if ratio:
        times = f"{ratio:.1f} times less than"
        if ratio < 1:
            times = f"{1 / ratio:.1f} times as many bytes as"
        sent += f", {times} plain all-reduces"
    lines = [f"{steps} on {pluralize(stats.world_size, 'rank')}: this rank sent {sent}"]
    if stats.choice:
        lines.insert(0, f"auto averages with {stats.choice}: {stats.reason}")
    if not stats.buckets:
        return "\n".join(lines)
    lines[-1] += "; in the last step:"
    rows: list[tuple[str, ...]] = [
        ("bucket", "elements", "dtype", "sent", "received", "error", *STAGES)
    ]
    for each in stats.buckets:
        mean = [getattr(each, f"{stage}_seconds") / max(1, stats.steps) for stage in STAGES]
        rows.append(
            (
                str(each.index),
                f"{each.numel:,}",
                str(each.dtype).removeprefix("torch."),
                _bytes(each.bytes_sent_last_step),
                _bytes(each.bytes_received_last_step),
                "" if each.relative_error is None else f"{each.relative_error:.2g}",
                *("" if seconds == 0.0 else f"{seconds * 1e3:.3g} ms" for seconds in mean),
            )
        )
    used = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in used]
    for row in zip(*used, strict=True):
        cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _bytes(number: int | None) -> str:
    if number is None:
        return "?"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} B"


def _sum(a: int | None, b: int | None, times: int = 1) -> int | None:
    return None if a is None or b is None else a + times * b


@dataclass(slots=True, eq=False)
class WireMeter:
    """Counts the bytes of one call of a hook, while :func:`counting` installs it on this thread.

    Library collectives and recording groups may report the same traffic, so each has its own
    counter.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    collectives: int = 0
    bytes_recorded: int = 0
    operations_recorded: int = 0

    def add(self, bytes_sent: int, bytes_received: int) -> None:
        """Add the bytes that one collective sends from this rank, and brings to it."""
        self.bytes_sent += bytes_sent
        self.bytes_received += bytes_received
        self.collectives += 1

    def traffic(self, numel: int, dtype: torch.dtype) -> BucketTraffic:
        """This rank's traffic; its bytes are None if nothing was counted."""
        if self.collectives:
            return BucketTraffic(numel, dtype, self.bytes_sent, self.bytes_received)
        recorded = self.bytes_recorded if self.operations_recorded else None
        return BucketTraffic(numel, dtype, recorded, None)


def counting(meter: WireMeter) -> setting[WireMeter]:
    """Let ``meter`` count the collectives that this thread issues inside the block."""
    return setting(_meter, meter)


def note_collective(bytes_sent: int, bytes_received: int | None = None) -> None:
    """Report a collective to this thread's meter, if there is one.

    Received bytes default to sent bytes.
    """
    received = bytes_sent if bytes_received is None else bytes_received
    if torch.compiler.is_dynamo_compiling():
        return
    meter = _meter.value
    if meter is not None:
        meter.add(bytes_sent, received)


def note_recorded(bytes_sent: int) -> None:
    """Report bytes that a recording group has counted to this thread's meter, if any."""
    meter = _meter.value
    if meter is not None:
        meter.bytes_recorded += bytes_sent
        meter.operations_recorded += 1
