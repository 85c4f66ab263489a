"""Averages that are exact inside a node and compressed between nodes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.codecs.base import Codec
from torch_commhook.collectives.agreement import gather
from torch_commhook.collectives.gloo_groups import (
    group_rank,
    group_ranks,
    is_destroyed,
    resolve_group,
)
from torch_commhook.collectives.hosts import (
    HOST,
    Nesting,
    group_over,
    hierarchical_all_reduce,
    inter_segment_range,
    known_group,
    label_of_host,
    nest,
    numbered_labels,
    place_in_node,
    share_range,
)
from torch_commhook.hooks.base import Hook, check_dense, result_tensor
from torch_commhook.hooks.compressed import (
    compressed,
    no_codec,
    rounding_of,
    traits_of_codec,
)
from torch_commhook.hooks.mean import allreduce
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.wording import check_type

#: The default levels.
AUTO = "auto"


class hierarchical(Hook):  # noqa: N801 (a hook is written as it is called)
    """Average gradients exactly inside a node, and through a codec between nodes.

    See :func:`torch_commhook.collectives.hierarchical_all_reduce`. With error feedback each rank
    remembers the error of its share of the node's sum: ``1 / ranks of the node`` of the elements.

    Without groups the hook determines which ranks share a host, and makes the groups when it is
    attached. If all ranks share one host, it works as :class:`allreduce`. If no two ranks do, it
    works as :class:`compressed`. If hosts have different numbers of ranks, a node is a part of a
    host; its size is the greatest common divisor of these numbers. If that is 1, it works as
    :class:`compressed`.

    A list of ``levels`` nests nodes, from the innermost outward. Sums are exact within all levels,
    and compressed between the units of the last level::

        hooks.hierarchical(codecs.blockwise(), levels=["host", f"rack={os.environ['RACK']}"])

    Args:
        codec: encodes a node's gradients into messages.
        intra_group: the ranks of this node. All nodes have the same number of ranks. For nested
            nodes a list of groups: see :func:`hierarchical_all_reduce`.
        inter_group: the ranks with this rank's position in their nodes, one of each node.
        levels: without groups: ``"auto"``, which means ``["host"]``, or a list with one entry for
            each level. ``"host"`` groups the ranks of one machine that see the same network. A text
            ``"name=value"`` groups the ranks that give the same value. A number groups this many
            consecutive units of the next inner level, or ranks in the innermost level.
        seed: the seed of random numbers; see :class:`compressed`.

    Attributes:
        sizes: the number of ranks of this rank's group in each level, from the innermost outward,
            and last the number of units that exchange compressed messages. Levels with one rank
            each are left out. None until the hook has its groups.

    Raises:
        TypeError: ``codec`` is not a codec, a group is not a process group, or
            ``levels`` has another type.
        ValueError: a group excludes this rank, or the groups share another rank; ``levels`` is
            empty, or given together with groups. When it is attached: the groups do not consist of
            exactly the model's ranks; ranks of an ``inter_group`` have different positions in their
            nodes; a number in ``levels`` does not divide the number of units; the ranks of a unit
            are in different units of the next level; ``torch.distributed`` does not know a process
            group.
        RuntimeError: without groups, the hook is used over a second process group.

    Example:
        >>> def train(rank):
        ...     model = nn.Linear(1024, 1, bias=False)
        ...     hook = hooks.hierarchical(codecs.blockwise(), levels=[2])  # 2 nodes of 2 ranks
        ...     attach(model, hook)
        ...     model(torch.ones(1, 1024)).sum().backward()
        ...     return hook.sizes
        >>> run_ranks(train, 4)[0]
        (2, 2)
    """

    def __init__(
        self,
        codec: Codec,
        *,
        intra_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
        inter_group: dist.ProcessGroup | None = None,
        levels: str | Sequence[str | int] = AUTO,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(codec, Codec):
            raise TypeError(f"hierarchical: codec must be a Codec, got {no_codec(codec)}")
        check_type("hierarchical: seed", seed, "an int", int)
        self.codec = codec
        self.traits = traits_of_codec(codec)
        self.seed = seed
        self.sizes: tuple[int, ...] | None = None
        #: None if groups were given.
        self.levels: tuple[str | int, ...] | None = None
        #: Does the work if there is one node only, or no node of several ranks.
        self._plain: Hook | None = None
        self._over: dist.ProcessGroup | None = None
        self.intra_groups: list[dist.ProcessGroup] = []
        self.inter_group: dist.ProcessGroup | None = None
        if intra_group is None and inter_group is None:
            self.levels = _checked_levels(levels)
        else:
            self._take_groups(intra_group, inter_group, levels)
        self._node_plan = f"node's share of {self} {id(codec)}"
        self._segment_plan = f"segment of {self} {id(codec)}"

    def _take_groups(self, intra_group: Any, inter_group: Any, levels: object) -> None:
        if levels != AUTO:
            raise ValueError(
                "hierarchical: levels must be left out where groups are given, got "
                f"{levels!r} beside groups"
            )
        given = list(intra_group) if isinstance(intra_group, (list, tuple)) else [intra_group]
        named = [("intra_group", group) for group in given] or [("intra_group", None)]
        for name, group in (*named, ("inter_group", inter_group)):
            if group is None:
                raise TypeError(f"hierarchical: {name} must be a ProcessGroup, got None")
        self.intra_groups = [resolve_group(group) for group in given]
        self.inter_group = resolve_group(inter_group)
        self.sizes = tuple(group.size() for group in (*self.intra_groups, self.inter_group))
        self._check_groups()

    def _check_groups(self) -> None:
        """Refuse groups that share other ranks than this one, if their ranks are known."""
        assert self.inter_group is not None
        for number, group in enumerate(self.intra_groups):
            for other in (*self.intra_groups[:number], self.inter_group):
                nodes, places = group_ranks(group), group_ranks(other)
                if nodes is None or places is None:
                    continue
                both = sorted(set(nodes) & set(places))
                if len(both) > 1:
                    raise ValueError(
                        "hierarchical: intra_group and inter_group must share this rank only, got "
                        f"ranks {nodes} and {places}, which share {both}"
                    )

    @property
    def intra_group(self) -> dist.ProcessGroup | None:
        """The ranks of the innermost node; None before it is found, or without one."""
        return self.intra_groups[0] if self.intra_groups else None

    def check_ranks(self, group: dist.ProcessGroup) -> None:
        self._find_groups(group)
        if self._plain is not None:
            self._plain.check_ranks(group)
        elif self.levels is None and len(self.intra_groups) == 1:
            self._check_rows(group)

    def _check_rows(self, group: dist.ProcessGroup) -> None:
        """Refuse groups that are not rows and columns of the model's ranks."""
        assert self.inter_group is not None
        own = [group_ranks(self.intra_groups[0]), group_ranks(self.inter_group)]
        every = gather(group, own)
        of_model = group_ranks(group)
        if every is None or of_model is None or any(None in groups for groups in every):
            return
        groups_of = dict(zip(of_model, every, strict=True))
        for rank, (node, places) in groups_of.items():
            others = sorted({*node, *places} - set(of_model))
            if others:
                raise ValueError(
                    f"hierarchical: its groups must have ranks of the model only, {of_model}, "
                    f"got {others} too on rank {rank}"
                )
            for other in places:
                place = groups_of[other][0].index(other)
                if place != node.index(rank):
                    raise ValueError(
                        "hierarchical: inter_group must have the ranks of one position in their "
                        f"nodes, got {places}, where rank {rank} has position {node.index(rank)} "
                        "of "
                        f"{node} and rank {other} position {place} of {groups_of[other][0]}"
                    )

    # ---- the hook's own groups -------------------------------------------------------------------

    def _find_groups(self, group: dist.ProcessGroup) -> None:
        if self.levels is None:
            return
        if self._over is not None and not is_destroyed(self._over):
            if self._over is not group:
                raise RuntimeError(
                    f"{self}: its groups are over other ranks, or another process group, than this "
                    "model's; make one hook for each process group"
                )
            return
        known, rank = known_group(group), group_rank(group)
        nesting = self._nesting(known)
        self._warn_of_uneven(nesting, rank)
        *inner, units = nesting.sizes
        self.intra_groups, self.inter_group, self._plain = [], None, None
        if units == 1:
            self._plain = allreduce()
        elif not inner:
            self._plain = compressed(self.codec, seed=self.seed)
        else:
            # All ranks make them in this order.
            self.intra_groups = [group_over(known, ranks) for ranks in nesting.inner[rank]]
            self.inter_group = group_over(known, nesting.outer[rank])
        self.sizes = nesting.sizes
        self._over = group

    def use_within(self, group: dist.ProcessGroup) -> None:
        """Take another group over the same ranks for the model's; the hook's own groups stay."""
        if self._over is not None:
            self._over = group

    def _nesting(self, group: dist.ProcessGroup) -> Nesting:
        assert self.levels is not None
        labels = [
            label_of_host() if level == HOST else level.partition("=")[2]
            for level in self.levels
            if isinstance(level, str)
        ]
        numbers = iter(numbered_labels(group, labels) if labels else ())
        levels = [level if isinstance(level, int) else next(numbers) for level in self.levels]
        return nest(levels, group.size())

    def _warn_of_uneven(self, nesting: Nesting, rank: int) -> None:
        assert self.levels is not None
        for number, counts in nesting.uneven if rank == 0 else ():
            size = math.gcd(*counts)
            warnings.warn(
                f"{self}: levels[{number}] has units of {', '.join(map(str, counts))} parts; it "
                f"sums exactly among {size} of them at a time, which divides all these numbers",
                stacklevel=2,
            )

    @property
    def lets_stages_wait(self) -> bool:
        """Whether the hook that does the work waits for no result in :meth:`Hook.average`."""
        return self._plain is not None and self._plain.lets_stages_wait

    def _given_groups(self) -> list[dist.ProcessGroup]:
        return [] if self.inter_group is None else [*self.intra_groups, self.inter_group]

    def has_own_groups(self) -> bool:
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        if self._over is not None:
            memo[id(self._over)] = self._over
        return super().__deepcopy__(memo)

    def __reduce__(self) -> Any:
        if self.levels is None:
            raise TypeError(
                f"{self}: cannot be pickled, since its process groups belong to this process; make "
                "the hook in the process that uses it"
            )
        return partial(hierarchical, levels=self.levels, seed=self.seed), (self.codec,)

    # ---- averages --------------------------------------------------------------------------------

    def prepare(self, memory: BucketMemory) -> None:
        if self._plain is not None:
            self._plain.prepare(memory)
            return
        if self.inter_group is None:
            raise RuntimeError(
                f"{self}: the hook has no groups yet; it makes them when it is attached, or called "
                "with a bucket"
            )
        place = place_in_node(self.intra_groups)
        nodes, ranks = self.inter_group.size(), place["ranks"]
        if nodes * ranks != memory.world_size:
            raise ValueError(
                f"hierarchical: its groups must have all {memory.world_size} ranks that it "
                f"averages over, got {nodes} nodes of {ranks} ranks"
            )
        if memory.with_error and self.codec.takes_error:
            memory.flat("error")
            share = share_range(memory.numel, **place)
            of_node = memory.segment("node_error", *share, factor=1)
            segment = inter_segment_range(
                self.codec,
                memory.numel,
                intra_groups=self.intra_groups,
                inter_group=self.inter_group,
            )
            of_segment = memory.segment("node_shard_error", *segment, factor=memory.world_size)
            memory.plans[self._node_plan] = of_node
            memory.plans[self._segment_plan] = of_segment
        rounding_of(self.codec, self.seed, memory)

    def segments(self, memory: BucketMemory) -> list[str]:
        if self._plain is not None:
            return self._plain.segments(memory)
        found = (memory.plans.get(plan) for plan in (self._node_plan, self._segment_plan))
        return [name for name in found if name is not None]

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if self._plain is not None:
            return self._plain.average(bucket)
        check_dense(self, bucket)
        memory = self.memory(bucket)
        assert self.inter_group is not None
        return hierarchical_all_reduce(
            bucket.sources(),
            self.codec,
            intra_group=[memory.private_group(group) for group in self.intra_groups],
            inter_group=memory.private_group(self.inter_group),
            scale=1.0 / (place_in_node(self.intra_groups)["ranks"] * self.inter_group.size()),
            out=result_tensor(bucket, memory),
            carry=memory.tensors.get("error"),
            error=memory.tensors.get(memory.plans.get(self._node_plan, "")),
            sum_error=memory.tensors.get(memory.plans.get(self._segment_plan, "")),
            error_decay=memory.error_decay,
            rounding=rounding_of(self.codec, self.seed, memory),
            buffers=memory.buffers,
            meter=memory.meter,
        )

    def __repr__(self) -> str:
        if self.levels is None:
            assert self.sizes is not None
            *inner, nodes = self.sizes
            ranks = " x ".join(map(str, inner))
            return f"hierarchical({self.codec}, {nodes} nodes of {ranks} ranks)"
        # Without the values, since ranks compare the hooks that they attach.
        levels = [
            level.partition("=")[0] if isinstance(level, str) else level for level in self.levels
        ]
        return f"hierarchical({self.codec}, levels={levels})"


def _checked_levels(levels: object) -> tuple[str | int, ...]:
    if levels == AUTO:
        return (HOST,)
    if not isinstance(levels, (list, tuple)):
        raise TypeError(
            "hierarchical: levels must be 'auto' or a list such as ['host', 'rack=7'], got "
            f"{levels!r}"
        )
    if not levels:
        raise ValueError("hierarchical: levels must have an entry for each level, got none")
    for level in levels:
        if not isinstance(level, (str, int)) or isinstance(level, bool):
            got = type(level).__qualname__
            raise TypeError(f"hierarchical: levels must hold texts and numbers, got {got}")
        is_one = level >= 1 if isinstance(level, int) else level == HOST or _is_named(level)
        if not is_one:
            raise ValueError(
                "hierarchical: a level must be 'host', a text such as 'rack=7' or a number from 1, "
                f"got {level!r}"
            )
    return tuple(levels)


def _is_named(level: str) -> bool:
    name, _, value = level.partition("=")
    return name.isidentifier() and name != HOST and bool(value)
