"""Averages that are exact inside a node and compressed between nodes."""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.codecs.base import Codec
from torch_commhook.collectives.agreement import gather
from torch_commhook.collectives.gloo_groups import group_ranks
from torch_commhook.collectives.group_place import group_rank
from torch_commhook.collectives.hierarchical import (
    hierarchical_all_reduce,
    inter_shard_range,
    share_range,
)
from torch_commhook.collectives.plain import resolve_group
from torch_commhook.hooks.base import Hook, result_tensor
from torch_commhook.hooks.compressed import check_dense, rounding_of, traits_of_codec
from torch_commhook.memory.bucket_memory import BucketMemory


class hierarchical(Hook):  # noqa: N801 (a hook is written as it is called)
    """Average gradients exactly inside a node, and through a codec between nodes.

    See :func:`torch_commhook.collectives.hierarchical_all_reduce`. With error feedback each rank
    remembers what its share of the node's sum has lost: ``1 / ranks of the node`` of the elements.

    Args:
        codec: what becomes of a node's gradients on the wire.
        intra_group: the ranks of this node; equally many on all nodes.
        inter_group: the ranks that have this rank's place in their nodes, one of each.
        seed: of random numbers; see :class:`compressed`.

    Raises:
        TypeError: no codec, or no process groups.
        ValueError: this rank is in none of a group, or the groups have another rank in common. When
            it is attached: they do not take in all ranks of the model and no others, or ranks of an
            ``inter_group`` have other places in their nodes.
    """

    _commhook_traceable = True

    def __init__(
        self,
        codec: Codec,
        *,
        intra_group: dist.ProcessGroup,
        inter_group: dist.ProcessGroup,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(codec, Codec):
            raise TypeError(
                f"hierarchical: codec must be a Codec, got {type(codec).__qualname__}; see "
                "torch_commhook.codecs"
            )
        self.codec = codec
        self.traits = traits_of_codec(codec)
        self.seed = seed
        for name, group in (("intra_group", intra_group), ("inter_group", inter_group)):
            if group is None:
                raise TypeError(f"hierarchical: {name} must be a ProcessGroup, got None")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"hierarchical: seed must be an int, got {type(seed).__qualname__}")
        self.intra_group = resolve_group(intra_group)
        self.inter_group = resolve_group(inter_group)
        self._check_groups()
        self._node_plan = f"node's share of {self} {id(codec)}"
        self._shard_plan = f"shard of {self} {id(codec)}"

    def _check_groups(self) -> None:
        """Refuse groups with more than this rank in common, where it is known who is in them."""
        nodes, places = group_ranks(self.intra_group), group_ranks(self.inter_group)
        if nodes is None or places is None:
            return
        both = sorted(set(nodes) & set(places))
        if len(both) > 1:
            raise ValueError(
                "hierarchical: intra_group and inter_group must have this rank alone in common, "
                f"got ranks {nodes} and {places}, which share {both}"
            )

    def check_ranks(self, group: dist.ProcessGroup) -> None:
        every = gather(group, [group_ranks(self.intra_group), group_ranks(self.inter_group)])
        of_model = group_ranks(group)
        if every is None or of_model is None or any(None in groups for groups in every):
            return
        groups_of = dict(zip(of_model, every, strict=True))
        for rank, (node, places) in groups_of.items():
            others = sorted({*node, *places} - set(of_model))
            if others:
                raise ValueError(
                    f"hierarchical: its groups must take in ranks of the model alone, {of_model}, "
                    f"got {others} too on rank {rank}"
                )
            for other in places:
                place = groups_of[other][0].index(other)
                if place != node.index(rank):
                    raise ValueError(
                        "hierarchical: inter_group must have the ranks with one place in their "
                        f"nodes, got {places}, where rank {rank} has place {node.index(rank)} of "
                        f"{node} and rank {other} place {place} of {groups_of[other][0]}"
                    )

    def _given_groups(self) -> list[dist.ProcessGroup]:
        return [self.intra_group, self.inter_group]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self}: can't be pickled, since its process groups belong to this process; make one "
            "where it is used"
        )

    def prepare(self, memory: BucketMemory) -> None:
        nodes, ranks = self.inter_group.size(), self.intra_group.size()
        if nodes * ranks != memory.world_size:
            raise ValueError(
                f"hierarchical: its groups must take in all {memory.world_size} ranks that are "
                f"averaged over, got {nodes} nodes of {ranks} ranks"
            )
        if memory.with_error and self.codec.takes_error:
            groups = {"intra_group": self.intra_group, "inter_group": self.inter_group}
            ranks = self.intra_group.size()
            memory.flat("error")
            share = share_range(memory.numel, rank=group_rank(self.intra_group), ranks=ranks)
            of_node = memory.shard("node_error", *share, factor=1)
            shard = inter_shard_range(self.codec, memory.numel, **groups)
            of_shard = memory.shard("node_shard_error", *shard, factor=memory.world_size)
            memory.plans[self._node_plan] = of_node
            memory.plans[self._shard_plan] = of_shard
        rounding_of(self.codec, self.seed, memory)

    def shards(self, memory: BucketMemory) -> list[str]:
        found = (memory.plans.get(plan) for plan in (self._node_plan, self._shard_plan))
        return [name for name in found if name is not None]

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        check_dense(self, bucket)
        memory = self.memory(bucket)
        return hierarchical_all_reduce(
            bucket.sources(),
            self.codec,
            intra_group=memory.stand_in(self.intra_group),
            inter_group=memory.stand_in(self.inter_group),
            scale=1.0 / (self.intra_group.size() * self.inter_group.size()),
            out=result_tensor(bucket, memory),
            carry=memory.tensors.get("error"),
            error=memory.tensors.get(memory.plans.get(self._node_plan, "")),
            shard_error=memory.tensors.get(memory.plans.get(self._shard_plan, "")),
            error_decay=memory.error_decay,
            rounding=rounding_of(self.codec, self.seed, memory),
            buffers=memory.buffers,
            meter=memory.meter,
        )

    def __repr__(self) -> str:
        nodes, ranks = self.inter_group.size(), self.intra_group.size()
        return f"hierarchical({self.codec}, {nodes} nodes of {ranks} ranks)"
