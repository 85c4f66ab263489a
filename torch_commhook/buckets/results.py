"""Checks of a hook's result for a bucket of the reducer: the same in eager and traced code.

For DDP's reducer ``csrc/runtime/hooks/hook_result.cpp`` checks the same, with the same messages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_commhook import _C
from torch_commhook.buckets.grad_bucket import GradBucket


def checked_result(value: object, bucket: GradBucket, dtype: torch.dtype, where: str) -> Tensor:
    """The tensor of a hook's Future, checked.

    Args:
        value: a tensor, or a list or tuple of one, or an exception.
        bucket: the result's bucket.
        dtype: the required dtype.
        where: names hook and bucket in errors.

    Raises:
        TypeError: it is no tensor, or has another dtype or layout.
        ValueError: it has another number of elements or device, or there are several tensors.
        Exception: the value, if it is an exception.
    """
    result = _tensor_in(value, where)
    sparse = bucket.is_sparse()
    layout = torch.sparse_coo if sparse else torch.strided
    if result.layout != layout:
        raise TypeError(
            f"{where}: the result must have the bucket's layout, {layout}, got {result.layout}"
        )
    if result.dtype != dtype:
        raise TypeError(f"{where}: the result must have dtype {dtype}, got {result.dtype}")
    if result.device != bucket.device():
        raise ValueError(f"{where}: the result must be on {bucket.device()}, got {result.device}")
    if sparse:
        shape = bucket.first_parameter().shape
        if result.shape != shape:
            raise ValueError(
                f"{where}: the result must have shape {list(shape)}, got shape {list(result.shape)}"
            )
        return result
    if result.numel() != bucket.numel():
        got = f"{result.numel()} elements" if result.dim() == 1 else f"shape {list(result.shape)}"
        raise ValueError(
            f"{where}: the result must have {bucket.numel()} elements, one for each of the "
            f"bucket's, got {got}"
        )
    return result.reshape(-1)


def scaled_result(result: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """A result times a step's factor, for gradients of a dtype.

    Scales as ``unflatten_into``: in float32, or in float64 if the result or the gradients are
    float64. So only the gradients are rounded to 16 bits.

    Args:
        result: a hook's result.
        scale: the factor from :meth:`Hook.step_scale`.
        dtype: the gradients' dtype.
    """
    wide = torch.promote_types(torch.promote_types(result.dtype, dtype), torch.float32)
    if isinstance(scale, Tensor):
        double = wide in (torch.float64, torch.complex128)
        scale = scale.to(result.device, torch.float64 if double else torch.float32)
    scaled = result.to(wide) * scale
    # A sparse result becomes the gradient itself.
    return scaled if result.layout is torch.strided else scaled.to(dtype)


def _tensor_in(value: object, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, BaseException):
        raise value
    expected = f"{where}: the result must be a tensor, or a list or tuple of one tensor, got "
    if isinstance(value, (list, tuple)):
        name = _C.type_name(value)
        if len(value) != 1:
            raise ValueError(f"{expected}a {name} of {len(value)}")
        if not isinstance(value[0], Tensor):
            raise TypeError(f"{expected}a {name} of {_C.type_name(value[0])}")
        return value[0]
    hint = ""
    if isinstance(value, torch._C.Future):
        hint = "; a callback must return the tensor, not another Future"
    raise TypeError(f"{expected}{_C.type_name(value)}{hint}")
