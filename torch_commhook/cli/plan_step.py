"""When the collectives of a step are through, over a link of given rate and delay.

The model is that of :class:`torch_commhook.process_group.ThrottledProcessGroup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_commhook.process_group.simulated.link import Issued

#: Messages of a part of a collective that are followed one by one, over all buckets.
_MOST_FOLLOWED = 50_000
_LEAST_FOLLOWED = 4


def through_seconds(
    issued: Sequence[Issued],
    agreement: Sequence[Issued],
    *,
    ready: Sequence[float],
    shares: Sequence[float],
    computed: float = 0.0,
    bits_per_second: float,
    latency: float,
) -> float:
    """When a step's last collective has ended.

    Of a bucket each collective waits for the one before. The first one on a group goes to that
    group; those that follow go to the group beside it, for second stages. At the end ranks agree.

    Args:
        issued: what a rank issues for all gradients, as if they were one bucket.
        agreement: what it issues at the end of a step.
        ready: when each bucket is full, in seconds.
        shares: of each bucket in the gradients.
        computed: when all that is computed has been, in seconds.
        bits_per_second: of the link, each way.
        latency: of a message, one way, in seconds.
    """
    from torch_commhook.collectives.gloo_groups import default_threads
    from torch_commhook.process_group.gloo_messages import has_a_thread, merged, messages_of
    from torch_commhook.process_group.slow_link import GlooGroup, SlowLink

    link = SlowLink(bits_per_second, latency)
    most = max(_LEAST_FOLLOWED, _MOST_FOLLOWED // len(ready))
    groups: dict[tuple[str, bool], GlooGroup] = {}
    end = computed

    def go_on(when: float, chain: list[Issued], before: frozenset[str]) -> None:
        nonlocal end
        if not chain:
            end = max(end, when)
            return
        (name, traffic), rest = (chain[0].group, chain[0].traffic), chain[1:]
        key = name, name in before
        group = groups.get(key)
        if group is None:
            group = groups[key] = GlooGroup(link, traffic.ranks, default_threads())
        issue = group.issue if has_a_thread(traffic) else group.send
        parts = merged(messages_of(traffic), most)
        issue(when, parts, lambda done: go_on(done, rest, before | {name}))

    for when, share in zip(ready, shares, strict=True):
        chain = _with_exchanges([each.scaled(share) for each in issued])
        link.at(when, lambda now, chain=chain: go_on(now, chain, frozenset()))  # type: ignore[misc]
    link.finish()
    link.at(end, lambda now: go_on(now, list(agreement), frozenset()))
    link.finish()
    return end


def _with_exchanges(chain: list[Issued]) -> list[Issued]:
    """The calls as they are over Gloo, where stages of few ranks with large messages are exchanges.

    A simulated group has no exchanges: a hook's stages are then an all-to-all and an all-gather.
    """
    from torch_commhook.collectives.exchange import suits
    from torch_commhook.process_group.gloo_messages import EXCHANGE

    if not chain or chain[0].traffic.operation != "all_to_all_single":
        return chain
    found = []
    for each in chain:
        traffic = each.traffic
        is_stage = traffic.operation in ("all_to_all_single", "all_gather_single")
        if is_stage and suits(traffic.ranks, traffic.carried / max(1, traffic.ranks - 1)):
            each = replace(each, traffic=replace(traffic, operation=EXCHANGE))
        found.append(each)
    return found


def round_trips(issued: Sequence[Issued], agreement: Sequence[Issued], buckets: int) -> float:
    """How many round trips follow one another in a step whose buckets are full at once.

    Args:
        issued, agreement: as :func:`through_seconds` takes them.
        buckets: equal parts of the gradients.
    """
    return through_seconds(
        issued,
        agreement,
        ready=[0.0] * buckets,
        shares=[1 / buckets] * buckets,
        bits_per_second=float("inf"),
        latency=0.5,
    )


def record_agreement(world_size: int) -> list[Issued]:
    """What a rank issues at the end of a step, at which all ranks agree that it went well."""
    import torch

    from torch_commhook.process_group.simulated.link import Links
    from torch_commhook.step.step_group import StepGroup
    from torch_commhook.testing.ranks import run_with_links

    def end_step(rank: int, links: Links) -> None:
        group = StepGroup()
        group.begin()
        links.issued[rank] = []
        group.commit(torch.zeros(1, dtype=torch.uint8, device="cpu"))

    return run_with_links(end_step, world_size, 0, timeout=600)[1].issued[0]
