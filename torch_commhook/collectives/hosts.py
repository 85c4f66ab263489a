"""Determines which ranks share a host, and makes process groups of nested parts of the ranks."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from torch_commhook.collectives.gloo_groups import (
    destroy_group,
    group_and_inner,
    group_description,
    group_name,
    group_ranks,
    group_store,
    group_timeout,
    is_gloo_or_own,
    is_known,
    make_group,
)

#: The name of the level whose units are the machines.
HOST = "host"

#: The number of label exchanges that have begun over a group: each has keys of its own.
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
#: For each group, the groups over some of its ranks that were made here, by these ranks; the last
#: one is in use.
_made: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[int, ...], list[dist.ProcessGroup]]
] = weakref.WeakKeyDictionary()


class Nesting(NamedTuple):
    """The groups of each rank, as ranks of the whole group.

    Attributes:
        sizes: the number of ranks in each level's groups, from the innermost outward, and last the
            number of remaining units.
        inner: for each rank its group in each level.
        outer: for each rank the ranks with its position in the other units.
        uneven: for each level whose units have different numbers of parts and are split, the
            level's number and these numbers.
    """

    sizes: tuple[int, ...]
    inner: list[list[list[int]]]
    outer: list[list[int]]
    uneven: list[tuple[int, list[int]]]


def machine() -> str:
    """A text that processes share if they are on one machine and see the same network."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net")
    except OSError:  # a system other than Linux
        return platform.node()
    return f"{platform.node()} {booted} {network.st_dev} {network.st_ino}"


def label_of_host() -> str:
    """A short text that processes share if they share a host; see :func:`machine`."""
    return hashlib.sha256(machine().encode()).hexdigest()[:16]


def nest(levels: Sequence[int | Sequence[int]], ranks: int) -> Nesting:
    """Compute nested parts of the ranks. In each level all groups have the same number of ranks.

    A unit of a level consists of units of the next inner level. If units have different numbers of
    parts, each is split into units whose number of parts is the greatest common divisor of these.

    Args:
        levels: from the innermost outward: for each rank the number of its unit, or the number of
            consecutive inner units in one unit.
        ranks: the number of ranks.

    Raises:
        ValueError: a number does not divide the number of units, or two ranks of a unit are in
            different units of the next level.
    """
    units = [[rank] for rank in range(ranks)]
    inner: list[list[list[int]]] = [[] for _ in range(ranks)]
    sizes: list[int] = []
    uneven: list[tuple[int, list[int]]] = []
    for number, level in enumerate(levels):
        of_label: dict[int, list[list[int]]] = {}
        for place, unit in enumerate(units):
            of_label.setdefault(_label(level, number, place, unit, len(units)), []).append(unit)
        counts = [len(parts) for parts in of_label.values()]
        size = math.gcd(*counts)
        if len(set(counts)) > 1:
            uneven.append((number, sorted(set(counts))))
        if size == 1:
            continue
        sizes.append(size)
        units = []
        for parts in of_label.values():
            for begin in range(0, len(parts), size):
                units.append(_joined(parts[begin : begin + size], inner))
    outer: list[list[int]] = [[] for _ in range(ranks)]
    for same_place in zip(*units, strict=True):
        for rank in same_place:
            outer[rank] = sorted(same_place)
    return Nesting((*sizes, len(units)), inner, outer, uneven)


def _joined(parts: Sequence[Sequence[int]], inner: list[list[list[int]]]) -> list[int]:
    """Join several units into one; adds the groups of its ranks to ``inner``.

    Positions follow the ranks' order in their groups, which PyTorch sorts.
    """
    groups = [sorted(same_place) for same_place in zip(*parts, strict=True)]
    for group in groups:
        for rank in group:
            inner[rank].append(group)
    return [group[place] for place in range(len(parts)) for group in groups]


def _label(
    level: int | Sequence[int], number: int, place: int, unit: Sequence[int], units: int
) -> int:
    """The unit of a level that contains a unit of the next inner level."""
    if isinstance(level, int):
        if units % level:
            raise ValueError(
                f"hierarchical: levels[{number}] must divide the {units} units of the level "
                f"inside, got {level}"
            )
        return place // level
    for rank in unit:
        if level[rank] != level[unit[0]]:
            raise ValueError(
                f"hierarchical: levels[{number}] must have whole units of the level inside, got "
                f"ranks {unit[0]} and {rank} of one in two"
            )
    return level[unit[0]]


