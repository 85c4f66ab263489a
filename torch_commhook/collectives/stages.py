"""Two collectives; the second sends data that is computed from the first one's result."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.exchange import SECOND, Place, exchanges, place_in
from torch_commhook.collectives.futures import (
    TracedStages,
    chained,
    set_error,
    set_outcome,
    then_beside,
)
from torch_commhook.collectives.pipeline import SecondStages, current_second_stages
from torch_commhook.collectives.streams import current_place
from torch_commhook.metrics import CallMeter, note_collective
from torch_commhook.spans import continued, current_spans


def two_stages(
    issue_first: Callable[[], torch.futures.Future[Tensor]],
    between: Callable[[Tensor], Tensor],
    issue_second: Callable[[Tensor, Place | None], torch.futures.Future[Tensor]],
    finish: Callable[[Tensor], Tensor],
    *,
    expect: Callable[[Place], object] | None = None,
    given: Place | None = None,
    second_bytes: tuple[int, int],
    device: torch.device,
    group: dist.ProcessGroup,
    meter: CallMeter | None = None,
) -> torch.futures.Future[Tensor]:
    """Run two collectives, one after the other, without delaying those of other buckets.

    On the CPU over Gloo the second one has a place in an order, and the thread that ended the first
    issues it. Over other groups it is issued after the next bucket's first one, if the step of a
    hook allows it (``pipeline.py``), or else by this call. Issuing it waits for the first; on CUDA
    a stream waits, not the thread. While a compiler traces, ``start_next`` issues the second one.

    Args:
        issue_first: starts the first collective, which counts its own bytes.
        between: computes the second one's data from the first one's result. On any thread.
        issue_second: starts the second one, in its place if it has one; it counts and checks
            nothing, since another thread may call it.
        finish: computes the result from the second one's result. On any thread.
        expect: gives memory to the messages in the place of the second one, before the first one is
            issued.
        given: the place of the second one, if it was taken before.
        second_bytes: bytes that this rank sends and receives in the second one.
        device: the tensors' device.
        group: the process group.
        meter: records how long both are on the wire.

    Returns:
        A Future of the result of ``finish``.
    """
    # Read once: later stages run in other threads, which cannot tell whether a compiler traces.
    is_traced = torch.compiler.is_compiling()
    place: Place | None = None
    if not is_traced and device.type == "cpu" and exchanges(group):
        place = place_in(group, SECOND) if given is None else given
        if expect is not None:
            expect(place)
    first = issue_first()
    note_collective(*second_bytes)  # here, since the issuing thread may not count

    def send(received: Tensor) -> Tensor:
        with torch.no_grad():
            return between(received)

    def end(received: Tensor) -> Tensor:
        with torch.no_grad():
            return finish(received)

    if is_traced:
        return TracedStages(
            first,
            lambda received: issue_second(send(received), None).then(
                lambda done: end(done.value())
            ),
        )
    first = on_wire(first, meter, device)
    if place is None:

        def both() -> torch.futures.Future[Tensor]:
            second = on_wire(issue_second(send(first.wait()), None), meter, device)
            return then_beside(second, lambda done: end(done.value()), device)

        waiting = None if group.size() == 1 else current_second_stages()
        return both() if waiting is None else later(both, waiting, device)

    return chained(
        first,
        lambda received: on_wire(issue_second(send(received), place), meter, device),
        end,
    )


def later(
    stage: Callable[[], torch.futures.Future[Tensor]], waiting: SecondStages, device: torch.device
) -> torch.futures.Future[Tensor]:
    """Let a stage wait for the first stage of the next bucket; issues earlier waiting stages.

    Args:
        stage: issues it, and returns a Future of its result. Runs on the present current stream.
        waiting: the waiting stages; this call issues all earlier ones.
        device: the tensors' device.

    Returns:
        A Future of the result. It completes only after ``stage`` was called.
    """
    result: torch.futures.Future[Tensor]
    result = torch.futures.Future(devices=None if device.type == "cpu" else [device])
    place = current_place(device)

    def issue() -> None:
        with place():
            ended = stage()
            if ended.done():
                set_outcome(result, ended.wait)
                return
        ended.add_done_callback(lambda done: set_outcome(result, done.value, caught=BaseException))

    try:
        waiting.issue()
    except BaseException as error:
        if hasattr(error, "add_note"):  # the caller adds its own bucket's name
            error.add_note("in the second stage of the previous bucket")
        raise
    waiting.add(continued(issue), lambda error: set_error(result, error))
    return result


def on_wire(
    future: torch.futures.Future[Tensor], meter: CallMeter | None, device: torch.device
) -> torch.futures.Future[Tensor]:
    """The same future, with its duration measured."""
    if meter is None:
        return future
    begun = time.perf_counter()

    def ended(done: torch.futures.Future[Tensor]) -> Tensor:
        meter.add("wire", time.perf_counter() - begun)
        return done.value()

    return then_beside(future, ended, device)


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
