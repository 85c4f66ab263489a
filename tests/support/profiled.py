"""A hook's spans in a trace of PyTorch's profiler."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_NAME = re.compile(r"commhook::(\w+) \((?:bucket (\d+), )?(.*)\)")


class Span(NamedTuple):
    """One span; times in microseconds.

    ``bucket`` is None for weights of sharded models.
    """

    stage: str
    bucket: int | None
    hook: str
    begin: float
    end: float
    thread: int


def profiled_steps(step: Callable[[], Any], count: int, **settings: Any) -> list[list[Span]]:
    """The spans of each of several steps, read from the Chrome trace of all."""
    with profile(activities=[ProfilerActivity.CPU], **settings) as profiler:
        for number in range(count):
            with record_function(f"step {number}"):
                step()
    events = complete_events(profiler)
    found = []
    for number in range(count):
        (whole,) = [event for event in events if event["name"] == f"step {number}"]
        begin, end = whole["ts"], whole["ts"] + whole["dur"]
        inside = [event for event in events if begin <= event["ts"] <= end]
        found.append(spans_in(inside))
    assert sum(map(len, found)) == len(spans_in(events)), "a span begins outside of all steps"
    return found


def complete_events(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    """The events that the profiler writes to a Chrome trace, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])


def spans_in(events: list[dict[str, Any]]) -> list[Span]:
    found = []
    for event in events:
        if not event["name"].startswith("commhook::") or event["cat"] != "user_annotation":
            continue  # operators have names with the same beginning
        stage, bucket, hook = _NAME.fullmatch(event["name"]).groups()  # type: ignore[union-attr]
        number = None if bucket is None else int(bucket)
        begin = event["ts"]
        found.append(Span(stage, number, hook, begin, begin + event["dur"], event["tid"]))
    return found


def stages_by_bucket(spans: list[Span], hook: str) -> dict[int | None, list[str]]:
    """The stages of each bucket, in the order in which they begin.

    Each must begin after the one before has ended, and belong to the hook.
    """
    found: dict[int | None, list[Span]] = {}
    for span in spans:
        assert span.hook == hook, span
        assert span.end > span.begin, span
        of_bucket = found.setdefault(span.bucket, [])
        if of_bucket:  # times are rounded to a nanosecond
            assert span.begin >= of_bucket[-1].end - 0.01, (of_bucket[-1], span)
        of_bucket.append(span)
    return {bucket: [span.stage for span in each] for bucket, each in found.items()}
