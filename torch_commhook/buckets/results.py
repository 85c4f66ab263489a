"""What a hook gives for a bucket of the reducer, checked: the same in eager and while traced.

For DDP's reducer ``csrc/runtime/hooks/hook_result.cpp`` does this, in the same words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_commhook import _C
from torch_commhook.buckets.grad_bucket import GradBucket


def checked_result(value: object, bucket: GradBucket, dtype: torch.dtype, where: str) -> Tensor:
    """The tensor that a hook's Future holds.

    Args:
        value: a tensor, or a list or tuple of one, or an exception.
        bucket: the bucket that it is for.
        dtype: that it must have.
        where: names hook and bucket.

    Raises:
        TypeError: no tensor, or one of another dtype or layout.
        ValueError: another number of elements, another device, or several tensors.
        Exception: the exception that the value is.
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

    As ``unflatten_into`` scales: in float32, or in float64 where the result or the gradients are of
    that, so that nothing is rounded to 16 bits but the gradients.

    Args:
        result: of a hook.
        scale: what :meth:`Hook.step_scale` has given.
        dtype: of the gradients.
    """
    wide = torch.promote_types(torch.promote_types(result.dtype, dtype), torch.float32)
    if isinstance(scale, Tensor):
        double = wide in (torch.float64, torch.complex128)
        scale = scale.to(result.device, torch.float64 if double else torch.float32)
    scaled = result.to(wide) * scale
    # A sparse result becomes the gradient as it is.
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
