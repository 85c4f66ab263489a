"""The library's operators on buckets, and their checks, as typed functions with their fakes.

``torch.ops`` makes a TorchScript value of each tensor of a list. It releases these without the GIL,
and then takes the GIL for each tensor that only Python holds. The typed functions in
``torch_commhook/native/bucket_ops.py``, which buckets and reducers call, avoid this cost: they pass
lists of plain tensors to the dispatcher themselves (``csrc/runtime/bindings/bind_bucket.cpp``). For
subclasses, function modes and compilers they use ``torch.ops``. Dispatch modes belong to the
dispatcher, and see both kinds of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from torch_commhook.native.libraries import load_ops
from torch_commhook.native.runtime import _C

load_ops()
_ops = torch.ops.commhook

# ---- checks of the arguments of operators that are written in Python -----------------------------
#
# PyTorch lets anyone call them, and they read tensors' memory without further checks. In C++:
# ``csrc/ops/memory_check.h``.


_FLAGS = (torch.uint8, torch.bool, torch.int32, torch.int64)


def check_dense(op: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Refuse a tensor that is not dense, has another dtype, or lacks memory.

    Raises:
        TypeError: it has another layout or dtype, such as a quantized one.
        ValueError: its storage is smaller than its sizes need.
    """
    _check_strided(op, name, tensor)
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{op}: {name} must be of dtype {allowed}, got {tensor.dtype}")
    if tensor.numel() == 0:
        return
    wanted = (tensor.storage_offset() + span_of(tensor)) * tensor.element_size()
    there = tensor.untyped_storage().nbytes()
    if there < wanted:
        raise ValueError(
            f"{op}: {name} must have a storage of {wanted} bytes or more, got one of {there}"
        )


def _check_strided(op: str, name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise TypeError(f"{op}: {name} must be dense (torch.strided), got layout {tensor.layout}")


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
        used: for each parameter, whether any rank has used it.
        numbers: the numbers of parameters that are looked up; ``name`` is their name in errors.

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


# ---- fakes and typed functions of the operators that check hooks ---------------------------------

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
    kinds = [(each.dtype, each.layout, each.device) for each in (result, value)]
    if kinds[0] != kinds[1]:
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
    _check_strided("check_finite", "count", count)
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


# ---- fakes and typed functions of torch.ops.commhook ---------------------------------------------
#
# ``csrc/ops/library.cpp`` has the schemas, ``csrc/ops`` and ``cuda`` the kernels, and
# ``csrc/ops/bucket/bucket_autograd.cpp`` the derivatives. For each operator this section has its
# typed function with the documentation, followed by its fake kernel, which checks all that needs no
# data.


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


def _check_tensor(op: str, name: str, tensor: Tensor, beside: str, other: Tensor) -> None:
    _check_strided(op, name, tensor)
    if tensor.dtype not in BUCKET_DTYPES:
        raise TypeError(f"{op}: {name} must be of dtype {_DTYPE_NAMES}, got {tensor.dtype}")
    if tensor.device != other.device:
        raise ValueError(
            f"{op}: {name} must be on the device of {beside}, {other.device}, got {tensor.device}"
        )


def check_tensors(op: str, tensors: Sequence[Tensor]) -> int:
    """Refuse tensors that the operators on buckets do not support; returns their elements."""
    if not tensors:
        raise ValueError(f"{op}: tensors must hold at least one tensor, got none")
    for i, tensor in enumerate(tensors):
        _check_tensor(op, f"tensors[{i}]", tensor, "tensors[0]", tensors[0])
    return sum(tensor.numel() for tensor in tensors)


def _check_buffer(
    op: str, name: str, buffer: Tensor, others: str, tensors: Sequence[Tensor], like: str = ""
) -> None:
    """Refuse a buffer that has no place for each element of the tensors, or unsupported tensors."""
    _check_tensor(op, name, buffer, name, buffer)
    for i, tensor in enumerate(tensors):
        _check_tensor(op, f"{others}[{i}]", tensor, name, buffer)
    total = sum(tensor.numel() for tensor in tensors)
    torch._check_value(
        buffer.numel() == total,
        lambda: (
            f"{op}: {name} must hold {total} elements, as many as {like or others}, "
            f"got {buffer.numel()}"
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
    numel = check_tensors(op, tensors)
    if dtype is None:
        dtype = tensors[0].dtype
        for i, tensor in enumerate(tensors):
            if tensor.dtype != dtype:
                raise TypeError(
                    f"{op}: dtype must be given if the tensors have different dtypes, got none for "
                    f"tensors[0] of {dtype} and tensors[{i}] of {tensor.dtype}"
                )
    if dtype not in BUCKET_DTYPES:
        raise TypeError(f"{op}: dtype must be {_DTYPE_NAMES}, got {dtype}")
    return tensors[0].new_empty((numel,), dtype=dtype)


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
    _check_buffer("flatten", "out", out, "tensors", tensors, like="the tensors")
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
    squares, count = (buffer.new_empty((), dtype=each) for each in (torch.float64, torch.int64))
    return buffer, squares, count


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


@torch.library.register_fake("commhook::unflatten")
def _unflatten_fake(buffer: Tensor, like: Sequence[Tensor], *, scale: float = 1.0) -> list[Tensor]:
    _check_buffer("unflatten", "buffer", buffer, "like", like)
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
    _check_buffer("unflatten_into", "buffer", buffer, "tensors", tensors)
