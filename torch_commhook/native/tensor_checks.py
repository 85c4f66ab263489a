"""Checks of the arguments of operators that are written in Python.

PyTorch lets anyone call them, and they read tensors' memory without further checks.
In C++: ``csrc/ops/memory_check.h``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FLAGS = (torch.uint8, torch.bool, torch.int32, torch.int64)


def check_dense(op: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Refuse a tensor that is not dense, has another dtype, or lacks memory.

    Raises:
        TypeError: it has another layout or dtype, such as a quantized one.
        ValueError: its storage is smaller than its sizes need.
    """
    if tensor.layout is not torch.strided:
        raise TypeError(f"{op}: {name} must be dense (torch.strided), got layout {tensor.layout}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{op}: {name} must be of dtype {allowed}, got {tensor.dtype}")
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        span = tensor.numel()
    else:
        span = span_of(tensor)
    wanted = (tensor.storage_offset() + span) * tensor.element_size()
    there = tensor.untyped_storage().nbytes()
    if there < wanted:
        raise ValueError(
            f"{op}: {name} must have a storage of {wanted} bytes or more, got one of {there}"
        )


def check_flat(
    op: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], numel: int | None = None
) -> None:
    """Refuse a tensor that is not flat and contiguous; otherwise as :func:`check_dense`.

    Raises:
        TypeError, ValueError: as :func:`check_dense`; or it has other sizes.
    """
    check_dense(op, name, tensor, dtypes)
    if tensor.dim() != 1 or not tensor.is_contiguous() or numel not in (None, tensor.numel()):
        contract = "" if numel is None else f" and hold {numel} elements"
        raise ValueError(
            f"{op}: {name} must be flat and contiguous{contract}, got sizes {list(tensor.shape)} "
            f"with strides {list(tensor.stride())}"
        )


def span_of(tensor: Tensor) -> int:
    """The number of elements from a tensor's first to its last in memory, both included."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def check_used(op: str, used: Tensor, numbers: Sequence[int], name: str) -> list[int]:
    """The values of ``used``, a number for each parameter.

    Args:
        op: the operator's name in errors.
        used: for each parameter, whether any rank has used it.
        numbers: the numbers of parameters that are looked up.
        name: the name of ``numbers`` in errors.

    Raises:
        TypeError, ValueError: it has no value for one of the numbers.
    """
    check_flat(op, "used", used, _FLAGS)
    for number in numbers:
        if not 0 <= number < len(used):
            raise ValueError(
                f"{op}: {name} must be numbers from 0 to {len(used) - 1}, those of used, got "
                f"{number}"
            )
    found: list[int] = used.tolist()
    return found
