"""Predicts the cost of a step with a hook over a link.

A third of the step's computing is the forward. The rest is the backward, which fills the buckets in
turn. Hooks compute on the same processor. A full bucket's messages go on the wire at once, and wait
for one another as Gloo's do.

A hook that keeps ranks apart for some steps sends after the last of them. Computing hides its
exchange only if that continues in the background of the next steps, as with ``delay=`` of
``local_sgd``. The time of a step is then the mean over all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_commhook.planning.formulas import bytes_out_of_node, count_messages
from torch_commhook.planning.measured import Measured
from torch_commhook.planning.schedule import PAYLOAD, round_trips, through_seconds

#: A backward computes twice as many products as a forward.
_FORWARD = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Cost(Measured):
    """The cost of a hook in one step.

    Attributes:
        wire_seconds: the time of the bytes on the link, with the headers of their packets.
        round_trips: the number of consecutive round trips in a step.
        messages: the number of messages that a rank sends.
        node_bytes: the bytes that a node's ranks send to other nodes; None if unknown.
        step_seconds: the time of a step: the computing, and the communication that it does not
            hide.
        ratio: ``step_seconds`` divided by that of the first hook.
    """

    wire_seconds: float
    round_trips: float
    messages: float
    node_bytes: float | None
    step_seconds: float
    ratio: float


def plan(
    measured: Sequence[Measured],
    *,
    bits_per_second: float,
    compute_seconds: float = 0.0,
    buckets: Sequence[int] = (1,),
    delay_seconds: float = 0.0,
) -> list[Cost]:
    """The cost of each hook. The first one is the baseline of the ratios.

    Args:
        measured: the figures of :func:`measure`.
        bits_per_second: the rate of each rank's link, each way.
        compute_seconds: the time of a step without communication.
        buckets: the elements of each bucket, as from :func:`bucket_sizes`.
        delay_seconds: the delay of a message, one way.
    """
    costs: list[Cost] = []
    shares = [size / sum(buckets) for size in buckets]
    for each in measured:
        step = step_seconds(
            each,
            bits_per_second=bits_per_second,
            compute_seconds=compute_seconds,
            buckets=buckets,
            delay_seconds=delay_seconds,
        )
        first = costs[0].step_seconds if costs else step
        costs.append(
            Cost(
                **vars(each),
                wire_seconds=each.bytes_sent * 8 / bits_per_second / PAYLOAD,
                round_trips=_round_trips(each, shares),
                messages=_messages(each, shares),
                node_bytes=_node_bytes(each, shares),
                step_seconds=step,
                ratio=step / first if first else 1.0,
            )
        )
    return costs


def _round_trips(measured: Measured, shares: Sequence[float]) -> float:
    """Consecutive round trips in a step, including those that computing hides."""
    shares = [share / measured.fragments for share in shares]
    once = round_trips(measured.chains, measured.agreement, shares, is_ddp=measured.is_ddp)
    return once * measured.fragments / measured.every


def _messages(measured: Measured, shares: Sequence[float]) -> float:
    shares = [share / measured.fragments for share in shares]
    chains = [
        count_messages(issued, (), shares, is_ddp=measured.is_ddp) for issued in measured.chains
    ]
    once = sum(chains) + count_messages((), measured.agreement, shares)
    return once * measured.fragments / measured.every


def _node_bytes(measured: Measured, shares: Sequence[float]) -> float | None:
    if not measured.members:
        return None
    chains = [bytes_out_of_node(each, measured.members, shares) for each in measured.chains]
    return sum(chains) / measured.every


def step_seconds(
    measured: Measured,
    *,
    bits_per_second: float,
    compute_seconds: float = 0.0,
    buckets: Sequence[int] = (1,),
    delay_seconds: float = 0.0,
) -> float:
    """The time of a step in seconds. Buckets travel while the backward computes the next ones.

    Args:
        measured: the figures of :func:`measure`.
        bits_per_second, compute_seconds, buckets, delay_seconds: as for :func:`plan`.
    """
    elements = sum(buckets)
    shares = [size / elements for size in buckets]
    ready, computed = [0.0] * len(buckets), 0.0
    if measured.overlaps:
        computed, in_backward = compute_seconds * _FORWARD, compute_seconds * (1 - _FORWARD)
        for place, share in enumerate(shares):
            computed += (in_backward + measured.compute_seconds) * share
            ready[place] = computed
    through = through_seconds(
        measured.chains,
        measured.agreement,
        ready=ready,
        shares=[share / measured.fragments for share in shares],
        computed=computed,
        bits_per_second=bits_per_second * PAYLOAD,
        latency=delay_seconds,
        is_ddp=measured.is_ddp,
    )
    if measured.overlaps:
        return through
    step = compute_seconds + measured.compute_seconds
    waits = max(0.0, through - measured.delay * step)
    return step + waits * measured.fragments / measured.every
