"""Spans in a trace of PyTorch's profiler: a hook's work on each bucket, with its duration.

``commhook::encode``, ``commhook::wire`` and ``commhook::decode``, each with the bucket and the hook
in its name: ``commhook::encode (bucket 0, blockwise(bits=4))``. There are none without a profiler,
and none in compiled code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from torch_commhook import _C
from torch_commhook.metrics import CallMeter, ThreadValue, setting

P = ParamSpec("P")
T = TypeVar("T")

_NOTHING = nullcontext()
_is_traced = torch.compiler.is_dynamo_compiling


#: The spans for which this thread works.
_current: ThreadValue[BucketSpans] = ThreadValue()


class BucketSpans:
    """The spans of one call of a hook on a bucket.

    Args:
        label: names bucket and hook.
        profiler: the profiler of the thread that calls the hook.

    Attributes:
        has_wire: whether the hook has sent anything through the library.
    """

    def __init__(self, label: str, profiler: _C.ThreadProfiler) -> None:
        self.has_wire = False
        self._label = label
        self._profiler = profiler
        self._sent: tuple[_C.Span, torch._C.Future[Any]] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use these spans on this thread, with the profiler of the hook's thread."""
        with setting(_current, self), self._profiler.use():
            yield

    def begin(self, stage: str, *, is_async: bool = False) -> _C.Span:
        """Begin the span of a stage of ``STAGES``, inside :meth:`active`.

        If ``is_async``, another thread may end it. A span :meth:`until` a Future that is complete
        ends before: other threads go on with the Future's value while its callbacks still run.
        """
        if self._sent is not None and self._sent[1].done():
            self._sent[0].end()
            self._sent = None
        return _C.Span(self._profiler, f"commhook::{stage} ({self._label})", is_async)

    def until(self, span: _C.Span, future: torch._C.Future[Any]) -> None:
        """Let a span of this bucket end when a Future is complete."""
        span.end_with(future)
        self._sent = span, future

    def note_sent(self, result: object) -> None:
        """Record the wire span of a hook that does not use the library's collectives.

        If its result is no Future, the hook has waited itself.
        """
        if self.has_wire or not isinstance(result, torch._C.Future) or result.done():
            return
        with self.active():
            self.until(self.begin("wire", is_async=True), result)


def current_spans() -> BucketSpans | None:
    """The spans of the hook that this thread works for; None if no profiler runs."""
    return None if _is_traced() else _current.value


def spans_of(label: Callable[[], str]) -> BucketSpans | None:
    """Return spans for a call of a hook that this thread is about to make.

    None if no profiler runs, while a compiler traces, and inside the call of another hook, whose
    spans continue. Calls ``label`` only while a profiler runs.
    """
    if _is_traced():
        return None
    profiler = _C.ThreadProfiler.current()
    if profiler is None or _current.value is not None:
        return None
    return BucketSpans(label(), profiler)


def active(spans: BucketSpans | None) -> AbstractContextManager[None]:
    """``spans.active()``; nothing for None."""
    return _NOTHING if spans is None else spans.active()


def bucket_label(index: int, hook: str) -> str:
    """The text that names a bucket and its hook. The bucket comes first: tables cut long names."""
    return f"bucket {index}, {hook}"


def with_spans(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a callback of other threads, so that this thread's profiler sees its work."""
    spans = current_spans()
    if spans is None:
        return function

    @wraps(function)
    def run(*args: P.args, **keywords: P.kwargs) -> T:
        with spans.active():
            return function(*args, **keywords)

    return run


class on_the_wire:  # noqa: N801 (a context manager)
    """Records a collective's span on the wire, if a profiler runs: from now until its end.

    Example:
        with on_the_wire() as span:
            return span.until(issue())
    """

    __slots__ = ("_span", "_spans")

    def __enter__(self) -> on_the_wire:
        self._span: _C.Span | None = None
        self._spans = current_spans()
        if self._spans is not None:
            self._spans.has_wire = True
            self._span = self._spans.begin("wire", is_async=True)
        return self

    def until(self, future: torch.futures.Future[T]) -> torch.futures.Future[T]:
        """Let the span end when a Future is complete; returns that."""
        if self._spans is not None and self._span is not None:
            self._spans.until(self._span, future)
        return future

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None and self._span is not None:
            self._span.end()


class timed:  # noqa: N801 (a context manager)
    """Reports the time spent inside to a meter and the profiler, if there are any."""

    def __init__(self, meter: CallMeter | None, stage: str) -> None:
        self._meter = meter
        self._stage = stage

    def __enter__(self) -> None:
        spans = current_spans()
        self._span = None if spans is None else spans.begin(self._stage)
        if self._meter is not None:
            self._begun = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if self._meter is not None:
            self._meter.add(self._stage, time.perf_counter() - self._begun)
        if self._span is not None:
            self._span.end()