# ---- among the ranks -----------------------------------------------------------------------------


def known_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group, or the group that it wraps, that ``torch.distributed`` knows.

    Raises:
        ValueError: it knows neither.
    """
    for each in group_and_inner(group):
        if group_ranks(each) is not None and group_store(each) is not None:
            return each
    raise ValueError(
        "hierarchical: to determine which ranks share a host, the process group must be one that "
        f"torch.distributed knows, got {type(group).__qualname__}; give intra_group= and "
        "inter_group="
    )


def numbered_labels(group: dist.ProcessGroup, labels: Sequence[str]) -> list[list[int]]:
    """Number the labels of all ranks: equal labels get equal numbers.

    All ranks of the group call this at the same point. Each makes a few requests to the group's
    store, at any number of ranks. Over stores that cannot append, such as files, it makes one
    request for each rank.

    Args:
        group: a group that ``torch.distributed`` knows.
        labels: this rank's labels; all ranks give equally many.

    Returns:
        For each label of a rank, the number of each rank's label.

    Raises:
        ValueError: ranks give different numbers of labels.
        RuntimeError: a rank does not call this within the group's timeout.
    """
    size, rank = group.size(), group.rank()
    if size == 1:
        return [[0] for _ in labels]
    count = _counts[group] = _counts.get(group, 0) + 1
    base = group_store(group)
    assert base is not None
    store = dist.PrefixStore(f"{group_name(group)}/commhook-labels{count}", base)
    own = json.dumps(list(labels))
    if not base.has_extended_api():  # type: ignore[attr-defined]
        store.set(str(rank), own)
        every = [json.loads(store.get(str(other))) for other in range(size)]
        if store.add("read", 1) == size:
            for key in ("read", *map(str, range(size))):
                store.delete_key(key)
        return _equally_many(_numbers(every))
    store.append("labels", f"{rank} {own}\n")  # type: ignore[attr-defined]
    if store.add("told", 1) == size:  # the last rank writes all numbers
        lines = store.get("labels").decode().splitlines()
        texts = dict(line.split(" ", 1) for line in lines)
        ordered = [json.loads(texts[str(other)]) for other in range(size)]
        store.set("found", json.dumps(_numbers(ordered)))
    store.wait(["found"], group_timeout(group))
    found: list[list[int]] = json.loads(store.get("found"))
    if store.add("read", 1) == size:
        for key in ("labels", "told", "found", "read"):
            store.delete_key(key)
    return _equally_many(found)


def _numbers(every: list[list[str]]) -> list[list[int]]:
    """The numbers of all ranks' labels; empty if ranks give different numbers of labels."""
    if len({len(labels) for labels in every}) != 1:
        return []
    found = []
    for labels in zip(*every, strict=True):
        numbers: dict[str, int] = {}
        found.append([numbers.setdefault(label, len(numbers)) for label in labels])
    return found


def _equally_many(found: list[list[int]]) -> list[list[int]]:
    if not found:
        raise ValueError("hierarchical: levels must be as many on all ranks")
    return found


def group_over(group: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Make a group over some ranks of another group. These ranks call it at the same point.

    Over Gloo two ranks connect when they first send each other a message. The group lives as long
    as ``group``; the next call returns it again, unless it has been destroyed.

    Args:
        group: a group that ``torch.distributed`` knows.
        ranks: ranks of ``group`` in ascending order, including this one.
    """
    made = _made.setdefault(group, {}).setdefault(tuple(ranks), [])
    if made and is_known(made[-1]):
        return made[-1]
    known = group_ranks(group)
    assert known is not None
    members = [known[rank] for rank in ranks]
    if is_gloo_or_own(group):
        digest = hashlib.sha256(str(list(ranks)).encode()).hexdigest()[:16]
        name = f"{group_name(group)}/commhook-{digest}-{len(made)}"
        parent_store = group_store(group)
        assert parent_store is not None
        found = make_group(
            dist.PrefixStore(name, parent_store),
            list(ranks).index(group.rank()),
            members,
            name,
            group_timeout(group),
            description=f"commhook: {len(ranks)} ranks of {group_description(group)}",
        )
        weakref.finalize(group, destroy_group, found)
    else:
        timeout = group_timeout(group)
        found = dist.new_group(members, timeout=timeout, use_local_synchronization=True)
    made.append(found)
    return found
