"""Predicts when the collectives of a step end, over a link of given rate and delay.

The model is that of :class:`torch_commhook.process_group.ThrottledProcessGroup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch_commhook.process_group.operations import (
    Traffic,
    has_a_thread,
    merged,
    messages_of,
    on_transport,
)
from torch_commhook.process_group.simulated.link import Issued
from torch_commhook.process_group.throttled import GlooGroup, SlowLink

#: The most messages of a collective's part that the model follows one by one: over all buckets, and
#: the least for a bucket.
_MOST_FOLLOWED = 50_000
_LEAST_FOLLOWED = 4
#: Gloo's threads in a group of init_process_group.
_DDP_THREADS = 2
#: Of the library's own groups, which have no threads: as many as there are buckets.
_MOST_UNDER_WAY = 1 << 20


def through_seconds(
    chains: Sequence[Sequence[Issued]],
    agreement: Sequence[Issued],
    *,
    ready: Sequence[float],
    shares: Sequence[float],
    computed: float = 0.0,
    bits_per_second: float,
    latency: float,
    is_ddp: bool = False,
) -> float:
    """The time at which a step's last collective ends, in seconds.

    All chains of a bucket begin at once. In a chain, each collective waits for the one before it.
    At the end the ranks agree.

    Args:
        chains: the calls of a rank with all gradients in one bucket.
        agreement: the calls at the end of a step.
        ready: the time at which each bucket is full, in seconds.
        shares: each bucket's share of the gradients.
        computed: the time at which the step's computing ends, in seconds.
        bits_per_second: the rate of the link, each way.
        latency: the delay of a message, one way, in seconds.
        is_ddp: whether DDP issues the calls itself, on a group with two Gloo threads. None then has
            a place.
    """
    link = SlowLink(bits_per_second, latency)
    most = max(_LEAST_FOLLOWED, _MOST_FOLLOWED // len(ready))
    groups: dict[str, GlooGroup] = {}
    end = computed

    def go_on(chain: Sequence[Issued], when: float) -> None:
        nonlocal end
        if not chain:
            end = max(end, when)
            return
        (name, traffic), rest = (chain[0].group, chain[0].traffic), chain[1:]
        group = groups.get(name)
        if group is None:
            group = groups[name] = GlooGroup(link, _DDP_THREADS if is_ddp else _MOST_UNDER_WAY)
        parts = merged(messages_of(traffic), most)
        group.issue(when, parts, partial(go_on, rest), has_thread=has_a_thread(traffic))

    for when, share in zip(ready, shares, strict=True):
        for issued in chains:
            chain = scaled(issued, share)
            link.at(when, partial(go_on, chain if is_ddp else with_places(chain)))
    link.finish()
    link.at(end, partial(go_on, agreement))
    link.finish()
    return end


def scaled(calls: Sequence[Issued], factor: float) -> tuple[Issued, ...]:
    """The calls for ``factor`` times as many gradients."""
    return tuple(each.scaled(factor) for each in calls)


def with_places(calls: Sequence[Issued]) -> list[Issued]:
    """The calls over the library's transport, where hooks' collectives have places."""
    return [replace(each, traffic=on_transport(each.traffic)) for each in calls]


def round_trips(
    chains: Sequence[Sequence[Issued]],
    agreement: Sequence[Issued],
    shares: Sequence[float],
    *,
    is_ddp: bool = False,
) -> float:
    """The number of consecutive round trips in a step whose buckets are full at one time."""
    return through_seconds(
        chains,
        agreement,
        ready=[0.0] * len(shares),
        shares=shares,
        bits_per_second=float("inf"),
        latency=0.5,
        is_ddp=is_ddp,
    )


def agreement_of(world_size: int) -> list[Issued]:
    """The calls of a rank at the end of a step, by which all ranks agree that it succeeded."""
    if world_size == 1:
        return []
    return [Issued("", on_transport(Traffic("allreduce", world_size, 1, 0.0)))]
