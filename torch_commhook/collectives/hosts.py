"""Which ranks share a host, groups of them, and sums that are exact inside a node."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.codecs.base import ERROR_DTYPES, Codec
from torch_commhook.collectives.agreement import gather_values
from torch_commhook.collectives.compressed import compressed_bytes, sum_compressed
from torch_commhook.collectives.compressed_call import (
    MessageBuffers,
    SumArguments,
    check_arguments,
    destinations_for,
    listed_tensors,
    segment_range,
)
from torch_commhook.collectives.futures import (
    chained,
    completed,
    on_side_stream,
    then,
    then_on_side_stream,
)
from torch_commhook.collectives.gloo_groups import (
    check_place,
    destroy_group,
    device_types,
    devices_over_host,
    exchanges,
    group_and_inner,
    group_description,
    group_name,
    group_rank,
    group_ranks,
    group_store,
    group_timeout,
    is_gloo_or_own,
    is_known,
    make_group,
    resolve_group,
    state_of,
)
from torch_commhook.collectives.issuing import SECOND, Place, as_bytes, place_in
from torch_commhook.collectives.plain import all_gather, reduce_scatter, sum_of_shares
from torch_commhook.metrics import CallMeter, WireMeter, counting, note_collective, tensor_bytes
from torch_commhook.native import bucket_ops
from torch_commhook.wording import warn_user

# ---- determines which ranks share a host ---------------------------------------------------------


#: The name of the level whose units are the machines.
HOST = "host"


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
    """The group, or one that it wraps, that ``torch.distributed`` knows; else a ValueError."""
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

    All ranks of the group, which ``torch.distributed`` knows, call this at the same point.

    Returns:
        For each label of a rank, the number of each rank's label.

    Raises:
        ValueError: ranks give different numbers of labels.
    """
    every = [list(labels)] if group.size() == 1 else gather_values(list(labels), group) or []
    if len({len(of_rank) for of_rank in every}) != 1:
        raise ValueError("hierarchical: levels must be as many on all ranks")
    found = []
    for same_level in zip(*every, strict=True):
        numbers: dict[str, int] = {}
        found.append([numbers.setdefault(label, len(numbers)) for label in same_level])
    return found


