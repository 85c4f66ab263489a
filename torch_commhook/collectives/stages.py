"""Two collectives; the second sends data that is computed from the first one's result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.exchange import SECOND, Place, exchanges, place_in
from torch_commhook.collectives.futures import TracedStages, set_error, set_outcome, then_beside
from torch_commhook.collectives.gloo_groups import group_of_stages
from torch_commhook.collectives.pipeline import SecondStages, current_second_stages
from torch_commhook.collectives.streams import current_place
from torch_commhook.collectives.turns import turns_of
from torch_commhook.metrics import CallMeter, note_collective
from torch_commhook.spans import continued, current_spans

First = TypeVar("First")
Second = TypeVar("Second")


def two_stages(
    issue_first: Callable[[], torch.futures.Future[Tensor]],
    between: Callable[[Tensor], Tensor],
    issue_second: Callable[[Tensor, dist.ProcessGroup, Place | None], torch.futures.Future[Tensor]],
    finish: Callable[[Tensor], Tensor],
    *,
    expect: Callable[[Place, dist.ProcessGroup], object] | None = None,
    second_bytes: tuple[int, int],
    device: torch.device,
    group: dist.ProcessGroup,
    meter: CallMeter | None = None,
) -> torch.futures.Future[Tensor]:
    """Run two collectives, one after the other, without delaying those of other buckets.

    On the CPU the thread that ended the first issues the second one. Among more than 16 ranks it
    does so on a process group of its own, which the first call makes. Over other groups the second
    one is issued after the next bucket's first one, if the step of a hook allows it
    (``pipeline.py``), or else by this call. Issuing it waits for the first; on CUDA a stream waits,
    not the thread. While a compiler traces, ``start_next`` issues the second one.

    Args:
        issue_first: starts the first collective, which counts its own bytes.
        between: computes the second one's data from the first one's result. On any thread.
        issue_second: starts the second one on a group; it counts and checks nothing, since another
            thread may call it. Called with the group, and its place in the order of the group's
            exchanges, if it has exchanges.
        finish: computes the result from the second one's result. On any thread.
        expect: if the second one exchanges messages: gives memory to them in its future place,
            before the first one is issued.
        second_bytes: bytes that this rank sends and receives in the second one.
        device: the tensors' device.
        group: the process group of the first one.
        meter: records how long both are on the wire.

    Returns:
        A Future of the result of ``finish``.
    """
    # Read once: later stages run in other threads, which cannot tell whether a compiler traces.
    is_traced = torch.compiler.is_compiling()
    own_group: dist.ProcessGroup | None = None
    place: Place | None = None
    if not is_traced and device.type == "cpu" and group.size() > 1:
        own_group = group_of_stages(group)
        if own_group is not None and exchanges(own_group):
            # Here, on a thread that may reference the first group.
            place = place_in(own_group, SECOND)
            if expect is not None:
                expect(place, own_group)
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
            lambda received: issue_second(send(received), group, None).then(
                lambda done: end(done.value())
            ),
        )
    first = on_wire(first, meter, device)
    if own_group is None:

        def both() -> torch.futures.Future[Tensor]:
            second = on_wire(issue_second(send(first.wait()), group, None), meter, device)
            return then_beside(second, lambda done: end(done.value()), device)

        waiting = None if group.size() == 1 else current_second_stages()
        return both() if waiting is None else later(both, waiting, device)

    # Callbacks do not reference the first group: a Gloo thread that released it last would wait for
    # its own end.
    def issue(tensor: Tensor) -> torch.futures.Future[Tensor]:
        return on_wire(issue_second(tensor, own_group, place), meter, device)

    return staged(first, send, issue, end, own_group)


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


def staged(
    first: torch.futures.Future[First],
    send: Callable[[First], Tensor],
    issue: Callable[[Tensor], torch.futures.Future[Second]],
    end: Callable[[Second], Tensor],
    group: dist.ProcessGroup,
) -> torch.futures.Future[Tensor]:
    """Run two stages one after another; the thread that ends one issues the next.

    Args:
        first: a Future of the first one, which has been issued.
        send: computes the second one's data from the first one's result.
        issue: starts the second one on ``group``, in order, and returns its Future.
        end: computes the result from the second one's result.
        group: the group of second stages.

    Returns:
        A Future of the result of ``end``.
    """
    result: torch.futures.Future[Tensor] = torch.futures.Future()
    turn = turns_of(group).announce(lambda error: set_error(result, error))

    def first_done(done: torch.futures.Future[First]) -> None:
        try:
            tensor = send(done.value())
        except BaseException as error:
            turn.give_up(error)
            return
        turn.take(continued(lambda: issue(tensor).add_done_callback(second_done)))

    def second_done(done: torch.futures.Future[Second]) -> None:
        set_outcome(result, lambda: end(done.value()), caught=BaseException)

    second_done = continued(second_done)
    first.add_done_callback(continued(first_done))
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
