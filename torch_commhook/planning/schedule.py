"""Predicts when the collectives of a step end, over a link of given rate and delay.

The model is that of :class:`torch_commhook.process_group.ThrottledProcessGroup`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch_commhook.collectives.direct_sum import MOST_SUMMED, is_gathered
from torch_commhook.collectives.gloo_groups import MOST_RANKS
from torch_commhook.process_group.gloo_messages import (
    DOUBLING,
    EXCHANGE,
    RING,
    Traffic,
    has_a_thread,
    merged,
    messages_of,
)
from torch_commhook.process_group.simulated.link import Issued
from torch_commhook.process_group.slow_link import GlooGroup, SlowLink

#: The share of an Ethernet frame that is not headers (Ethernet, IP and TCP).
PAYLOAD = 1448 / 1514
#: The most messages of a collective's part that the model follows one by one: over all buckets, and
#: the least for a bucket.
_MOST_FOLLOWED = 50_000
_LEAST_FOLLOWED = 4
#: Among many ranks: the most bytes for each rank for which few rounds matter more than few bytes.
_FEW_ROUNDS = 16 * 1024
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
    The first one on a group uses that group; later ones use the group's second-stage group. At the
    end the ranks agree.

    Args:
        chains: the calls of a rank with all gradients in one bucket.
        agreement: the calls at the end of a step.
        ready: the time at which each bucket is full, in seconds.
        shares: each bucket's share of the gradients.
        computed: the time at which the step's computing ends, in seconds.
        bits_per_second: the rate of the link, each way.
        latency: the delay of a message, one way, in seconds.
        is_ddp: whether DDP issues the calls itself, on a group with two Gloo threads. No rank then
            exchanges messages directly.
    """
    link = SlowLink(bits_per_second, latency)
    most = max(_LEAST_FOLLOWED, _MOST_FOLLOWED // len(ready))
    groups: dict[tuple[str, bool], GlooGroup] = {}
    end = computed

    def go_on(chain: list[Issued], before: frozenset[str], when: float) -> None:
        nonlocal end
        if not chain:
            end = max(end, when)
            return
        (name, traffic), rest = (chain[0].group, chain[0].traffic), chain[1:]
        key = name, name in before
        group = groups.get(key)
        if group is None:
            group = groups[key] = GlooGroup(link, _DDP_THREADS if is_ddp else _MOST_UNDER_WAY)
        issue = group.issue if has_a_thread(traffic) else group.send
        parts = merged(messages_of(traffic), most)
        issue(when, parts, partial(go_on, rest, before | {name}))

    for when, share in zip(ready, shares, strict=True):
        for issued in chains:
            chain = [each.scaled(share) for each in issued]
            chain = chain if is_ddp else with_exchanges(chain)
            link.at(when, partial(go_on, chain, frozenset()))
    link.finish()
    link.at(end, partial(go_on, list(agreement), frozenset()))
    link.finish()
    return end


def with_exchanges(chain: list[Issued]) -> list[Issued]:
    """The calls over the library's transport.

    A simulated group has no exchanges; a hook's sums are all-reduces there.
    """
    found: list[Issued] = []
    for each in chain:
        parts = _parts_of(each.traffic)
        found += [replace(each, traffic=part) for part in parts] or [each]
    return found


def _parts_of(traffic: Traffic) -> list[Traffic]:
    """The consecutive parts of a collective on the transport; none for others than hooks issue."""
    ranks, nbytes = traffic.ranks, traffic.nbytes
    are_few = ranks <= MOST_RANKS
    if ranks == 1 or nbytes == 0:
        return []
    if traffic.operation == "all_to_all_single":
        return [replace(traffic, operation=EXCHANGE)]
    if traffic.operation == "all_gather_single":
        if are_few:
            return [replace(traffic, operation=EXCHANGE)]
        if nbytes <= _FEW_ROUNDS:
            return [replace(traffic, operation=DOUBLING)]
        return [replace(traffic, operation=RING, nbytes=nbytes * ranks)]
    if traffic.operation != "allreduce":
        return []
    if are_few and is_gathered(nbytes, ranks) and nbytes <= MOST_SUMMED:
        return [Traffic(EXCHANGE, ranks, nbytes, nbytes * (ranks - 1))]
    if not are_few and nbytes <= _FEW_ROUNDS * ranks:
        return [replace(traffic, operation=DOUBLING)]
    part = Traffic(EXCHANGE if are_few else RING, ranks, nbytes, nbytes * (ranks - 1) / ranks)
    return [part, part]


def round_trips(
    chains: Sequence[Sequence[Issued]],
    agreement: Sequence[Issued],
    shares: Sequence[float],
    *,
    is_ddp: bool = False,
) -> float:
    """The number of consecutive round trips in a step, if all buckets are full at the same time.

    Args:
        chains, agreement, shares, is_ddp: as for :func:`through_seconds`.
    """
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
    if world_size <= MOST_RANKS:
        return [Issued("", Traffic(EXCHANGE, world_size, world_size - 1, world_size - 1))]
    count = math.ceil(math.log2(world_size))
    return [Issued("", Traffic(DOUBLING, world_size, 1, count))]
