"""Fakes and typed functions of ``torch.ops.commhook``.

``csrc/ops/library.cpp`` has the schemas, ``csrc/ops`` and ``cuda`` the kernels, and
``csrc/ops/bucket/bucket_autograd.cpp`` the derivatives. For each operator this module has its typed
function with the documentation, followed by its fake kernel, which checks all that needs no data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_commhook.native.libraries import load_ops

load_ops()

from torch_commhook.native.runtime import _C  # noqa: E402  (which needs the operators)

_ops = torch.ops.commhook

#: The dtypes that a bucket's tensors and buffers may have.
BUCKET_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DTYPE_NAMES = "float64, float32, float16 or bfloat16"

#: The dtypes of gradients; the operators on buckets do not support complex ones.
GRADIENT_DTYPES = (*BUCKET_DTYPES, torch.complex64, torch.complex128)


class FlattenStats(NamedTuple):
    """The result of :func:`flatten_stats`."""

    buffer: Tensor
    sum_of_squares: Tensor
    nonfinite_count: Tensor


def cpu_capability(limit: str | None = None) -> str:
    """Return the instruction set of the CPU kernels.

    It is ``reference``, ``default``, ``avx2`` or ``avx512``. ``reference`` is plain ATen. With
    ``limit``, the kernels of this process use at most that instruction set from now on; this is for
    tests and measurements. The environment variable ``COMMHOOK_CPU_CAPABILITY`` sets the limit at
    the start.

    Raises:
        ValueError: ``limit`` is none of the four.
    """
    capability: str = _ops.cpu_capability(limit)
    return capability


# ---- checks that the fakes share -----------------------------------------------------------------


def _check_type(condition: bool, message: Callable[[], str]) -> None:
    if not condition:
        raise TypeError(message())


def _check_tensor(op: str, name: str, tensor: Tensor, beside: str, other: Tensor) -> None:
    _check_type(
        tensor.layout is torch.strided,
        lambda: f"{op}: {name} must be dense (torch.strided), got layout {tensor.layout}",
    )
    _check_type(
        tensor.dtype in BUCKET_DTYPES,
        lambda: f"{op}: {name} must be of dtype {_DTYPE_NAMES}, got {tensor.dtype}",
    )
    torch._check_value(
        tensor.device == other.device,
        lambda: (
            f"{op}: {name} must be on the device of {beside}, {other.device}, got {tensor.device}"
        ),
    )


def _total_numel(tensors: Sequence[Tensor]) -> int:
    total = 0
    for tensor in tensors:
        total = total + tensor.numel()
    return total


def _check_length(
    op: str, name: str, buffer: Tensor, others: str, tensors: Sequence[Tensor]
) -> None:
    total = _total_numel(tensors)
    torch._check_value(
        buffer.numel() == total,
        lambda: (
            f"{op}: {name} must hold {total} elements, as many as {others}, got {buffer.numel()}"
        ),
    )
    torch._check_value(
        buffer.is_contiguous(),
        lambda: (
            f"{op}: {name} must be contiguous, got sizes {list(buffer.shape)} "
            f"with strides {list(buffer.stride())}"
        ),
    )


def _empty_buffer(op: str, tensors: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    torch._check_value(
        len(tensors) > 0, lambda: f"{op}: tensors must hold at least one tensor, got none"
    )
    for i, tensor in enumerate(tensors):
        _check_tensor(op, f"tensors[{i}]", tensor, "tensors[0]", tensors[0])
    if dtype is None:
        dtype = tensors[0].dtype
        for i, tensor in enumerate(tensors):
            _check_type(
                tensor.dtype == dtype,
                lambda i=i, tensor=tensor: (
                    f"{op}: dtype must be given if the tensors have "  # type: ignore[misc]
                    f"different dtypes, got none for tensors[0] of {dtype} and tensors[{i}] "
                    f"of {tensor.dtype}"
                ),
            )
    _check_type(dtype in BUCKET_DTYPES, lambda: f"{op}: dtype must be {_DTYPE_NAMES}, got {dtype}")
    return tensors[0].new_empty((_total_numel(tensors),), dtype=dtype)


# ---- flatten -------------------------------------------------------------------------------------


def flatten(
    tensors: Sequence[Tensor],
    *,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Concatenate tensors into one flat buffer, scaled and cast in one pass over memory.

    Elements are in logical (row-major) order, whatever the strides. They are multiplied by
    ``scale`` in float32, or in float64 if a tensor or the buffer is float64, and then rounded to
    the buffer's dtype (to nearest, ties to even). If ``scale`` is 1 and the dtype stays, bits are
    copied unchanged.

    Args:
        tensors: any number of dense tensors of any shape on one device, of dtype float64, float32,
            float16 or bfloat16, contiguous or not.
        scale: the factor, a plain number.
        dtype: the buffer's dtype; by default the tensors' dtype, which must then be the same.
        out: a contiguous buffer of any shape, with as many elements as the tensors and no memory
            shared with them, or None. Its dtype is the buffer's. Written.

    Returns:
        A buffer of shape ``(total number of elements,)``, or ``out``. Differentiable without
        ``out``.

    Raises:
        TypeError: a tensor is sparse or of another dtype, or dtypes differ and ``dtype`` is None.
        ValueError: there are no tensors, several devices, or ``out`` does not fit or shares memory.
        RuntimeError: ``out`` with tensors that require grad, while gradients are recorded.

    Example:
        >>> codecs.flatten([torch.ones(2, 1), torch.zeros(1)], scale=0.5)
        tensor([0.5000, 0.5000, 0.0000])
    """
    if out is None:
        flat: Tensor = _ops.flatten(tensors, scale=scale, dtype=dtype)
        return flat
    if dtype is not None and dtype != out.dtype:
        raise TypeError(f"flatten: dtype must be that of out, {out.dtype}, or None, got {dtype}")
    if not torch.compiler.is_compiling() and _C.flatten_out(tensors, scale, out):
        return out
    written: Tensor = _ops.flatten.out(tensors, scale=scale, out=out)
    return written


