"""A process group that records what passes through it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.metrics import note_recorded
from torch_commhook.process_group.completion import on_completion
from torch_commhook.process_group.operations import Call, describe
from torch_commhook.process_group.trace import Interval, chrome_trace, overlaps, write_trace
from torch_commhook.process_group.work import WrapperWork
from torch_commhook.process_group.wrapper import WrapperProcessGroup


@dataclass
class Counters:
    """Sums over all operations, or over those of one kind.

    Attributes:
        calls: operations that were issued.
        completed: of these, those that have completed, failed ones included.
        errors: those that have failed.
        nbytes: of their tensors.
        bytes_sent: the least that this rank must send for them.
        seconds: from issue to completion, of those that have completed.
        blocked: for how long threads waited for their works, in seconds.

    Example:
        >>> def reduce(rank):
        ...     group = process_group.RecordingProcessGroup(dist.group.WORLD)
        ...     group.allreduce([torch.ones(4)]).wait()
        ...     counters = group.counters["allreduce"]
        ...     return counters.calls, counters.nbytes, counters.bytes_sent
        >>> run_ranks(reduce, 2)
        [(1, 16, 16), (1, 16, 16)]
    """

    calls: int = 0
    completed: int = 0
    errors: int = 0
    nbytes: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    blocked: float = 0.0


@dataclass
class Record:
    """One operation of a group. Times are in seconds of a clock that all processes of a machine
    share.

    Attributes:
        operation: the method, by its newest name.
        op_id: counts the operations of the group, from 0.
        sizes: of the tensors that it reads, or writes where it reads nothing.
        dtype: of the first of these; None without tensors.
        nbytes: of these, together.
        bytes_sent: the least that this rank must send for it.
        start: when it was issued.
        end: when it had completed; None before.
        blocked: for how long threads waited for its Work, in seconds. What waits for its Future is
            not seen.
        error: what it has failed with.

    Example:
        >>> def reduce(rank):
        ...     group = process_group.RecordingProcessGroup(dist.group.WORLD)
        ...     group.allreduce([torch.ones(4)]).wait()
        ...     record = group.records[0]
        ...     return record.operation, record.nbytes, record.bytes_sent
        >>> run_ranks(reduce, 2)[0]
        ('allreduce', 16, 16)
    """

    operation: str
    op_id: int
    sizes: tuple[torch.Size, ...]
    dtype: torch.dtype | None
    nbytes: int
    bytes_sent: int
    start: float
    end: float | None = None
    blocked: float = 0.0
    error: BaseException | None = None
    _counters: Counters = field(default_factory=Counters, repr=False, compare=False)

    @property
    def duration(self) -> float | None:
        """From issue to completion, in seconds; None before."""
        return None if self.end is None else self.end - self.start


class RecordingProcessGroup(WrapperProcessGroup):
    """Leaves everything to another group, and records operation, bytes, dtype, times and errors.

    Where a hook of :func:`torch_commhook.attach` issues its collectives on such a group,
    ``HookHandle.stats()`` has the bytes, also of hooks that go past the library's collectives.

    Args:
        parent: the process group that does the work.
        limit: how many records are kept, the latest ones; the counters go on.

    Raises:
        TypeError: no process group.
        ValueError: ``limit`` is no positive number.

    Example:
        >>> def reduce(rank):
        ...     group = process_group.RecordingProcessGroup(dist.group.WORLD)
        ...     for _ in range(3):
        ...         group.allreduce([torch.ones(4)]).wait()
        ...     return group.total.calls, group.total.bytes_sent
        >>> run_ranks(reduce, 2)[0]
        (3, 48)
    """

    def __init__(self, parent: dist.ProcessGroup, *, limit: int = 100_000) -> None:
        super().__init__(parent)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"{type(self).__name__}: limit must be a positive int, got {limit!r}")
        self._limit = limit
        self._lock = threading.Lock()
        self._records: list[Record] = []
        self._counters: dict[str, Counters] = {}
        self._issued = 0

    @property
    def records(self) -> list[Record]:
        """The operations in the order of their issue, those under way included."""
        with self._lock:
            return self._records[-self._limit :]

    @property
    def counters(self) -> dict[str, Counters]:
        """Sums by operation."""
        with self._lock:
            return {name: Counters(**vars(counters)) for name, counters in self._counters.items()}

    @property
    def total(self) -> Counters:
        """Sums over all operations."""
        total = Counters()
        for counters in self.counters.values():
            for name, value in vars(counters).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    def clear(self) -> None:
        """Forget all records and counters; what is under way will not be counted."""
        with self._lock:
            self._records, self._counters = [], {}

    def summary(self) -> str:
        """A table: a line for each operation, and one for all.

        ``overlap`` is the part of the time in flight during which other operations of the group
        were in flight too; ``blocked`` the part that threads waited for their works.
        """
        records = self.records
        shared = overlaps([record_interval(record) for record in records])
        overlap: dict[str, float] = {}
        for record, seconds in zip(records, shared, strict=True):
            overlap[record.operation] = overlap.get(record.operation, 0.0) + seconds
        rows = [(name, each, overlap.get(name, 0.0)) for name, each in self.counters.items()]
        rows.append(("all", self.total, sum(overlap.values())))
        return _table(
            [
                "operation",
                "calls",
                "errors",
                "MB",
                "MB sent",
                "ms",
                "ms each",
                "overlap",
                "blocked",
            ],
            [_cells(*row) for row in rows],
        )

    def chrome_trace(self) -> dict[str, Any]:
        """The records as a trace, which chrome://tracing and Perfetto show."""
        return chrome_trace(self.records, self.rank())

    def save_trace(self, path: str | Path) -> None:
        """Write :meth:`chrome_trace` to a file."""
        write_trace(self.chrome_trace(), path)

    def run_collective(
        self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        call = describe(operation, arguments, keywords)
        if call is None:
            return super().run_collective(operation, arguments, keywords)
        record = self._begin(call)
        try:
            work = super().run_collective(operation, arguments, keywords)
        except BaseException as error:
            self._finish(record, _C.steady_seconds(), error)
            raise
        work = _C.as_work(work)
        tensors = [*call.inputs, *call.outputs]
        work = on_completion(work, tensors, lambda end, error: self._finish(record, end, error))
        return _RecordedWork(work, record, self) if isinstance(work, dist.Work) else work

    def _begin(self, call: Call) -> Record:
        sent = call.bytes_sent(self.rank(), self.size())
        note_recorded(sent)
        with self._lock:
            counters = self._counters.setdefault(call.operation, Counters())
            record = Record(
                call.operation,
                self._issued,
                call.sizes,
                call.dtype,
                call.nbytes,
                sent,
                _C.steady_seconds(),
                _counters=counters,
            )
            self._issued += 1
            self._records.append(record)
            if len(self._records) >= 2 * self._limit:
                del self._records[: -self._limit]
            counters.calls += 1
            counters.nbytes += record.nbytes
            counters.bytes_sent += sent
        return record

    def _finish(self, record: Record, end: float, error: BaseException | None) -> None:
        with self._lock:
            record.end, record.error = end, error
            counters = record._counters  # which are forgotten with what clear() forgets
            counters.completed += 1
            counters.errors += error is not None
            counters.seconds += end - record.start

    def _add_blocked(self, record: Record, seconds: float) -> None:
        with self._lock:
            record.blocked += seconds
            record._counters.blocked += seconds


class _RecordedWork(WrapperWork):
    """Tells how long it was waited for."""

    def __init__(self, work: Any, record: Record, group: RecordingProcessGroup) -> None:
        super().__init__(work)
        self._record, self._group = record, group

    def wait(self, *timeout: Any) -> bool:
        start = _C.steady_seconds()
        try:
            return bool(self.work.wait(*timeout))
        finally:
            self._group._add_blocked(self._record, _C.steady_seconds() - start)


def record_interval(record: Record) -> Interval:
    """When an operation was in flight; until now where it still is."""
    return record.start, _C.steady_seconds() if record.end is None else record.end


def _cells(name: str, counters: Counters, overlap: float) -> list[str]:
    def share(seconds: float) -> str:
        return f"{min(seconds / counters.seconds, 1.0):.0%}" if counters.seconds else "-"

    return [
        name,
        str(counters.calls),
        str(counters.errors),
        f"{counters.nbytes / 1e6:.2f}",
        f"{counters.bytes_sent / 1e6:.2f}",
        f"{counters.seconds * 1e3:.2f}",
        f"{counters.seconds * 1e3 / counters.completed:.3f}" if counters.completed else "-",
        share(overlap),
        share(counters.blocked),
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
