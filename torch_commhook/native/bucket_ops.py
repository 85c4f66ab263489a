"""Fakes and typed functions of ``torch.ops.commhook``.

The schemas stand in ``csrc/ops/library.cpp``, the kernels in ``csrc/ops`` and ``cuda``, the
derivatives in ``csrc/ops/bucket/bucket_autograd.cpp``. Each operator has here, one below the other:
its typed function with the documentation and its fake kernel, which checks what can be checked
without data.
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

#: Those that gradients may have; the operators on buckets take no complex ones.
GRADIENT_DTYPES = (*BUCKET_DTYPES, torch.complex64, torch.complex128)


class FlattenStats(NamedTuple):
    """What :func:`flatten_stats` returns."""

    buffer: Tensor
    sum_of_squares: Tensor
    nonfinite_count: Tensor


def cpu_capability(limit: str | None = None) -> str:
    """The instruction set of the CPU kernels: ``reference``, ``default``, ``avx2`` or ``avx512``.

    ``reference`` is plain ATen. With ``limit``, the kernels of this process use at most that from
    here on, which is meant for tests and measurements; the environment variable
    ``COMMHOOK_CPU_CAPABILITY`` does the same at the start.

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
                    f"{op}: dtype must be given where the tensors differ in "  # type: ignore[misc]
                    f"theirs, got none for tensors[0] of {dtype} and tensors[{i}] "
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
    """Concatenate tensors into one flat buffer, scaled and then cast, in one pass over memory.

    Elements come in logical (row-major) order, whatever the strides. They are multiplied by
    ``scale`` in float32, or in float64 where a tensor or the buffer is float64, and then rounded to
    the buffer's dtype (to nearest, ties to even). Where ``scale`` is 1 and the dtype stays, bits
    are copied as they are.

    Args:
        tensors: any number of dense tensors of any shape on one device, of dtype float64, float32,
            float16 or bfloat16, contiguous or not.
        scale: factor, a plain number.
        dtype: of the buffer; by default that of the tensors, which must then agree.
        out: a contiguous buffer to write, of any shape, with as many elements as the tensors and no
            memory shared with them; its dtype decides.

    Returns:
        A buffer of shape ``(total number of elements,)``, or ``out``. Differentiable without
        ``out``.

    Raises:
        TypeError: a tensor is sparse or of another dtype, or dtypes differ and none is given.
        ValueError: no tensors, several devices, or ``out`` does not fit or shares memory.
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


# Inductor (seen in 2.13) takes what an out= operator returns for new memory, and gives the memory
# of `out` to others while the result is still read. So compilers get the functional form, which
# they write back themselves.
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
    """:func:`flatten`, with the buffer's square sum and its count of non-finite values.

    Both come from the same pass over memory. On the CPU they do not depend on the number of
    threads.

    Returns:
        ``buffer``; ``sum_of_squares``, float64, 0-dimensional: of the scaled values before the
        cast, added up in float64; ``nonfinite_count``, int64, 0-dimensional: infinities and NaNs in
        the buffer, those that the cast made by overflow included.

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
    """New tensors with the contents of a flat buffer: the inverse of :func:`flatten`.

    Args:
        buffer: contiguous, of any shape, with as many elements as ``like`` in total.
        like: dense tensors whose shapes, strides and dtypes the result takes over, as
            ``torch.empty_like`` does. Their contents are not read.
        scale: factor, applied in float32 (float64 where a side is float64) before the cast.

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
        tensors: dense destinations, of any strides that reach each element once, sharing no memory
            with the buffer or each other.
        scale: factor, applied in float32 (float64 where a side is float64) before the cast.

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
