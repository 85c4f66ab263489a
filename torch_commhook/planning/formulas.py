"""Formulas for the traffic of hooks among many ranks on several nodes.

Tests compare the calls with those of simulated ranks, and the connections with those of processes.
A hook without formulas is simulated instead.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_commhook import hooks
from torch_commhook.collectives.hosts import HOST, nest
from torch_commhook.collectives.issuing import FEW_RANKS
from torch_commhook.collectives.plain import LEAST_RANKS, padded_numel
from torch_commhook.planning.model import Model
from torch_commhook.planning.wire import scaled, with_places
from torch_commhook.process_group.operations import (
    Call,
    is_each_to_each,
    messages_of,
    traffic_of,
)
from torch_commhook.process_group.simulated.link import Issued

Calls = tuple[Issued, ...]
Members = dict[str, list[Sequence[int]]]

#: Above this number of ranks formulas replace a simulation, which would take minutes.
MOST_SIMULATED = 16
MODEL = "model"
_NUMBER_BYTES = 4  # gradients in float32
#: The most elements for a formula: some codecs take no more. A larger model's traffic scales.
_MOST_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class Work:
    """The traffic of a hook in a step with all gradients in one bucket.

    Attributes:
        bytes_sent: the bytes of the rank that sends the most.
        chains: the calls that rank 0 issues. In each chain, a call waits for the one before it.
        members: for each group's name, the ranks of the group of each rank of the first node; empty
            if they are unknown or do not matter.
        hook: the hook that communicates; it differs from the given one on a single node, say.
    """

    bytes_sent: float
    chains: tuple[Calls, ...]
    members: Members
    hook: Any


def formula_of(hook: Any, model: Model, ranks: int, nodes: int) -> Work | None:
    """The traffic of a hook by formulas; None for a hook without formulas.

    The hook is one of :func:`torch_commhook.planning.model.unwrap_hook`. Each node has equally many
    consecutive ranks.
    """
    inside = without_memory(hook)
    every: list[Sequence[int]] = [range(ranks)] * (ranks // nodes)
    if type(inside) is hooks.powersgd:
        return _among_all(low_rank_sum(inside, model, ranks), hook, every)
    elements = min(model.elements, _MOST_ELEMENTS)
    if type(inside) is hooks.hierarchical and inside.levels is not None:
        found = _hierarchical(inside, elements, ranks, nodes, every)
    else:
        found = _among_all(_flat(inside, elements, ranks), hook, every)
    if found is None or elements == model.elements:
        return found
    factor = model.elements / elements
    chains = tuple(scaled(chain, factor) for chain in found.chains)
    return replace(found, bytes_sent=found.bytes_sent * factor, chains=chains)


def _among_all(
    found: tuple[float, Calls] | None, hook: Any, every: list[Sequence[int]]
) -> Work | None:
    """The work of a hook with its bytes and calls in the group of all ranks."""
    return None if found is None else Work(found[0], (found[1],), {MODEL: every}, hook)


def without_memory(hook: Any) -> Any:
    """The hook inside ``error_feedback`` and ``momentum``, which send as it does."""
    while type(hook) in (hooks.error_feedback, hooks.momentum):
        hook = hook.hook
    return hook


def low_rank_sum(hook: hooks.powersgd, model: Model, ranks: int) -> tuple[float, Calls]:
    """The bytes and calls of low-rank factors: the first ones with all vectors, then the others."""
    first = second = 0
    for each in model.listed():
        rows = each.shape[0] if len(each.shape) > 1 else 1
        columns = each.numel // max(1, rows)
        least = hook.rank * (rows + columns) * hook.min_compression_rate
        if len(each.shape) < 2 or not 0 < least <= each.numel:
            first += each.numel
        else:
            first += hook.rank * rows
            second += hook.rank * columns
    numels = [numel for numel in (first, second) if numel]
    sums = [_call(MODEL, "allreduce", ranks, _NUMBER_BYTES * numel) for numel in numels]
    return _added_up(*sums) if ranks > 1 else (0.0, ())


def _flat(hook: Any, elements: int, ranks: int) -> tuple[float, Calls] | None:
    if type(hook) is hooks.compressed:
        return encoded_sum(hook.codec, elements, ranks, MODEL)
    if type(hook) is hooks.cast and ranks >= LEAST_RANKS:
        nbytes = 2 * padded_numel(elements, ranks)
        return _added_up(
            _call(MODEL, "all_to_all_single", ranks, nbytes),
            _call(MODEL, "all_gather_single", ranks, nbytes // ranks),
        )
    if type(hook) in (hooks.allreduce, hooks.cast):
        number_bytes = 2 if type(hook) is hooks.cast else _NUMBER_BYTES
        return _added_up(_call(MODEL, "allreduce", ranks, number_bytes * elements))
    return None


def encoded_sum(codec: Any, elements: int, ranks: int, group: str) -> tuple[float, Calls]:
    """The bytes and calls of ``compressed_all_reduce``."""
    if ranks == 1:
        return 0.0, ()
    if codec.exchange == "all_gather":
        return _added_up(_call(group, "all_gather_single", ranks, codec.nbytes(elements)))
    if codec.exchange == "all_reduce":
        return _added_up(_call(group, "allreduce", ranks, codec.nbytes(elements)))
    sizes = [segment.nbytes for segment in codec.segments(elements, ranks)]
    issued = (
        _call(group, "all_to_all_single", ranks, sum(sizes), sizes),
        # Segments are padded to the longest.
        _call(group, "all_gather_single", ranks, max(sizes)),
    )
    # The rank with the smallest segment sends the most.
    return sum(sizes) - min(sizes) + issued[1].traffic.carried, issued


def _hierarchical(
    hook: Any, elements: int, ranks: int, nodes: int, every: list[Sequence[int]]
) -> Work | None:
    per_node = ranks // nodes
    levels: list[Any] = []
    for level in hook.levels:
        if level == HOST:
            levels.append([rank // per_node for rank in range(ranks)])
        elif isinstance(level, int):
            levels.append(level)
        else:
            return None  # a level as text, "name=value": the ranks' values are unknown
    nesting = nest(levels, ranks)
    *inner, units = nesting.sizes
    if units == 1 or not inner:
        plain = hooks.allreduce() if units == 1 else hooks.compressed(hook.codec)
        return _among_all(_flat(plain, elements, ranks), plain, every)
    members: Members = {
        f"level {level}": [nesting.inner[rank][level] for rank in range(per_node)]
        for level in range(len(inner))
    }
    members["nodes"] = [nesting.outer[rank] for rank in range(per_node)]
    share = -(-elements // math.prod(inner))
    nbytes = _NUMBER_BYTES * share * math.prod(inner)
    scatters, gathers = [], []
    for level, size in enumerate(inner):
        scatters.append(_call(f"level {level}", "all_to_all_single", size, nbytes))
        nbytes //= size
        gathers.append(_call(f"level {level}", "all_gather_single", size, nbytes))
    sent, between = encoded_sum(hook.codec, min(share, elements), units, "nodes")
    issued = (*scatters, *between, *reversed(gathers))
    exact = sum(each.traffic.carried for each in (*scatters, *gathers))
    return Work(exact + sent, (issued,), members, hook)


def _added_up(*issued: Issued) -> tuple[float, Calls]:
    return sum(each.traffic.carried for each in issued), issued


def _call(
    group: str, operation: str, ranks: int, nbytes: int, splits: Sequence[int] = ()
) -> Issued:
    message = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    call = Call(operation, None, [message], [message], splits=splits)
    return Issued(group, traffic_of(call, 0, ranks))


# ---- counts for any calls ------------------------------------------------------------------------


def count_messages(
    issued: Sequence[Issued],
    agreement: Sequence[Issued],
    shares: Sequence[float],
    *,
    is_ddp: bool = False,
) -> int:
    """The number of messages that a rank sends in a step.

    ``issued`` are the calls for all gradients in one bucket, ``agreement`` those at the end of a
    step. Each bucket has a share of the gradients. With ``is_ddp`` DDP issues the calls itself.
    """
    found = sum(part.count for each in agreement for part in messages_of(each.traffic))
    for share, buckets in Counter(shares).items():
        calls: Sequence[Issued] = scaled(issued, share)
        calls = calls if is_ddp else with_places(calls)
        found += buckets * sum(part.count for each in calls for part in messages_of(each.traffic))
    return found


def count_connections(hook: Any, issued: Sequence[Issued], ranks: int, connections: int = 1) -> int:
    """The number of connections of rank 0 that attaching the hook adds, and that it uses.

    ``issued`` are the hook's calls for all gradients, and ``connections`` is as for ``attach``.
    """
    if ranks == 1:
        return 0
    sizes = {each.group: each.traffic.ranks for each in issued}
    with_all = {each.group for each in issued if is_each_to_each(each.traffic)}
    own = set(sizes) if len(sizes) > 1 else set()  # groups of levels, beside the model's group

    def of_group(size: int, reaches_all: bool) -> int:
        if size <= FEW_RANKS or reaches_all:
            return size - 1
        # The partners of doubled distances, and the neighbours in a ring.
        return min(size - 1, 2 * math.ceil(math.log2(size)))

    # All groups of a process use the same connections: those of the largest are at least as many.
    most = max(
        [of_group(ranks, not own and bool(with_all))]
        + [of_group(sizes[name], name in with_all) for name in own]
    )
    # The first ones stay when a group gets several.
    return most * (connections + (connections > 1))


def bytes_out_of_node(issued: Sequence[Issued], members: Members, shares: Sequence[float]) -> float:
    """The bytes that all ranks of the first node send to other nodes in a step.

    ``issued`` and ``shares`` are as for :func:`count_messages`, ``members`` as in :class:`Work`.
    """
    sent = 0.0
    for share, buckets in Counter(shares).items():
        for each in with_places(scaled(issued, share)):
            for rank, group in enumerate(members[each.group]):
                sent += buckets * _bytes_out(each, rank, group, len(members[each.group]))
    return sent


def _bytes_out(issued: Issued, rank: int, group: Sequence[int], per_node: int) -> float:
    """The bytes of a call that one rank sends to other nodes."""
    traffic = issued.traffic
    if is_each_to_each(traffic):
        outside = sum(other >= per_node for other in group)
        return traffic.carried * outside / (traffic.ranks - 1)
    next_in_ring = group[(group.index(rank) + 1) % len(group)]
    return traffic.carried if next_in_ring >= per_node else 0.0


def with_ranks_per_node(hook: Any, per_node: int) -> Any:
    """Let the hierarchical hooks inside a hook treat ``per_node`` consecutive ranks as a host."""
    if type(hook) is hooks.hierarchical and hook.levels is not None:
        hook.levels = tuple(per_node if level == HOST else level for level in hook.levels)
    for inside in hook.hooks_inside() if isinstance(hook, hooks.Hook) else ():
        with_ranks_per_node(inside, per_node)
    return hook


def encoding_of(hook: Any, ranks: int) -> tuple[int, Any]:
    """The number of shares that ranks encode, and a hook that encodes one as ``hook`` does."""
    inside = hook.hook if type(hook) in (hooks.error_feedback, hooks.momentum) else hook
    if type(inside) is not hooks.hierarchical or inside.levels is None:
        return 1, hook
    numbers = [level for level in inside.levels if isinstance(level, int)]
    parts = min(math.prod(numbers), ranks)
    plain = hooks.compressed(inside.codec, seed=inside.seed)
    if inside is hook:
        return parts, plain
    around = copy.copy(hook)
    around.hook = plain
    return parts, around
