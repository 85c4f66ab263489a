"""A process group that records its operations, also as a trace."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.metrics import note_recorded
from torch_commhook.process_group.operations import Call, describe
from torch_commhook.process_group.work import WrapperWork, on_completion
from torch_commhook.process_group.wrapper import WrapperProcessGroup
from torch_commhook.wording import align_columns

# ---- writes records of operations as traces in Chrome's format, which Perfetto reads too ---------


#: Start and end, in seconds.
Interval = tuple[float, float]


def overlaps(intervals: Sequence[Interval]) -> list[float]:
    """For each interval, the time that it shares with at least one other, in seconds."""
    moments = sorted({moment for interval in intervals for moment in interval})
    place = {moment: i for i, moment in enumerate(moments)}
    count = [0] * len(moments)
    for start, end in intervals:
        count[place[start]] += 1
        count[place[end]] -= 1
    # For each moment: the total time so far during which at least two were in flight.
    shared, under_way, since_start = 0.0, 0, []
    for i, moment in enumerate(moments):
        if under_way > 1:
            shared += moment - moments[i - 1]
        since_start.append(shared)
        under_way += count[i]
    return [since_start[place[end]] - since_start[place[start]] for start, end in intervals]


def lanes(intervals: Sequence[Interval]) -> list[int]:
    """For each interval, in the order of starts, the first free lane."""
    ends: list[float] = []
    chosen = []
    for start, end in intervals:
        lane = next((i for i, until in enumerate(ends) if until <= start), len(ends))
        ends[lane : lane + 1] = [end]
        chosen.append(lane)
    return chosen


def chrome_trace(records: Sequence[Any], rank: int) -> dict[str, Any]:
    """The trace of one rank: one process, with as many lanes as operations were in flight at once.

    Incomplete operations are shown as begun.
    """
    events: list[dict[str, Any]] = [_named("process_name", rank, 0, f"rank {rank}")]
    last = max((record.end or record.start for record in records), default=0.0)
    intervals = [(record.start, last if record.end is None else record.end) for record in records]
    chosen = lanes(intervals)
    for lane in range(max(chosen, default=-1) + 1):
        events.append(_named("thread_name", rank, lane, f"in flight {lane + 1}"))
    for record, lane, (start, end) in zip(records, chosen, intervals, strict=True):
        event = {
            "name": record.operation,
            "cat": "collective",
            "pid": rank,
            "tid": lane,
            "ts": start * 1e6,
            "args": {
                "op_id": record.op_id,
                "bytes": record.nbytes,
                "bytes sent": record.bytes_sent,
                "dtype": None if record.dtype is None else str(record.dtype).split(".")[-1],
                "sizes": [list(size) for size in record.sizes],
                "blocked ms": record.blocked * 1e3,
                "error": None if record.error is None else repr(record.error),
            },
        }
        if record.end is None:
            events.append({**event, "ph": "B"})
        else:
            events.append({**event, "ph": "X", "dur": (end - start) * 1e6})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(kind: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}


def write_trace(trace: dict[str, Any], path: str | Path) -> None:
    """Write a trace to a file, completely or not at all."""
    path = Path(path)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(trace))
    partial.replace(path)


def merge_traces(paths: Sequence[str | Path], path: str | Path) -> None:
    """Merge the traces of several ranks into one file, with one process for each rank.

    Args:
        paths: files of :meth:`RecordingProcessGroup.save_trace` from one machine. Clocks of several
            machines do not agree.
        path: the file to write.

    Raises:
        ValueError: a file is no such trace.

    Example:
        >>> folder = tempfile.TemporaryDirectory()
        >>> def reduce(rank):
        ...     group = process_group.RecordingProcessGroup(dist.group.WORLD)
        ...     group.allreduce([torch.ones(4)]).wait()
        ...     group.save_trace(f"{folder.name}/rank{rank}.json")
        >>> _ = run_ranks(reduce, 2)
        >>> paths = [f"{folder.name}/rank{rank}.json" for rank in (0, 1)]
        >>> process_group.merge_traces(paths, f"{folder.name}/all.json")
    """
    events: list[Any] = []
    for each in paths:
        try:
            events += json.loads(Path(each).read_text())["traceEvents"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"merge_traces: {each} must be a trace, got {error!r}") from error
    write_trace({"traceEvents": events, "displayTimeUnit": "ms"}, path)


# ---- a process group that records its operations -------------------------------------------------


@dataclass
class Counters:
    """Sums over all operations, or over those of one kind.

    Attributes:
        calls: the number of operations issued.
        completed: the number of these that have completed, including failures.
        errors: the number of these that have failed.
        nbytes: the bytes of their tensors.
        bytes_sent: the minimum of bytes that this rank must send for them.
        seconds: the total time from issue to completion, of completed operations.
        blocked: the total time that threads waited for their works, in seconds.

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
    """One operation of a group.

    Times are in seconds of a clock that all processes of a machine share.

    Attributes:
        operation: the method, by its newest name.
        op_id: the operation's number on the group, from 0.
        sizes: the sizes of the tensors that it reads; of those that it writes if it reads nothing.
        dtype: the dtype of the first of these; None without tensors.
        nbytes: the total bytes of these.
        bytes_sent: the minimum of bytes that this rank must send for it.
        start: the time of issue.
        end: the time of completion; None before.
        blocked: how long threads waited for its Work, in seconds. Waits for its Future are not
            included.
        error: its error, or None.

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
        """The time from issue to completion, in seconds; None before completion."""
        return None if self.end is None else self.end - self.start


class RecordingProcessGroup(WrapperProcessGroup):
    """A process group around another one that records operations: bytes, dtypes, times and errors.

    If a hook of :func:`torch_commhook.attach` uses such a group, ``HookHandle.stats()`` contains
    the bytes of all its collectives, also of those that are not the library's.

    Args:
        parent: the process group that does the work.
        limit: the number of latest records that are kept; counters include all operations.

    Raises:
        TypeError: ``parent`` is not a process group.
        ValueError: ``limit`` is not a positive int.

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
        """The operations in the order of issue, including those in flight."""
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
        """Forget all records and counters. Operations in flight are not counted later."""
        with self._lock:
            self._records, self._counters = [], {}

    def summary(self) -> str:
        """Return a table with a line for each operation, and one for all.

        ``overlap`` is the part of the time in flight during which other operations of the group
        were in flight too. ``blocked`` is the part that threads waited for their works.
        """
        records = self.records
        now = _C.steady_seconds()
        shared = overlaps([(record.start, record.end or now) for record in records])
        overlap: dict[str, float] = {}
        for record, seconds in zip(records, shared, strict=True):
            overlap[record.operation] = overlap.get(record.operation, 0.0) + seconds
        rows = [(name, each, overlap.get(name, 0.0)) for name, each in self.counters.items()]
        rows.append(("all", self.total, sum(overlap.values())))
        return "\n".join(align_columns(_COLUMNS, [_cells(*row) for row in rows]))

    def chrome_trace(self) -> dict[str, Any]:
        """Return the records as a trace for chrome://tracing and Perfetto."""
        return chrome_trace(self.records, self.rank())

    def save_trace(self, path: str | Path) -> None:
        """Write :meth:`chrome_trace` to a file."""
        write_trace(self.chrome_trace(), path)

    def run_collective(
        self, operation: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        call = describe(operation, arguments, keywords)
        record = self._begin(call)
        try:
            work = super().run_collective(operation, arguments, keywords)
        except BaseException as error:
            self._finish(record, _C.steady_seconds(), error)
            raise
        work = _C.as_work(work)
        work = on_completion(work, call.tensors, partial(self._finish, record))
        return _RecordedWork(work, record, self) if isinstance(work, dist.Work) else work

    def _begin(self, call: Call) -> Record:
        sent = call.bytes_sent(self.rank(), self.size())
        note_recorded(sent)
        with self._lock:
            counters = self._counters.setdefault(call.operation, Counters())
            about = (call.operation, self._issued, call.sizes, call.dtype, call.nbytes, sent)
            record = Record(*about, _C.steady_seconds(), _counters=counters)
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
            counters = record._counters  # clear() drops these too
            counters.completed += 1
            counters.errors += error is not None
            counters.seconds += end - record.start


class _RecordedWork(WrapperWork):
    """Measures how long threads wait for it."""

    def __init__(self, work: Any, record: Record, group: RecordingProcessGroup) -> None:
        super().__init__(work)
        self._record, self._group = record, group

    def wait(self, *timeout: Any) -> bool:
        start = _C.steady_seconds()
        try:
            return bool(self.work.wait(*timeout))
        finally:
            seconds = _C.steady_seconds() - start
            with self._group._lock:
                self._record.blocked += seconds
                self._record._counters.blocked += seconds


#: The titles of :func:`_cells`.
_COLUMNS = "operation,calls,errors,MB,MB sent,ms,ms each,overlap,blocked".split(",")


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
