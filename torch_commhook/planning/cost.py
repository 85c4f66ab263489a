"""What a step with a hook costs over a link.

A third of the step's computing is the forward, and the rest is the backward, which fills the
buckets in turn. Hooks compute on the same processor. A bucket's messages go on the wire once it is
full, and wait for one another as Gloo's do.

A hook that keeps ranks apart for some steps sends after the last of them. It hides nothing behind
computing, unless its exchange goes on in the background of the next steps, as with ``delay=`` of
``local_sgd``. A step's time is then the mean over all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_commhook.planning.formulas import bytes_out_of_node, count_messages
from torch_commhook.planning.measured import Measured
from torch_commhook.planning.schedule import PAYLOAD, round_trips, through_seconds

#: A backward computes the products of a forward twice over.
_FORWARD = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Cost(Measured):
    """What a hook costs in one step.

    Attributes:
        wire_seconds: that the bytes take on the link, with the headers of their packets.
        round_trips: that follow one another in a step.
        messages: that a rank sends.
        node_bytes: that a node's ranks send to other nodes; None where that is not known.
        step_seconds: with what the step computes anyway, as far as that does not hide the rest.
        ratio: of that to the step of the first hook.
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
    """What each hook would cost; the first is what the others are compared with.

    Args:
        measured: what :func:`measure` gives.
        bits_per_second: of each rank's link, each way.
        compute_seconds: of a step without communication.
        buckets: their sizes, as :func:`bucket_sizes` says.
        delay_seconds: of a message, one way.
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
                round_trips=_round_trips(each, len(buckets)),
                messages=_messages(each, shares),
                node_bytes=_node_bytes(each, shares),
                step_seconds=step,
                ratio=step / first if first else 1.0,
            )
        )
    return costs


def _round_trips(measured: Measured, buckets: int) -> float:
    """That follow one another in a step, all that an exchange hides behind computing included."""
    once = round_trips(measured.chains, measured.agreement, buckets, is_ddp=measured.is_ddp)
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
    """A step, in which buckets travel while the next ones are computed.

    Args:
        measured: what :func:`measure` gives.
        bits_per_second, compute_seconds, buckets, delay_seconds: as :func:`plan` takes them.
    """
    compute = compute_seconds
    elements = sum(buckets)
    shares = [size / elements for size in buckets]
    ready, computed = [0.0] * len(buckets), 0.0
    if measured.overlaps:
        computed, in_backward = compute * _FORWARD, compute * (1 - _FORWARD)
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
    step = compute + measured.compute_seconds
    waits = max(0.0, through - measured.delay * step)
    return step + waits * measured.fragments / measured.every
