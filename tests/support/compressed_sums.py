"""Compressed sums of a process group, called by the group's own methods."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.codecs import CODECS
from torch_commhook.process_group import CompressedProcessGroup

premul: Any = torch._C._distributed_c10d._make_nccl_premul_sum

int8 = CODECS["blockwise"]()


def options(make: Any, op: Any) -> Any:
    made = make()
    made.reduceOp = op
    return made


def group_of(*arguments: Any, **settings: Any) -> CompressedProcessGroup:
    return CompressedProcessGroup(dist.group.WORLD, *arguments, **{"min_numel": 0, **settings})


#: The group's sums, with the number of tensors that each gets in tests.
SUMS = {
    "allreduce": 1,
    "allreduce_coalesced": 2,
    "reduce_scatter_single": 1,
    "reduce_scatter": 1,
    "reduce_scatter_single_coalesced": 2,
}


def issue_sum(group: Any, name: str, op: Any, tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """The Work of a sum, and the tensors for its results."""
    ranks = group.size()
    if name == "allreduce":
        return group.allreduce(tensors, options(dist.AllreduceOptions, op)), tensors
    if name == "allreduce_coalesced":
        given = options(dist.AllreduceCoalescedOptions, op)
        return group.allreduce_coalesced(tensors, given), tensors
    outputs = [each.new_full((len(each) // ranks,), 7.0) for each in tensors]
    given = options(dist.ReduceScatterOptions, op)
    if name == "reduce_scatter_single":
        return group.reduce_scatter_single(outputs[0], tensors[0], given), outputs
    if name == "reduce_scatter":
        lists = [list(each.chunk(ranks)) for each in tensors]
        return group.reduce_scatter(outputs, lists, given), outputs
    return group.reduce_scatter_single_coalesced(outputs, tensors, given), outputs
