"""Buckets of gradients, as communication hooks get them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.buckets.layout import BucketLayout, check_tensor, checked_list
from torch_commhook.native import bucket_ops

if TYPE_CHECKING:
    from typing_extensions import Self


class GradBucket:
    """A bucket of gradients, as a communication hook gets it.

    It has the methods of ``torch.distributed.GradBucket``, can be made from Python, copied and
    pickled, and checks what it is given.

    Args:
        parameters: the parameters whose gradients the bucket holds.
        gradients: one for each parameter, of its shape, or None for a gradient of zeros. They are
            copied into the buffer.
        buffer: flat and contiguous; the bucket shares it. With ``gradients``, it is written.
            Without ``buffer``, a new one is made of the gradients' dtype. A sparse tensor makes a
            sparse bucket, which holds one parameter.
        index: of the bucket, from 0 on.
        bucket_count: how many buckets there are.
        sparse_grad_indices: for a sparse bucket whose indices are known beforehand.
        process_group: the ranks to average over; None for the default group.

    Raises:
        ValueError: neither ``gradients`` nor ``buffer``, lengths, shapes or devices that do not
            fit, or an index outside ``bucket_count``.
        TypeError: an argument that is no tensor, or of a dtype other than float64, float32,
            float16, bfloat16 and complex ones, or sparse gradients beside others.

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
    )

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
        self._layout: BucketLayout | None = None
        if gradients is None and buffer is None:
            raise ValueError("GradBucket: gradients or buffer must be given, got neither")
        if gradients is None:
            assert buffer is not None
            self._buffer = self._checked_buffer(buffer)
        else:
            gradients = checked_list("GradBucket", "gradients", gradients)
            self._buffer = self._buffer_of(gradients, buffer)

    # ---- what PyTorch's GradBucket has -----------------------------------------------------------

    def index(self) -> int:
        """The bucket's index. DDP runs hooks in this order, and bucket 0 holds the last layers."""
        return self._index

    def buffer(self) -> Tensor:
        """All gradients, of shape ``(elements,)``; for a sparse bucket the gradient itself."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """The gradients as views of the buffer, with their parameters' shapes and strides.

        For a sparse bucket, the sparse gradient itself.
        """
        return self.pieces(self.buffer())

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of the gradients."""
        return list(self._parameters)

    def first_parameter(self) -> Tensor:
        """The first of the parameters, by which a bucket can be known."""
        return self._parameters[0]

    def is_last(self) -> bool:
        """Whether no bucket comes after this one in a backward pass."""
        return self._index == self._bucket_count - 1

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another buffer in place of this one.

        Raises:
            TypeError: another dtype or layout than that of the buffer that is there.
            ValueError: another number of elements, another device, or not contiguous.
        """
        buffer = self._checked_buffer(buffer)
        if buffer.dtype != self.buffer().dtype:
            raise TypeError(
                f"GradBucket.set_buffer: buffer must have dtype {self.buffer().dtype}, "
                f"got {buffer.dtype}"
            )
        if buffer.layout != self.buffer().layout:
            raise TypeError(
                f"GradBucket.set_buffer: buffer must have layout {self.buffer().layout}, "
                f"got {buffer.layout}"
            )
        self._buffer = buffer

    # ---- what it keeps to itself there -----------------------------------------------------------

    def numel(self) -> int:
        """Elements in all."""
        return self.buffer().numel()

    def dtype(self) -> torch.dtype:
        """The dtype of the gradients."""
        return self.buffer().dtype

    def device(self) -> torch.device:
        """The device of the gradients."""
        return self.buffer().device

    def is_sparse(self) -> bool:
        """Whether the bucket holds one sparse gradient, which its buffer is then."""
        return self.buffer().layout is not torch.strided

    def bucket_count(self) -> int:
        """How many buckets there are."""
        return self._bucket_count

    def offsets(self) -> list[int]:
        """Elements before each gradient in the buffer."""
        return list(self.layout().offsets)

    def lengths(self) -> list[int]:
        """Elements of each gradient."""
        return list(self.layout().lengths)

    def sizes(self) -> list[torch.Size]:
        """Shape of each gradient."""
        return list(self.layout().sizes)

    def strides(self) -> list[tuple[int, ...]]:
        """Strides of each gradient, in elements."""
        return list(self.layout().strides)

    def sparse_grad_indices(self) -> Tensor | None:
        """The indices of a sparse gradient, where they are known beforehand."""
        return self._sparse_grad_indices

    def layout(self) -> BucketLayout:
        """Where each gradient lies in the buffer."""
        if self._layout is None:
            self._layout = BucketLayout(self._parameters)
        return self._layout

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """What of a tensor like the buffer belongs to each parameter, as views of it."""
        if flat.layout is not torch.strided:
            return [flat]
        if self._parameters[0].is_complex() and not flat.is_complex():
            flat = torch.view_as_complex(flat.view(-1, 2))  # as DDP keeps complex gradients
        return self.layout().views(flat)

    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks to average over; None stands for the default group."""
        return self._process_group

    # ---- one pass over memory --------------------------------------------------------------------

    def scaled_buffer(self, scale: float) -> Tensor:
        """The buffer, multiplied by ``scale`` in place.

        Asked for before :meth:`buffer`, it saves a pass over memory where the gradients are yet to
        be gathered.
        """
        return self.buffer() if scale == 1.0 else self.buffer().mul_(scale)

    def flatten(
        self, *, scale: float = 1.0, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The gradients in another flat tensor, scaled and then cast, in one pass over memory.

        The bucket's own buffer stays as it is.

        Args:
            scale: factor, applied in float32 (float64 for float64 gradients).
            dtype: of the result; by default the bucket's.
            out: written, if given; of shape ``(elements,)``. Its dtype decides.

        Raises:
            TypeError: the bucket is sparse or complex, or ``dtype`` is not that of ``out``.
            ValueError: ``out`` has another length or shares memory with the buffer.
        """
        with torch.no_grad():
            return bucket_ops.flatten([self.buffer()], scale=scale, dtype=dtype, out=out)

    def sources(self) -> Sequence[Tensor]:
        """The gradients where they lie, as ``flatten`` takes them: in the order of the buffer.

        That is the buffer, or the gradients themselves where they are yet to be gathered.
        """
        return [self.buffer()]

    def sample(self, most: int) -> Tensor | None:
        """Up to ``most`` values of this rank's, evenly spaced; a flat view that copies nothing.

        They come from the buffer, or from the largest gradient where the buffer is yet to be
        gathered. None if that is empty, sparse, complex or not contiguous.
        """
        return evenly_spaced(self.buffer(), most)

    def result_buffer(self) -> Tensor | None:
        """Memory of the buffer's shape and dtype for a result; None where a hook is to bring it.

        Its contents may be the gradients.
        """
        return self.buffer()

    def _source(self) -> _C.ReducerBucket | None:
        """Where C++ finds the gradients, if they are yet to be gathered."""
        return None

    # ---- conversion and copies -------------------------------------------------------------------

    @classmethod
    def from_torch(cls, bucket: Any, process_group: dist.ProcessGroup | None = None) -> Self:
        """Our bucket over PyTorch's: the same buffer and parameters, nothing copied.

        Raises:
            TypeError: no bucket of PyTorch's.
        """
        if not isinstance(bucket, dist.GradBucket):
            raise TypeError(
                "GradBucket: bucket must be a GradBucket of torch_commhook or torch.distributed, "
                f"got {_C.type_name(bucket)}"
            )
        self = cls.__new__(cls)  # what DDP made fits together: nothing to check
        self._parameters = bucket.parameters()
        self._buffer = bucket.buffer()
        self._index = bucket.index()
        self._bucket_count = _C.bucket_count(bucket)
        self._sparse_grad_indices = _C.sparse_grad_indices(bucket)
        self._process_group = process_group
        self._layout = None
        return self

    @classmethod
    def wrap(
        cls, bucket: GradBucket | dist.GradBucket, process_group: dist.ProcessGroup | None = None
    ) -> GradBucket:
        """The bucket itself where it is ours, else :meth:`from_torch` of it.

        With ``process_group``, it has that; one of ours is then copied, and shares its buffer.

        Raises:
            TypeError: neither kind of bucket.
        """
        if not isinstance(bucket, cls):
            return cls.from_torch(bucket, process_group)
        if process_group is not None:
            bucket = copy.copy(bucket)
            bucket._process_group = process_group
        return bucket

    def to_torch(self) -> dist.GradBucket:
        """PyTorch's bucket over this one: the same buffer and parameters, nothing copied.

        Its ``gradients()`` knows no strides: gradients of permuted parameters come out permuted.
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

    def __reduce__(self) -> tuple[Any, ...]:
        # A process group belongs to one process; the copy in another has the default group.
        return _unpickle, (
            self._class_of_copies(),
            self._parameters,
            self.buffer(),
            self._index,
            self._bucket_count,
            self._sparse_grad_indices,
        )

    def __copy__(self) -> GradBucket:
        return self._class_of_copies()(
            self._parameters,
            buffer=self.buffer(),
            index=self._index,
            bucket_count=self._bucket_count,
            sparse_grad_indices=self._sparse_grad_indices,
            process_group=self._process_group,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> GradBucket:
        return self._class_of_copies()(
            copy.deepcopy(self._parameters, memo),
            buffer=self.buffer().detach().clone(),
            index=self._index,
            bucket_count=self._bucket_count,
            sparse_grad_indices=copy.deepcopy(self._sparse_grad_indices, memo),
            process_group=self._process_group,
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
        numel = sum(parameter.numel() for parameter in self._parameters)
        if buffer.dim() != 1 or buffer.numel() != numel or not buffer.is_contiguous():
            raise ValueError(
                f"GradBucket: buffer must be contiguous, of shape ({numel},), "
                f"got shape {tuple(buffer.shape)} with strides {buffer.stride()}"
            )
        return buffer

    def _buffer_of(self, gradients: list[Tensor | None], buffer: Tensor | None) -> Tensor:
        if buffer is None and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # or a hook could not write to it elsewhere
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
            # The operators take no complex tensors.
            pieces = [piece.reshape(-1) for piece in self.layout().in_memory_order(filled)]
            return torch.cat(pieces) if buffer is None else torch.cat(pieces, out=buffer)


def evenly_spaced(values: Tensor, most: int) -> Tensor | None:
    """:meth:`GradBucket.sample` of one tensor."""
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


def _unpickle(
    cls: type[GradBucket],
    parameters: list[Tensor],
    buffer: Tensor,
    index: int,
    bucket_count: int,
    sparse_grad_indices: Tensor | None,
) -> GradBucket:
    return cls(
        parameters,
        buffer=buffer,
        index=index,
        bucket_count=bucket_count,
        sparse_grad_indices=sparse_grad_indices,
    )