@torch.library.register_fake("commhook::flatten")
def _flatten_fake(
    tensors: Sequence[Tensor], *, scale: float = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    return _empty_buffer("flatten", tensors, dtype)


@torch.library.register_fake("commhook::flatten.out")
def _flatten_out_fake(tensors: Sequence[Tensor], *, scale: float = 1.0, out: Tensor) -> Tensor:
    _check_tensor("flatten", "out", out, "out", out)
    for i, tensor in enumerate(tensors):
        _check_tensor("flatten", f"tensors[{i}]", tensor, "out", out)
    _check_length("flatten", "out", out, "the tensors", tensors)
    return out


# Inductor (seen in 2.13) treats the result of an out= operator as new memory, and reuses the memory
# of `out` while the result is still read. So compilers get the functional form, and write its
# result back themselves.
@_ops.flatten.out.py_functionalize_impl
def _flatten_out_functional(
    ctx: Any, tensors: Sequence[Tensor], *, scale: float = 1.0, out: Tensor
) -> Tensor:
    _flatten_out_fake(tensors, scale=scale, out=out)
    inputs = ctx.unwrap_tensors(tensors)
    with ctx.redispatch_to_next():
        ctx.replace(out, _ops.flatten(inputs, scale=scale, dtype=out.dtype).view(out.shape))
    ctx.commit_update(out)
    ctx.sync(out)
    return out


# ---- flatten_stats -------------------------------------------------------------------------------


def flatten_stats(
    tensors: Sequence[Tensor], *, scale: float = 1.0, dtype: torch.dtype | None = None
) -> FlattenStats:
    """As :func:`flatten`, with the buffer's sum of squares and its count of non-finite values.

    All come from the same pass over memory. On the CPU they do not depend on the number of threads.

    Returns:
        ``buffer``; ``sum_of_squares``, float64, 0-dimensional: of the scaled values before the
        cast, summed in float64; ``nonfinite_count``, int64, 0-dimensional: infinities and NaNs in
        the buffer, including overflows of the cast.

    Raises:
        TypeError, ValueError: as :func:`flatten`.
    """
    return FlattenStats(*_ops.flatten_stats(tensors, scale=scale, dtype=dtype))


@torch.library.register_fake("commhook::flatten_stats")
def _flatten_stats_fake(
    tensors: Sequence[Tensor], *, scale: float = 1.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    buffer = _empty_buffer("flatten_stats", tensors, dtype)
    return (
        buffer,
        buffer.new_empty((), dtype=torch.float64),
        buffer.new_empty((), dtype=torch.int64),
    )


# ---- unflatten -----------------------------------------------------------------------------------


def unflatten(buffer: Tensor, like: Sequence[Tensor], *, scale: float = 1.0) -> list[Tensor]:
    """Return new tensors with the contents of a flat buffer: the inverse of :func:`flatten`.

    Args:
        buffer: contiguous, of any shape, with as many elements as ``like`` in total.
        like: dense tensors that determine the result's shapes, strides and dtypes, as for
            ``torch.empty_like``. Their contents are not read.
        scale: the factor, applied in float32 (float64 if a side is float64) before the cast.

    Returns:
        One new tensor for each of ``like``. Differentiable with respect to ``buffer``.

    Raises:
        TypeError: a tensor is sparse or of a dtype that buckets do not have.
        ValueError: lengths or devices differ, or ``buffer`` is not contiguous.
    """
    tensors: list[Tensor] = _ops.unflatten(buffer, like, scale=scale)
    return tensors


def _check_unflatten(op: str, argument: str, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    _check_tensor(op, "buffer", buffer, "buffer", buffer)
    for i, tensor in enumerate(tensors):
        _check_tensor(op, f"{argument}[{i}]", tensor, "buffer", buffer)
    _check_length(op, "buffer", buffer, argument, tensors)


@torch.library.register_fake("commhook::unflatten")
def _unflatten_fake(buffer: Tensor, like: Sequence[Tensor], *, scale: float = 1.0) -> list[Tensor]:
    _check_unflatten("unflatten", "like", buffer, like)
    return [torch.empty_like(tensor) for tensor in like]


# ---- unflatten_into ------------------------------------------------------------------------------


def unflatten_into(buffer: Tensor, tensors: Sequence[Tensor], *, scale: float = 1.0) -> None:
    """Write a flat buffer's contents into existing tensors, in one pass over memory.

    Args:
        buffer: contiguous, of any shape, with as many elements as ``tensors`` in total.
        tensors: dense destinations with any strides that reach each element once. They share no
            memory with the buffer or each other. Written.
        scale: the factor, applied in float32 (float64 if a side is float64) before the cast.

    Raises:
        TypeError: a tensor is sparse or of a dtype that buckets do not have.
        ValueError: lengths or devices differ, ``buffer`` is not contiguous, or memory is shared.
        RuntimeError: a tensor requires grad while gradients are recorded.

    Example:
        >>> matrix, vector = torch.empty(2, 1), torch.empty(1)
        >>> codecs.unflatten_into(torch.tensor([1.0, 2.0, 3.0]), [matrix, vector])
        >>> matrix.tolist(), vector.tolist()
        ([[1.0], [2.0]], [3.0])
    """
    if torch.compiler.is_compiling() or not _C.unflatten_into(buffer, tensors, scale):
        _ops.unflatten_into(buffer, tensors, scale=scale)


@torch.library.register_fake("commhook::unflatten_into")
def _unflatten_into_fake(buffer: Tensor, tensors: Sequence[Tensor], *, scale: float = 1.0) -> None:
    _check_unflatten("unflatten_into", "tensors", buffer, tensors)
