"""Checks of a simulated collective's arguments, and their text in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook._C import type_name
from torch_commhook.process_group.simulated.data import Reduction, can_reduce


def tensors_of(
    operation: str, name: str, value: Any, *, count: int | None = None, sparse: bool = False
) -> list[Tensor]:
    """The tensors of an argument; a single tensor counts as a list of one.

    Raises:
        TypeError: a value is not a tensor, or a tensor is sparse.
        ValueError: there are more or fewer tensors.
    """
    tensors = [value] if isinstance(value, Tensor) else value
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{operation}: {name} must be a list of tensors, got {type_name(value)}")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{operation}: {name} must be tensors, got {type_name(tensor)}")
        if tensor.layout is not torch.strided and not (
            sparse and tensor.layout is torch.sparse_coo
        ):
            raise TypeError(
                f"{operation}: {name} must be dense (torch.strided), got layout {tensor.layout}"
            )
    if count is not None and len(tensors) != count:
        raise ValueError(f"{operation}: {name} must be {count} tensors, got {len(tensors)}")
    return list(tensors)


def only_list(value: Any) -> Any:
    """The inner list of a list of one list, which some collectives use; a plain list as it is."""
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (list, tuple)):
        return value[0]
    return value


def check_like(operation: str, name: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    """Raise ValueError if a tensor has another number of elements or dtype."""
    for tensor in tensors:
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise ValueError(
                f"{operation}: {name} must be of {like.numel()} elements of {like.dtype} each, "
                f"got {text_of([tensor])}"
            )


def check_times(
    operation: str, name: str, large: Sequence[Tensor], small: Sequence[Tensor], times: int
) -> None:
    """Raise ValueError unless one tensor has ``times`` as many elements as the other."""
    for whole, share in zip(large, small, strict=True):
        if whole.numel() != times * share.numel() or whole.dtype != share.dtype:
            raise ValueError(
                f"{operation}: {name} must be of {times} times {share.numel()} elements of "
                f"{share.dtype}, got {text_of([whole])}"
            )


def check_one_dtype(operation: str, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError if dtypes differ."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        names = sorted(map(dtype_name, dtypes))
        raise ValueError(f"{operation}: tensors must be of one dtype, got {', '.join(names)}")


def reduction_of(operation: str, opts: Any, tensors: Sequence[Tensor]) -> Reduction:
    """The reduction of options, or of an operation in their place.

    Raises:
        TypeError: neither is given.
        ValueError: the tensors' dtype or layout does not support it.
    """
    op = getattr(opts, "reduceOp", dist.ReduceOp.SUM if opts is None else opts)
    if not isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        raise TypeError(f"{operation}: op must be a ReduceOp, got {type_name(op)}")
    reduction = Reduction(op)
    for tensor in tensors:
        if not can_reduce(reduction.name, tensor.dtype):
            raise ValueError(
                f"{operation}: op must be one for tensors of {tensor.dtype}, got {reduction}"
            )
        if tensor.layout is torch.sparse_coo and reduction.name != "SUM":
            raise ValueError(f"{operation}: op must be sum for sparse tensors, got {reduction}")
    return reduction


def root_of(operation: str, opts: Any, size: int) -> int:
    """The root of options, or the number in their place."""
    root = getattr(opts, "rootRank", 0 if opts is None else opts)
    return peer_of(operation, "root", root, size)


def peer_of(operation: str, name: str, rank: Any, size: int) -> int:
    """Check a rank of the group, and return it.

    Raises:
        TypeError: it is not an int.
        ValueError: it is not a rank of the group.
    """
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"{operation}: {name} must be a rank, got {type_name(rank)}")
    if not 0 <= rank < size:
        raise ValueError(f"{operation}: {name} must be a rank below {size}, got {rank}")
    return rank


def split_sizes(operation: str, name: str, tensor: Tensor, splits: Any, ranks: int) -> list[int]:
    """The number of a tensor's rows for each rank; equal shares for None or an empty list.

    Raises:
        ValueError: they do not add up to the tensor's rows.
    """
    if not tensor.dim():
        raise ValueError(f"{operation}: {name} must have at least one dimension, got shape []")
    rows = tensor.shape[0]
    if not splits:
        if rows % ranks:
            raise ValueError(
                f"{operation}: {name} must have a multiple of {ranks} rows, or splits, got "
                f"{text_of([tensor])}"
            )
        return [rows // ranks] * ranks
    sizes = [int(size) for size in splits]
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(
            f"{operation}: {name}_splits must be {ranks} sizes that add up to {rows} rows, "
            f"got {sizes}"
        )
    return sizes


def signature(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The properties of tensors that must be the same on all ranks."""
    return tuple(
        (tensor.dtype, tensor.numel() if tensor.layout is torch.strided else tensor.shape)
        for tensor in tensors
    )


def text_of(tensors: Sequence[Tensor]) -> str:
    """A text such as ``float32 [4]``."""
    return ", ".join(
        f"{'' if tensor.layout is torch.strided else 'sparse '}{dtype_name(tensor.dtype)} "
        f"{list(tensor.shape)}"
        for tensor in tensors
    )


def dtype_name(dtype: torch.dtype) -> str:
    """A text such as ``float32``."""
    return str(dtype).removeprefix("torch.")
