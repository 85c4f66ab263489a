"""Checks of the arguments of collectives on uncompressed tensors."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor


def check_tensor(op: str, tensor: object, *, sparse: bool = False, rows: bool = False) -> None:
    """Refuse tensors of which a backend would silently send the wrong memory.

    Args:
        op: the collective's name in errors.
        tensor: the tensor to send.
        sparse: whether sparse_coo is supported.
        rows: whether it must have a first dimension, along which it is split.

    Raises:
        TypeError: it is not a tensor, or has a layout that cannot be sent.
        ValueError: it has no memory, is not contiguous, or is a lazy conjugate or negative.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: tensor must be a torch.Tensor, got {type(tensor).__qualname__}")
    if sparse and tensor.layout is torch.sparse_coo:
        return
    if tensor.layout is not torch.strided:
        raise TypeError(f"{op}: tensor must be dense (torch.strided), got layout {tensor.layout}")
    if tensor.is_meta:
        raise ValueError(f"{op}: tensor must have memory, got one on the meta device")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op}: tensor must be contiguous, got sizes {list(tensor.shape)} with strides "
            f"{list(tensor.stride())}; pass tensor.contiguous()"
        )
    if rows and not tensor.dim():
        raise ValueError(f"{op}: tensor must have at least one dimension, got shape []")
    if torch.compiler.is_compiling():
        return
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < needed:
        raise ValueError(f"{op}: tensor must have memory, got one whose storage has been freed")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{op}: tensor must be resolved, got a lazy conjugate or negative; pass "
            "tensor.resolve_conj().resolve_neg()"
        )


def check_timeout(op: str, timeout: object) -> None:
    """Raise a TypeError unless a timeout is a timedelta or None."""
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(
            f"{op}: timeout must be a timedelta or None, got {type(timeout).__qualname__}"
        )


def equal_shares(op: str, tensor: Tensor, world_size: int, hint: str = "") -> list[int]:
    """Equal numbers of rows for all ranks.

    Raises:
        ValueError: the number of rows is not a multiple of the number of ranks.
    """
    if tensor.shape[0] % world_size:
        raise ValueError(
            f"{op}: tensor must have a multiple of {world_size} rows, equal shares for the ranks, "
            f"{hint}got shape {list(tensor.shape)}"
        )
    return [tensor.shape[0] // world_size] * world_size


def checked_sizes(name: str, given: Sequence[int], world_size: int) -> list[int]:
    """Numbers of rows for each rank, checked.

    Raises:
        TypeError: they are no list of ints.
        ValueError: there is not one for each rank, or one is negative.
    """
    if not isinstance(given, Sequence) or any(not isinstance(size, int) for size in given):
        raise TypeError(f"all_to_all: {name} must be a list of ints, got {given!r}")
    sizes = list(given)
    if len(sizes) != world_size or any(size < 0 for size in sizes):
        raise ValueError(
            f"all_to_all: {name} must be {world_size} numbers of rows, one for each rank, "
            f"got {sizes}"
        )
    return sizes


def result_tensor(op: str, tensor: Tensor, shape: Sequence[int], out: Tensor | None) -> Tensor:
    """A tensor of this shape, with the dtype and device of ``tensor``: ``out`` if given.

    Raises:
        TypeError: ``out`` is not a tensor, or of another dtype.
        ValueError: it has another shape or device, or is not contiguous.
    """
    if out is None:
        return tensor.new_empty(shape)
    if not isinstance(out, Tensor):
        raise TypeError(f"{op}: out must be a torch.Tensor, got {type(out).__qualname__}")
    if out.dtype != tensor.dtype:
        raise TypeError(f"{op}: out must have dtype {tensor.dtype}, got {out.dtype}")
    if out.shape != torch.Size(shape) or not out.is_contiguous() or out.device != tensor.device:
        raise ValueError(
            f"{op}: out must be contiguous, of shape {list(shape)} on {tensor.device}, got shape "
            f"{list(out.shape)} with strides {list(out.stride())} on {out.device}"
        )
    return out
