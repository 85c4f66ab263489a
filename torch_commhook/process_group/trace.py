"""Writes records of operations as traces in Chrome's format, which Perfetto reads too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

    Args:
        records: records of a :class:`RecordingProcessGroup`. Incomplete ones are shown as begun.
        rank: the rank in the group.
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
