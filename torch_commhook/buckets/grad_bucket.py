"""Buckets of gradients: arguments of communication hooks, made of parameters, with results."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.buckets.layout import (
    BucketLayout,
    check_buffer,
    check_tensor,
    checked_list,
    gradient_dtype,
)
from torch_commhook.native import bucket_ops

if TYPE_CHECKING:
    from typing_extensions import Self


# ---- buckets of gradients, the arguments of communication hooks ----------------------------------


def hook_on_bucket(hook: str, index: int, count: int) -> str:
    """The text that names a hook and its bucket in errors."""
    # With dynamic shapes a compiler replaces numbers by variables, which have no text.
    return f"hook '{hook}' on bucket {operator.index(index)} of {operator.index(count)}"


class GradBucket:
    """A bucket of gradients: the argument of a communication hook.

    It has the methods of ``torch.distributed.GradBucket``. It can be made in Python, copied and
    pickled, and checks its arguments.

    Args:
        parameters: the parameters of the bucket's gradients.
        gradients: one for each parameter, with its shape, or None for zeros. They are copied into
            the buffer.
        buffer: flat and contiguous; the bucket shares its memory. Written if ``gradients`` are
            given. Without it, the bucket makes one of the gradients' dtype. A sparse tensor makes a
            sparse bucket, which holds one parameter.
        index: the bucket's number, from 0.
        bucket_count: the number of buckets.
        sparse_grad_indices: for a sparse bucket with indices that are known in advance.
        process_group: the ranks to average over; None for the default group.

    Raises:
        ValueError: neither ``gradients`` nor ``buffer`` is given; lengths, shapes or devices do not
            fit; or ``index`` is not below ``bucket_count``.
        TypeError: an argument is not a tensor, or of a dtype other than float64, float32, float16,
            bfloat16 and complex ones; or sparse gradients are mixed with others.

    Example:
        >>> bucket = GradBucket([torch.zeros(2, 3)], gradients=[torch.ones(2, 3)])
        >>> bucket.buffer()
        tensor([1., 1., 1., 1., 1., 1.])
        >>> bucket.gradients()[0].shape
        torch.Size([2, 3])
        >>> bucket.flatten(scale=0.5, dtype=torch.bfloat16)[:2]
        tensor([0.5000, 0.5000], dtype=torch.bfloat16)
    """

    __slots__ = (
        "__weakref__",
        "_bucket_count",
        "_buffer",
        "_index",
        "_layout",
        "_parameters",
        "_process_group",
        "_sparse_grad_indices",
        "memory",
    )

    #: A hook's :class:`BucketMemory` of the bucket, or None.
    memory: Any

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None] | None = None,
        buffer: Tensor | None = None,
        index: int = 0,
        bucket_count: int = 1,
        sparse_grad_indices: Tensor | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        for name, value in (("index", index), ("bucket_count", bucket_count)):
            if not isinstance(value, int):
                raise TypeError(f"GradBucket: {name} must be an int, got {value!r}")
        if bucket_count < 1 or not 0 <= index < bucket_count:
            raise ValueError(
                "GradBucket: index must be from 0 to bucket_count - 1, got "
                f"index {index} with bucket_count {bucket_count}"
            )
        self._parameters: list[Tensor] = checked_list("GradBucket", "parameters", parameters)
        if not self._parameters:
            raise ValueError("GradBucket: parameters must hold at least one tensor, got none")
        for i, parameter in enumerate(self._parameters):
            _check_floating(f"parameters[{i}]", parameter)
        if sparse_grad_indices is not None:
            check_tensor("GradBucket", "sparse_grad_indices", sparse_grad_indices)
        self._index = index
        self._bucket_count = bucket_count
        self._sparse_grad_indices = sparse_grad_indices
        self._process_group = process_group
        self.memory = None
        self._layout: BucketLayout | None = None
        if gradients is None and buffer is None:
            raise ValueError("GradBucket: gradients or buffer must be given, got neither")
        if gradients is None:
            assert buffer is not None
            self._buffer = self._checked_buffer(buffer)
        else:
            gradients = checked_list("GradBucket", "gradients", gradients)
            self._buffer = self._buffer_of(gradients, buffer)

    # ---- the methods of PyTorch's GradBucket -----------------------------------------------------

    def index(self) -> int:
        """Return the bucket's number. DDP runs hooks in this order; bucket 0 has the last layer."""
        return self._index

    def buffer(self) -> Tensor:
        """Return all gradients, of shape ``(elements,)``; in a sparse bucket the gradient."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients as views of the buffer, with their parameters' shapes and strides.

        For a sparse bucket, return the sparse gradient itself.
        """
        return self.pieces(self.buffer())

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of the gradients."""
        return list(self._parameters)

    def first_parameter(self) -> Tensor:
        """Return the first parameter, which identifies a bucket."""
        return self._parameters[0]

    def is_last(self) -> bool:
        """Return whether this is the last bucket of a backward pass."""
        return self._index == self._bucket_count - 1

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer.

        Args:
            buffer: flat and contiguous, with the present buffer's number of elements, dtype, layout
                and device.

        Raises:
            TypeError: it has another dtype or layout.
            ValueError: it has another number of elements or device, or is not contiguous.
        """
        buffer = self._checked_buffer(buffer)
        for name in ("dtype", "layout"):
            wanted, got = getattr(self.buffer(), name), getattr(buffer, name)
            if got != wanted:
                raise TypeError(
                    f"GradBucket.set_buffer: buffer must have {name} {wanted}, got {got}"
                )
        self._buffer = buffer

    # ---- further methods -------------------------------------------------------------------------

    def numel(self) -> int:
        """Return the number of elements."""
        return self.buffer().numel()

    def dtype(self) -> torch.dtype:
        """Return the dtype of the gradients."""
        return self.buffer().dtype

    def device(self) -> torch.device:
        """Return the device of the gradients."""
        return self.buffer().device

    def is_sparse(self) -> bool:
        """Return whether the bucket holds one sparse gradient. The buffer is then this gradient."""
        return self.buffer().layout is not torch.strided

    def bucket_count(self) -> int:
        """Return the number of buckets."""
        return self._bucket_count

    def offsets(self) -> list[int]:
        """Return each gradient's offset in the buffer, in elements."""
        return list(self.layout().offsets)

    def lengths(self) -> list[int]:
        """Return the number of elements of each gradient."""
        return list(self.layout().lengths)

    def sizes(self) -> list[torch.Size]:
        """Return the shape of each gradient."""
        return list(self.layout().sizes)

    def strides(self) -> list[tuple[int, ...]]:
        """Return the strides of each gradient, in elements."""
        return list(self.layout().strides)

    def sparse_grad_indices(self) -> Tensor | None:
        """Return the indices of a sparse gradient, if they are known in advance."""
        return self._sparse_grad_indices

    def layout(self) -> BucketLayout:
        """Return the layout: each gradient's place in the buffer."""
        if self._layout is None:
            self._layout = BucketLayout(self._parameters)
        return self._layout

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of a tensor like the buffer, as a view."""
        if flat.layout is not torch.strided:
            return [flat]
        if self._parameters[0].is_complex() and not flat.is_complex():
            flat = torch.view_as_complex(flat.view(-1, 2))  # as DDP stores complex gradients
        return self.layout().views(flat)

    def process_group(self) -> dist.ProcessGroup | None:
        """Return the ranks to average over; None means the default group."""
        return self._process_group

    # ---- one pass over memory --------------------------------------------------------------------

    def scaled_buffer(self, scale: float) -> Tensor:
        """Multiply the buffer by ``scale`` in place, and return it.

        A call before :meth:`buffer` saves a pass over memory if the gradients are not gathered yet.
        """
        return self.buffer() if scale == 1.0 else self.buffer().mul_(scale)

    def flatten(
        self, *, scale: float = 1.0, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return the gradients in another flat tensor, scaled and cast in one pass over memory.

        The bucket's own buffer stays unchanged.

        Args:
            scale: the factor, applied in float32 (float64 for float64 gradients).
            dtype: the result's dtype; by default the bucket's.
            out: memory for the result, of shape ``(elements,)``, or None. Its dtype is the
                result's. Written.

        Raises:
            TypeError: the bucket is sparse or complex, or ``dtype`` differs from that of ``out``.
            ValueError: ``out`` has another length or shares memory with the buffer.
        """
        with torch.no_grad():
            return bucket_ops.flatten([self.buffer()], scale=scale, dtype=dtype, out=out)

    @property
    def sources_stay(self) -> bool:
        """Whether :meth:`sources` stay unchanged until the hook's result is complete."""
        return True

    def sources(self) -> Sequence[Tensor]:
        """Return the gradients for ``flatten``, in the order of the buffer.

        These are the buffer, or the gradients themselves if they are not gathered yet.
        """
        return [self.buffer()]

    def sample(self, most: int) -> Tensor | None:
        """Return up to ``most`` values of this rank, evenly spaced: a flat view without a copy.

        The values come from the buffer, or from the largest gradient if gradients are not gathered
        yet. None if that is empty, sparse, complex or not contiguous.
        """
        return evenly_spaced(self.buffer(), most)

    def result_buffer(self) -> Tensor | None:
        """Return memory of the buffer's shape and dtype for a result, or None if there is none.

        It may contain the gradients.
        """
        return self.buffer()

    def _source(self) -> _C.ReducerBucket | None:
        """The gradients for C++, if they are not gathered yet."""
        return None

    # ---- conversion and copies -------------------------------------------------------------------

    @classmethod
    def from_torch(cls, bucket: Any, process_group: dist.ProcessGroup | None = None) -> Self:
        """Make a bucket over PyTorch's: the same buffer and parameters, nothing copied.

        Raises:
            TypeError: ``bucket`` is not a bucket of PyTorch's.
        """
        if not isinstance(bucket, dist.GradBucket):
            raise TypeError(
                "GradBucket: bucket must be a GradBucket of torch_commhook or torch.distributed, "
                f"got {_C.type_name(bucket)}"
            )
        self = cls.__new__(cls)  # DDP's buckets are consistent: no checks needed
        self._parameters = bucket.parameters()
        self._buffer = bucket.buffer()
        self._index = bucket.index()
        self._bucket_count = _C.bucket_count(bucket)
        self._sparse_grad_indices = _C.sparse_grad_indices(bucket)
        self._process_group = process_group
        self.memory = None
        self._layout = None
        return self

    @classmethod
    def wrap(
        cls, bucket: GradBucket | dist.GradBucket, process_group: dist.ProcessGroup | None = None
    ) -> GradBucket:
        """Return the bucket itself if it is ours, or else :meth:`from_torch` of it.

        With ``process_group``, the result has that group: one of ours is then copied, and shares
        its buffer.

        Raises:
            TypeError: ``bucket`` is neither kind of bucket.
        """
        if not isinstance(bucket, cls):
            return cls.from_torch(bucket, process_group)
        if process_group is not None:
            bucket = copy.copy(bucket)
            bucket._process_group = process_group
        return bucket

    def to_torch(self) -> dist.GradBucket:
        """Make PyTorch's bucket over this one: the same buffer and parameters, nothing copied.

        Its ``gradients()`` ignores strides: gradients of permuted parameters come out permuted.
        """
        return _C.make_grad_bucket(
            self._index,
            self._bucket_count,
            self.buffer(),
            self._parameters,
            self._sparse_grad_indices,
        )

    def _class_of_copies(self) -> type[GradBucket]:
        return type(self)

    def _settings(self) -> dict[str, Any]:
        """The arguments of a copy, beside its parameters and buffer."""
        return {
            "index": self._index,
            "bucket_count": self._bucket_count,
            "sparse_grad_indices": self._sparse_grad_indices,
            "process_group": self._process_group,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        # A process group belongs to one process; a copy in another has the default group.
        settings = {**self._settings(), "process_group": None, "buffer": self.buffer()}
        return partial(self._class_of_copies(), **settings), (self._parameters,)

    def __copy__(self) -> GradBucket:
        make = self._class_of_copies()
        return make(self._parameters, buffer=self.buffer(), **self._settings())

    def __deepcopy__(self, memo: dict[int, Any]) -> GradBucket:
        settings = self._settings()
        indices = copy.deepcopy(settings.pop("sparse_grad_indices"), memo)
        return self._class_of_copies()(
            copy.deepcopy(self._parameters, memo),
            buffer=self.buffer().detach().clone(),
            sparse_grad_indices=indices,
            **settings,
        )

    def __repr__(self) -> str:
        return (
            f"GradBucket({self._index} of {self._bucket_count}: {len(self._parameters)} parameters,"
            f" {self.buffer().numel()} elements of {self.buffer().dtype} on {self.buffer().device})"
        )

    # ---- construction ----------------------------------------------------------------------------

    def _checked_buffer(self, buffer: Tensor) -> Tensor:
        _check_floating("buffer", buffer)
        device = self._parameters[0].device
        if buffer.device != device:
            raise ValueError(
                f"GradBucket: buffer must be on the parameters' device {device}, "
                f"got {buffer.device}"
            )
        if buffer.layout is not torch.strided:
            if len(self._parameters) != 1 or buffer.shape != self._parameters[0].shape:
                raise ValueError(
                    "GradBucket: a sparse buffer must be the gradient of the one parameter, of "
                    f"shape {tuple(self._parameters[0].shape)}, got shape {tuple(buffer.shape)} "
                    f"for {len(self._parameters)} parameters"
                )
            return buffer
        check_buffer("GradBucket", buffer, sum(each.numel() for each in self._parameters))
        return buffer

    def _buffer_of(self, gradients: list[Tensor | None], buffer: Tensor | None) -> Tensor:
        if buffer is None and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # otherwise hooks outside this mode could not write
                return self._buffer_of(gradients, buffer)
        if len(gradients) != len(self._parameters):
            raise ValueError(
                f"GradBucket: gradients must be {len(self._parameters)}, one for each parameter, "
                f"got {len(gradients)}"
            )
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                _check_floating(f"gradients[{i}]", gradient)
        first = next((gradient for gradient in gradients if gradient is not None), None)
        if first is not None and first.layout is not torch.strided and len(gradients) == 1:
            if buffer is not None:
                raise ValueError("GradBucket: a sparse gradient has no buffer, got one")
            return self._checked_buffer(first)
        dtype = self._parameters[0].dtype if first is None else first.dtype
        filled = [
            torch.zeros_like(parameter, dtype=dtype) if gradient is None else gradient.detach()
            for gradient, parameter in zip(gradients, self._parameters, strict=True)
        ]
        if buffer is not None:
            self._checked_buffer(buffer)
        with torch.no_grad():
            if not dtype.is_complex:
                return self.layout().flatten(filled, out=buffer)
            # The operators do not support complex tensors.
            pieces = [piece.reshape(-1) for piece in self.layout().in_memory_order(filled)]
            return torch.cat(pieces) if buffer is None else torch.cat(pieces, out=buffer)


def evenly_spaced(values: Tensor, most: int) -> Tensor | None:
    """As :meth:`GradBucket.sample`, for one tensor."""
    if values.layout is not torch.strided or not values.is_floating_point():
        return None
    if not values.is_contiguous() or not values.numel():
        return None
    return values.detach().view(-1)[:: -(-values.numel() // most)]


def _check_floating(name: str, value: Any) -> None:
    check_tensor("GradBucket", name, value)
    if not (value.dtype in bucket_ops.BUCKET_DTYPES or value.is_complex()):
        raise TypeError(
            f"GradBucket: {name} must be of dtype float64, float32, float16, bfloat16 or complex, "
            f"got {value.dtype}"
        )


# ---- assigns parameters to buckets ---------------------------------------------------------------


#: As in DDP: a small first bucket, so that communication begins early in backward.
FIRST_BUCKET_BYTES = 1 << 20


def assign_buckets(
    parameters: Sequence[Tensor], sparse: Sequence[bool], capacity_bytes: int
) -> list[list[int]]:
    """Return the indices of the parameters in each bucket, as DDP fills its own.

    Parameters keep the given order, those with gradients of one dtype and device together. A bucket
    is full when it reaches its capacity, which for the first is at most 1 MiB. A parameter with a
    sparse gradient has a bucket of its own.
    """
    limits = [min(FIRST_BUCKET_BYTES, capacity_bytes), capacity_bytes]
    gradients = [_like_gradient(parameter) for parameter in parameters]
    return dist._compute_bucket_assignment_by_size(gradients, limits, list(sparse))[0]


def _like_gradient(parameter: Tensor) -> Tensor:
    """A tensor with the size and dtype of a parameter's gradient, without memory of its own."""
    dtype = gradient_dtype(parameter)
    if dtype == parameter.dtype:
        return parameter
    return torch.empty((), dtype=dtype, device=parameter.device).expand(parameter.shape)


def split_by_kind(
    parameters: Sequence[Tensor], sparse: Sequence[bool] | None = None
) -> list[list[int]]:
    """Return the indices of parameters whose gradients have one dtype and device each.

    In the given order. A parameter with a sparse gradient is alone.
    """
    kinds: dict[object, list[int]] = {}
    for i, parameter in enumerate(parameters):
        alone = sparse is not None and sparse[i]
        kind = gradient_dtype(parameter), parameter.device
        kinds.setdefault(i if alone else kind, []).append(i)
    return list(kinds.values())


# ---- checks of a hook's result for a bucket of the reducer ---------------------------------------
#
# For DDP's reducer ``csrc/runtime/hooks/hook_result.cpp`` checks the same, with the same messages.


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
