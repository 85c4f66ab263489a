"""Predicts when the collectives of a step end, over a link of given rate and delay.

The model is that of :class:`torch_commhook.process_group.ThrottledProcessGroup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch_commhook.collectives.direct_sum import MOST_SUMMED, is_gathered
from torch_commhook.collectives.exchange import MOST_RANKS
from torch_commhook.collectives.gloo_backend import MOST_UNDER_WAY
from torch_commhook.process_group.gloo_messages import (
    EXCHANGE,
    EXPECTED,
    Traffic,
    has_a_thread,
    merged,
    messages_of,
)
from torch_commhook.process_group.simulated.link import Issued
from torch_commhook.process_group.slow_link import GlooGroup, SlowLink
from torch_commhook.step.step_end import rounds_of

#: The share of an Ethernet frame that is not headers (Ethernet, IP and TCP).
PAYLOAD = 1448 / 1514
#: The most messages of a collective's part that the model follows one by one: over all buckets, and
#: the least for a bucket.
_MOST_FOLLOWED = 50_000
_LEAST_FOLLOWED = 4
#: Gloo's threads in a group of init_process_group.
_DDP_THREADS = 2


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
            group = groups[key] = GlooGroup(link, _DDP_THREADS if is_ddp else MOST_UNDER_WAY)
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
    """The calls over Gloo, with exchanges of messages among few ranks.

    A simulated group has no exchanges; a hook's sums are all-reduces there.
    """
    found: list[Issued] = []
    groups: set[str] = set()
    for each in chain:
        # Ranks ask for the messages of a second stage when they issue the first.
        operation = EXPECTED if each.group in groups else EXCHANGE
        groups.add(each.group)
        traffic = each.traffic
        ranks, nbytes = traffic.ranks, traffic.nbytes
        if not 1 < ranks <= MOST_RANKS:
            found.append(each)
        elif traffic.operation in ("all_to_all_single", "all_gather_single"):
            found.append(replace(each, traffic=replace(traffic, operation=operation)))
        elif traffic.operation == "allreduce" and 0 < nbytes <= MOST_SUMMED:
            gathered = is_gathered(nbytes, ranks)
            carried = nbytes * (ranks - 1) if gathered else nbytes * (ranks - 1) / ranks
            found.append(replace(each, traffic=Traffic(operation, ranks, nbytes, carried)))
            if not gathered:
                found.append(replace(each, traffic=Traffic(EXPECTED, ranks, nbytes, carried)))
        else:
            found.append(each)
    return found


def round_trips(
    chains: Sequence[Sequence[Issued]],
    agreement: Sequence[Issued],
    buckets: int,
    *,
    is_ddp: bool = False,
) -> float:
    """The number of consecutive round trips in a step, if all buckets are full at the same time.

    Args:
        chains, agreement, is_ddp: as for :func:`through_seconds`.
        buckets: the number of buckets, with equal shares of the gradients.
    """
    return through_seconds(
        chains,
        agreement,
        ready=[0.0] * buckets,
        shares=[1 / buckets] * buckets,
        bits_per_second=float("inf"),
        latency=0.5,
        is_ddp=is_ddp,
    )


def agreement_of(world_size: int) -> list[Issued]:
    """The calls of a rank at the end of a step, by which all ranks agree that it succeeded."""
    return [
        # A byte to the rank at each distance.
        Issued("", Traffic(EXPECTED, len(distances) + 1, len(distances), len(distances)))
        for distances in rounds_of(world_size)
        if distances
    ]
