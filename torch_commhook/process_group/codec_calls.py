"""The arguments of a process group's sums and all-gathers, for groups that compress them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from torch_commhook import _C
from torch_commhook.codecs.base import Codec
from torch_commhook.collectives.futures import then
from torch_commhook.metrics import tensor_bytes
from torch_commhook.process_group.operations import ALL_GATHERS, REDUCE_SCATTERS, mapped

#: Reductions that may be compressed, with the class of their options.
SUMS: dict[str, Any] = {
    "allreduce": dist.AllreduceOptions,
    "allreduce_coalesced": dist.AllreduceCoalescedOptions,
    **dict.fromkeys(REDUCE_SCATTERS, dist.ReduceScatterOptions),
}
#: The same for all-gathers.
GATHERS: dict[str, Any] = dict.fromkeys(ALL_GATHERS, AllgatherOptions)


def options_of(operation: str, arguments: Sequence[Any]) -> Any:
    """The options of a call; None if its arguments do not have PyTorch's usual form."""
    make_options = SUMS.get(operation) or GATHERS[operation]
    tensors = 1 if operation.startswith("allreduce") else 2
    if len(arguments) == tensors:
        return make_options()
    fits = len(arguments) == tensors + 1 and isinstance(arguments[tensors], make_options)
    return arguments[tensors] if fits else None


def timeout_of(options: Any) -> timedelta | None:
    """The timeout of a call; None for the group's."""
    timeout: timedelta = options.timeout
    return None if timeout == type(options)().timeout else timeout


def is_large(tensors: Any, at_least: int, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether these are dense, contiguous tensors of one device with enough elements in total."""
    if not isinstance(tensors, (list, tuple)) or not tensors:
        return False
    for tensor in tensors:
        if (
            not isinstance(tensor, Tensor)
            or tensor.layout is not torch.strided
            or tensor.dtype not in dtypes
            or not tensor.is_contiguous()
            or tensor.device != tensors[0].device
        ):
            return False
    numel: int = sum(tensor.numel() for tensor in tensors)
    return numel >= at_least


def as_sum(options: Any) -> Any:
    """The same options for a sum."""
    changed = type(options)()
    for name in ("timeout", "asyncOp"):
        if hasattr(options, name):
            setattr(changed, name, getattr(options, name))
    changed.reduceOp = dist.ReduceOp.SUM
    return changed


def parts_of(
    many: Any, few: Sequence[Tensor], ranks: int, rank: int, *, in_lists: bool
) -> list[list[Tensor]] | None:
    """For each rank, its tensors among those of all ranks; None if they do not fit this rank's.

    Args:
        many: for each of ``few``, a tensor of all ranks' shares or a list of these.
        few: this rank's tensors.
        ranks: the number of ranks.
        rank: this rank.
        in_lists: whether ``many`` are lists.
    """
    if len(many) != len(few):
        return None
    if not in_lists:
        if any(each.numel() % ranks for each in many):
            return None
        many = [each.detach().view(ranks, each.numel() // ranks).unbind() for each in many]
    if any(len(some) != ranks for some in many):
        return None
    parts = [list(of_rank) for of_rank in zip(*many, strict=True)]
    fits = [each.numel() for each in parts[rank]] == [each.numel() for each in few]
    return parts if fits else None


def flattened(values: Any, *, in_lists: bool) -> list[Any]:
    """The tensors of lists, or of one list; none if they do not have this form."""
    lists = values if in_lists else [values]
    if not isinstance(lists, (list, tuple)):
        return []
    if not all(isinstance(some, (list, tuple)) for some in lists):
        return []
    return [each for some in lists for each in some]


class Reduction(NamedTuple):
    """A sum, with the factors of its terms and of the sum.

    Attributes:
        scale: the factor of the sum.
        premultiplier: the factor of this rank's terms: a number or a tensor of one element; None
            for 1.
    """

    scale: float
    premultiplier: Any


def reduction_of(op: Any, ranks: int) -> Reduction | None:
    """The sum that an operation computes; None if it computes none."""
    # Not by `in`, which would compare members of another type.
    if op == dist.ReduceOp.SUM:
        return Reduction(1.0, None)
    if op == dist.ReduceOp.AVG:
        return Reduction(1.0 / ranks, None)
    if op == dist.ReduceOp.PREMUL_SUM:
        _, factor = op.__getstate__()
        if not isinstance(factor, Tensor) or factor.numel() == 1:
            return Reduction(1.0, factor)
    return None


def times(tensor: Tensor, factor: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(factor, Tensor):
        factor = factor.detach().reshape(())
    return tensor.detach().to(dtype, copy=True).mul_(factor)


def without_premultiplier(operation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace a reduction of CPU tensors with a factor by a sum of multiplied terms.

    Gloo does not support ``PREMUL_SUM``, which FSDP's divide factor uses.

    Args:
        operation: one of ``SUMS``.
        arguments: the method's arguments. An all-reduce's tensors are multiplied in place.

    Returns:
        The arguments of the sum; any other call's unchanged arguments.
    """
    options = options_of(operation, arguments)
    reduction = None if options is None else reduction_of(options.reduceOp, 1)
    if reduction is None or reduction.premultiplier is None:
        return arguments
    factor = reduction.premultiplier
    *outputs, inputs = arguments[: 1 if operation.startswith("allreduce") else 2]
    terms = _listed(inputs)
    if not all(
        isinstance(each, Tensor)
        and each.layout is torch.strided
        and each.is_floating_point()
        and each.device.type == "cpu"
        for each in terms
    ):
        return arguments
    if not outputs:
        for each in terms:
            each.detach().copy_(times(each, factor, each.dtype))
        return inputs, as_sum(options)
    multiplied = mapped(inputs, lambda each: times(each, factor, each.dtype))
    return *outputs, multiplied, as_sum(options)


def _listed(values: Any) -> list[Any]:
    if isinstance(values, (list, tuple)):
        return [each for value in values for each in _listed(value)]
    return [values]


def all_reduce_bytes(codec: Codec, numel: int, ranks: int) -> float:
    """The number of bytes that each rank sends for a sum, on average."""
    if codec.exchange == "all_to_all":
        sizes = [shard.nbytes for shard in codec.shards(numel, ranks)]
        return (sum(sizes) / ranks + max(sizes)) * (ranks - 1)
    nbytes = codec.nbytes(numel)
    if codec.exchange == "all_gather":
        return nbytes * (ranks - 1)
    return 2 * nbytes * (ranks - 1) / ranks


def bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors)


def work_of(future: torch.futures.Future[Tensor], tensors: Sequence[Tensor]) -> Any:
    """A collective's Work, with a Future that holds a list of tensors."""
    value: Any = list(tensors)

    def finish(done: torch.futures.Future[Tensor]) -> Any:
        done.value()  # raises the collective's error
        return value

    return _C.as_work(then(future, finish, value[0].device))