def group_over(group: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Make a group over some ranks of another group. These ranks call it at the same point.

    Over Gloo two ranks connect when they first send each other a message. The group lives as long
    as ``group``, which ``torch.distributed`` knows; the next call returns it again, unless it has
    been destroyed. ``ranks`` are in ascending order, and include this one.
    """
    made = state_of(group).subgroups.setdefault(tuple(ranks), [])
    if made and is_known(made[-1]):
        return made[-1]
    known = group_ranks(group)
    assert known is not None
    members = [known[rank] for rank in ranks]
    through_host = devices_over_host(group) | {"cpu"}
    if is_gloo_or_own(group) and through_host.issuperset(device_types(group)):
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
            devices=through_host - {"cpu"},
        )
        weakref.finalize(group, destroy_group, found)
    else:
        found = dist.new_group(
            members,
            timeout=group_timeout(group),
            backend=dist.get_backend_config(group),
            use_local_synchronization=True,
        )
    made.append(found)
    return found


# ---- sums that are exact inside a node and compressed between nodes ------------------------------


def hierarchical_all_reduce(
    tensors: Tensor | Sequence[Tensor],
    codec: Codec,
    *,
    intra_group: dist.ProcessGroup | Sequence[dist.ProcessGroup],
    inter_group: dist.ProcessGroup,
    scale: float = 1.0,
    out: Tensor | Sequence[Tensor] | None = None,
    carry: Tensor | None = None,
    error: Tensor | None = None,
    sum_error: Tensor | None = None,
    error_decay: float = 1.0,
    rounding: Tensor | None = None,
    buffers: MessageBuffers | None = None,
    meter: CallMeter | None = None,
    shard_error: Tensor | None = None,
) -> torch.futures.Future[Tensor]:
    """Return a Future of ``scale`` times the sum over all ranks, sent compressed between nodes.

    A reduce-scatter in float32 inside the node gives each of its ranks the node's sum of one share
    of the elements. :func:`compressed_all_reduce` sums the shares over the nodes. An all-gather
    inside the node collects them. So links between nodes carry each element once per node,
    compressed, and links inside a node carry exact values. All ranks get the same bits.

    Nodes may be nested, as hosts in a rack: each level then sums the shares of the next inner
    level.

    On the CPU over Gloo the call waits for no stage, and stages of
    several calls run at once: the thread that ends one stage issues the next. If a rank fails
    between two stages, its later calls with this ``inter_group`` fail with the same error, and the
    other ranks wait until the group's timeout. Attached hooks begin anew. In other cases
    the call waits for all stages but the last; with CUDA tensors and NCCL the stream waits instead.

    Args:
        tensors: as for :func:`compressed_all_reduce`.
        codec: the codec, the same on all ranks.
        intra_group: the ranks of this node. All nodes have the same number of ranks. For nested
            nodes a list with one group for each level, from the innermost outward: the ranks with
            this rank's position in the parts of its node, one of each part.
        inter_group: the ranks with this rank's position in their nodes, one of each node.
        scale: the factor of the sum.
        out: as for :func:`compressed_all_reduce`. Written.
        carry: values to add to this rank's values, or None: float32 or bfloat16, flat, one element
            per value. Set to zeros.
        error: the errors of the node's earlier messages: float32 or bfloat16, with the share's
            number of elements.
        sum_error, error_decay, rounding, buffers, meter: as for :func:`compressed_all_reduce`,
            applied to the share.
        shard_error: the deprecated name of ``sum_error``.

    Returns:
        A Future of ``out``; of its first tensor if it is a list.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`compressed_all_reduce`.

    Example:
        >>> def total(rank):
        ...     nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        ...     across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        ...     return collectives.hierarchical_all_reduce(
        ...         torch.ones(512),
        ...         codecs.blockwise(bits=8),
        ...         intra_group=nodes[rank // 2],
        ...         inter_group=across[rank % 2],
        ...     ).wait()
        >>> run_ranks(total, 4)[0][:4]
        tensor([4., 4., 4., 4.])
    """
    if shard_error is not None:
        what = "hierarchical_all_reduce: shard_error is deprecated: use sum_error"
        warn_user(what, DeprecationWarning)
        sum_error = shard_error
    sources = listed_tensors("hierarchical_all_reduce", "tensors", tensors)
    intra_groups, inter_group = _checked_groups(intra_group, inter_group)
    numel = sum(tensor.numel() for tensor in sources)
    destinations = destinations_for("hierarchical_all_reduce", out, sources, numel)
    place = place_in_node(intra_groups)
    begin, end = share_range(numel, **place)
    buffers = MessageBuffers() if buffers is None else buffers
    arguments = SumArguments(
        codec, scale, error, sum_error, rounding, buffers, meter, error_decay=error_decay
    )
    device = sources[0].device
    check_arguments("hierarchical_all_reduce", arguments, end - begin, device, inter_group)
    _check_carry(carry, numel)
    used = (sources, destinations, carry, error, sum_error, rounding)
    is_traced = torch.compiler.is_dynamo_compiling()
    mode = _mode_of_now(is_traced)

    def finish(done: torch.futures.Future[Tensor]) -> Tensor:
        with mode():
            bucket_ops.unflatten_into(done.value().view(-1)[:numel], destinations)
        return destinations[0]

    stream = nullcontext() if is_traced else on_side_stream(device, buffers.stream, used)
    in_background = not is_traced and _waits_for_nothing(device, *intra_groups, inter_group)
    with torch.no_grad(), stream:
        flat = _flattened(sources, carry, buffers, place["ranks"])
        if in_background:
            gathered = _in_background(flat, end - begin, arguments, intra_groups, inter_group)
            return then(gathered, finish, device)
        own = flat
        for group in intra_groups:
            own = reduce_scatter(own, group=group).wait()
        if end > begin:  # the last share may be shorter than the others
            share = [own[: end - begin]]
            sum_compressed(share, share, arguments, inter_group).wait()
        for group in reversed(intra_groups[1:]):
            own = all_gather(own, group=group).wait().view(-1)
        return then_on_side_stream(all_gather(own, group=intra_groups[0]), finish, device)


def _checked_groups(
    intra_group: dist.ProcessGroup | Sequence[dist.ProcessGroup], inter_group: dist.ProcessGroup
) -> tuple[list[dist.ProcessGroup], dist.ProcessGroup]:
    given: list[Any] = [intra_group]
    if isinstance(intra_group, (list, tuple)):
        given = list(intra_group)
    if not given:
        raise ValueError("hierarchical_all_reduce: intra_group must have a level, got none")
    intra_groups, inter_group = [resolve_group(each) for each in given], resolve_group(inter_group)
    groups = [*intra_groups, inter_group]
    for number, group in enumerate(groups):
        if any(group is other for other in groups[:number]) and group.size() > 1:
            raise ValueError(
                "hierarchical_all_reduce: intra_group and inter_group must share this rank only, "
                "got the same group"
            )
    for group in groups:
        check_place("hierarchical_all_reduce", group)
    return intra_groups, inter_group


def _check_carry(carry: object, numel: int) -> None:
    if carry is None:
        return
    if not isinstance(carry, Tensor) or carry.dtype not in ERROR_DTYPES:
        raise TypeError(
            "hierarchical_all_reduce: carry must be a tensor of float32 or bfloat16, or None"
        )
    if carry.dim() != 1 or (not torch.compiler.is_dynamo_compiling() and len(carry) != numel):
        raise ValueError(
            f"hierarchical_all_reduce: carry must be flat and hold {numel} elements, got sizes "
            f"{list(carry.shape)}"
        )


def _mode_of_now(is_traced: bool) -> Callable[[], AbstractContextManager[object]]:
    """The context for stages on other threads: only inference mode can write its tensors."""
    if not is_traced and torch.is_inference_mode_enabled():
        return torch.inference_mode
    return torch.no_grad


def _waits_for_nothing(device: torch.device, *groups: dist.ProcessGroup) -> bool:
    """Whether all stages have places."""
    return all(group.size() == 1 or exchanges(group, device) for group in groups)


def _in_background(
    flat: Tensor,
    numel: int,
    arguments: SumArguments,
    intra_groups: Sequence[dist.ProcessGroup],
    inter_group: dist.ProcessGroup,
) -> torch.futures.Future[Tensor]:
    """Run all stages; the thread that ends one stage issues the next.

    Args:
        flat: this rank's values, one share for each rank of the node.
        numel: the number of elements of this rank's own share, which may be shorter.
        arguments: the arguments of the sum over the nodes.

    Returns:
        A Future of all shares' sums, with as many elements as ``flat``.
    """
    # Taken here, by all ranks in the same order.
    places = [
        (place_in(group), place_in(group)) if group.size() > 1 else None for group in intra_groups
    ]
    if numel and inter_group.size() > 1:
        has_two = arguments.codec.exchange == "all_to_all"
        second = place_in(inter_group, SECOND) if has_two else None
        arguments = arguments._replace(places=(place_in(inter_group), second))
    # Here, since the threads that issue the stages count nothing.
    if numel:
        note_collective(*compressed_bytes(arguments.codec, numel, inter_group))
    nbytes = tensor_bytes(flat)
    for group in intra_groups:
        ranks = group.size()
        for _ in ("reduce-scatter", "all-gather"):
            note_collective(nbytes // ranks * (ranks - 1))
        nbytes //= ranks
    return _in_level(flat, numel, arguments, intra_groups, inter_group, places)


def _in_level(
    flat: Tensor,
    numel: int,
    arguments: SumArguments,
    intra_groups: Sequence[dist.ProcessGroup],
    inter_group: dist.ProcessGroup,
    places: Sequence[tuple[Place, Place] | None],
) -> torch.futures.Future[Tensor]:
    """Run the stages of :func:`_in_background` in the first of these levels, and beyond it.

    ``places`` are those of the first and of the last stage in each level; None for one rank.
    """
    intra_group, *beyond = intra_groups
    ranks, mode = intra_group.size(), _mode_of_now(False)
    scatter, last = places[0] or (None, None)
    first = sum_of_shares(flat, intra_group, scatter)
    with mode():
        gathered = flat.new_empty((ranks, flat.numel() // ranks))
    outputs = [as_bytes(row) for row in gathered]
    if last is not None:
        last.form = str(flat.dtype)
        last.expect_gather(outputs)

    def over_nodes(own: Tensor) -> torch.futures.Future[Tensor]:
        if beyond:
            with mode(), counting(WireMeter()):
                return _in_level(own, numel, arguments, beyond, inter_group, places[1:])
        if numel == 0:
            return completed(own)

        def summed(done: torch.futures.Future[Tensor]) -> Tensor:
            done.value()  # written in place; raises an error
            return own

        with mode(), counting(WireMeter()):
            share = [own[:numel]]  # replaced by the sum of all nodes
            return then(sum_compressed(share, share, arguments, inter_group), summed, flat.device)

    def in_node(sums: Tensor) -> torch.futures.Future[Tensor]:
        if last is None:
            return completed(sums)
        with mode():
            return last.gather(as_bytes(sums.view(-1)), outputs, gathered)

    summed = chained(first, over_nodes, lambda own: own, flat.device)
    return chained(summed, in_node, lambda gathered: gathered, flat.device)


def _flattened(
    sources: list[Tensor], carry: Tensor | None, buffers: MessageBuffers, ranks: int
) -> Tensor:
    """This rank's values in float32, padded to shares of one length."""
    numel = sum(tensor.numel() for tensor in sources)
    padded, device = (-(-numel // ranks) * ranks,), sources[0].device
    if torch.compiler.is_dynamo_compiling():  # the compiler plans memory itself
        flat = torch.empty(padded, dtype=torch.float32, device=device)
    else:
        flat = buffers.get("flat", padded, torch.float32, device)
    bucket_ops.flatten(sources, out=flat[:numel])
    flat[numel:] = 0
    if carry is not None:
        flat[:numel] += carry
        carry.zero_()
    return flat


def share_range(numel: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """The elements ``[begin, end)`` of which a rank of a node gets the node's sum."""
    share = -(-numel // ranks)
    return min(numel, share * rank), min(numel, share * (rank + 1))


def place_in_node(intra_groups: Sequence[dist.ProcessGroup]) -> dict[str, int]:
    """This rank's position in its node, and the node's number of ranks: they select its share."""
    rank, ranks = 0, 1
    for group in intra_groups:
        rank, ranks = rank * group.size() + group_rank(group), ranks * group.size()
    return {"rank": rank, "ranks": ranks}


def inter_segment_range(
    codec: Codec,
    numel: int,
    *,
    intra_groups: Sequence[dist.ProcessGroup],
    inter_group: dist.ProcessGroup,
) -> tuple[int, int]:
    """The elements ``[begin, end)`` whose sum over the nodes a rank encodes."""
    begin, end = share_range(numel, **place_in_node(intra_groups))
    ranks = {"rank": group_rank(inter_group), "world_size": inter_group.size()}
    first, last = segment_range(codec, end - begin, **ranks)
    return begin + first, begin + last
