"""Checks of untrusted values in a state. They raise only their own errors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_commhook import _C

#: Makes an error from a text.
Refuse = Callable[[str], ValueError]

_MOST_CHARACTERS_SHOWN = 80
_MOST_BITS_SHOWN = 128


def is_number(value: object, number: int) -> bool:
    """Whether a value is an int and equals a number; tensors and bools are not ints."""
    return type(value) is int and value == number


def shown(value: object) -> str:
    """A value's text in an error: plain values themselves, others by class. Never long."""
    if type(value) is int and value.bit_length() > _MOST_BITS_SHOWN:
        return f"an int of {value.bit_length()} bits"  # Python refuses to write the longest
    if value is None or type(value) in (bool, int, float, complex):
        return repr(value)
    if type(value) is str:
        if len(value) > _MOST_CHARACTERS_SHOWN:
            value = f"{value[:_MOST_CHARACTERS_SHOWN]}..."
        return repr(value)
    return _C.type_name(value)


def check_tensor(
    what: str,
    value: object,
    shape: torch.Size | None,
    dtype: torch.dtype | None,
    refuse: Refuse,
    *,
    is_finite: bool = True,
) -> Tensor:
    """Check a tensor of a state, and convert it.

    Args:
        what: its name in errors.
        value: the state's value.
        shape: the required shape; None for any.
        dtype: the dtype to convert to; None for its own.
        refuse: makes the error.
        is_finite: whether all its numbers must be finite.

    Returns:
        Its numbers in ``dtype``, without a copy if they have it already. With None, numbers of 8
        bits or less become float32.

    Raises:
        ValueError: it is of another kind or shape, or holds numbers that are not finite.
    """
    if not isinstance(value, Tensor):
        raise refuse(f"{what} must be a tensor, got {shown(value)}")
    is_complex = value.is_complex() if dtype is None else dtype.is_complex
    has_numbers = value.is_complex() if is_complex else value.is_floating_point()
    if value.layout is not torch.strided or value.is_meta or not has_numbers:
        kind = "complex" if is_complex else "floating-point"
        raise refuse(
            f"{what} must be a dense tensor of {kind} numbers, got one of {value.dtype} "
            f"and layout {value.layout} on device {value.device}"
        )
    if shape is not None and value.shape != shape:
        raise refuse(f"{what} must be of shape {list(shape)}, got {list(value.shape)}")
    dtype = dtype or (torch.float32 if value.dtype.itemsize == 1 else value.dtype)
    try:
        has_memory = _bytes_needed(value) <= value.untyped_storage().nbytes()
        numbers = _numbers(value, dtype) if has_memory else value
        fits = not has_memory or not is_finite or bool(numbers.isfinite().all())
    except Exception as error:  # tensors of odd dtypes and classes may raise anything
        got = f"{_C.type_name(value)} of {value.dtype}"
        raise refuse(f"{what} must be a tensor that can be read as {dtype}, got {got}") from error
    if not has_memory:
        raise refuse(f"{what} must have its numbers in memory, got a tensor without")
    if not fits:
        raise refuse(f"{what} must hold finite numbers only")
    return numbers


def _numbers(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.detach().to(dtype).resolve_conj().resolve_neg()


def _bytes_needed(tensor: Tensor) -> int:
    """The smallest storage that contains all elements of a strided tensor, in bytes."""
    if tensor.numel() == 0:
        return 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in sizes)
    return (last + 1) * tensor.element_size()
