"""Fakes and typed functions of the operators that check hooks; as ``bucket_ops.py``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from torch_commhook.native.libraries import load_ops

load_ops()

_ops = torch.ops.commhook

# ---- check_hook_result ---------------------------------------------------------------------------


def check_hook_result(result: Tensor, value: Tensor, hook: str) -> None:
    """Check that a hook's result can replace the hook's input.

    Reads no data. In compiled code it runs each time that the code runs, in the order of the calls;
    not inside a branch of ``torch.cond``. In a CUDA graph shapes are fixed, and only its capture
    checks them.

    Args:
        result: a tensor of any shape, dtype, layout and device.
        value: the hook's input, as ``result``.
        hook: the hook's name, for the message.

    Raises:
        RuntimeError: ``result`` has another dtype, layout, device or size. Sizes must be equal;
            nothing is broadcast.
    """
    _ops.check_hook_result(result, value, hook)


def type_change(was: Tensor, now: Tensor) -> str:
    """The end of the message for a hook that has changed dtype, layout or device."""
    return (
        f"has changed the type of value (was {was.dtype}, {was.layout}, {was.device}, "
        f"got {now.dtype}, {now.layout}, {now.device})"
    )


def size_change(was: Tensor, now: Tensor) -> str:
    """The end of the message for a hook that has changed the size."""
    return f"has changed the size of value (was {list(was.shape)}, got {list(now.shape)})"


@torch.library.register_fake("commhook::check_hook_result")
def _check_hook_result_fake(result: Tensor, value: Tensor, hook: str) -> None:
    same_type = (
        result.dtype == value.dtype
        and result.layout == value.layout
        and result.device == value.device
    )
    if not same_type:
        raise RuntimeError(f"hook '{hook}' {type_change(value, result)}")
    if result.dim() != value.dim() or any(
        map(_surely_differ, result.shape, value.shape)  # the kernel checks uncertain sizes
    ):
        raise RuntimeError(f"hook '{hook}' {size_change(value, result)}")


def _surely_differ(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two sizes differ, without a guard, which would recompile for other sizes."""
    if isinstance(one, int) and isinstance(other, int):
        return one != other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(one != other)


# Compilers remove an operator that returns nothing and writes nothing, unless it is known to have
# an effect.
_register_effectful_op("commhook::check_hook_result", _EffectType.ORDERED)


# ---- check_finite --------------------------------------------------------------------------------


def check_finite(tensors: Sequence[Tensor], count: Tensor) -> None:
    """Add the number of infinities and NaNs in tensors to a count, in one pass over memory.

    The host does not wait, so this can be part of a CUDA graph; read the count later.

    Args:
        tensors: any number of tensors of any shape, dense or sparse, on one device. A complex
            number counts once, a sparse tensor's values as stored, an integer never.
        count: dense, int64, of one element, on the device of the tensors. Written.

    Raises:
        TypeError: ``count`` is of another dtype or sparse, or a tensor neither dense nor sparse.
        ValueError: devices differ, or ``count`` holds another number of elements.
        RuntimeError: ``count`` was made in inference mode and is written outside of it.
    """
    _ops.check_finite(tensors, count)


@torch.library.register_fake("commhook::check_finite")
def _check_finite_fake(tensors: Sequence[Tensor], count: Tensor) -> None:
    if count.dtype is not torch.int64:
        raise TypeError(f"check_finite: count must be of dtype torch.int64, got {count.dtype}")
    if count.layout is not torch.strided:
        raise TypeError(
            f"check_finite: count must be dense (torch.strided), got layout {count.layout}"
        )
    torch._check_value(
        count.numel() == 1,
        lambda: f"check_finite: count must hold one element, got {count.numel()}",
    )
    for i, tensor in enumerate(tensors):
        if tensor.device != count.device:
            raise ValueError(
                f"check_finite: tensors[{i}] must be on the device of count, {count.device}, "
                f"got {tensor.device}"
            )
