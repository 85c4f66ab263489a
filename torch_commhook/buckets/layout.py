"""The places of a list of parameters' gradients in one flat buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_commhook import _C
from torch_commhook.native import bucket_ops


def _memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The permutation that makes a dense but permuted tensor contiguous; None for all others."""
    if tensor.is_contiguous():
        return None
    strides, sizes = tensor.stride(), tensor.shape
    order = sorted(range(tensor.dim()), key=lambda d: (strides[d], sizes[d]), reverse=True)
    return tuple(order) if tensor.permute(order).is_contiguous() else None


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient: that of ``Tensor.grad_dtype``."""
    own = parameter.grad_dtype if parameter.is_leaf else None
    return own or parameter.dtype


class BucketLayout:
    """The places of a list of parameters' gradients in one flat buffer.

    Gradients follow one another without gaps, in the order of the parameters. A gradient has its
    parameter's strides if these are dense (channels_last, a transposed weight), and is then copied
    in memory order. Otherwise it has row-major strides. The layout depends on the parameters only,
    so every rank has the same.

    Args:
        parameters: tensors; only their shapes, strides, dtypes and devices are read.

    Attributes:
        offsets: each gradient's offset, in elements.
        lengths: the number of elements of each gradient.
        sizes: the shape of each gradient.
        strides: the strides of each gradient, in elements.
        numel: the total number of elements.

    Example:
        >>> layout = BucketLayout([torch.zeros(2, 3), torch.zeros(4)])
        >>> layout.numel, layout.offsets
        (10, [0, 6])
        >>> layout.flatten([torch.ones(2, 3), torch.zeros(4)])
        tensor([1., 1., 1., 1., 1., 1., 0., 0., 0., 0.])
    """

    __slots__ = ("_orders", "_permuted", "lengths", "numel", "offsets", "sizes", "strides")

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        parameters = checked_list("BucketLayout", "parameters", parameters)
        for i, parameter in enumerate(parameters):
            check_tensor("BucketLayout", f"parameters[{i}]", parameter)
        self.offsets: list[int] = []
        self.lengths: list[int] = []
        self.sizes: list[torch.Size] = []
        self.strides: list[tuple[int, ...]] = []
        self._orders: list[tuple[int, ...] | None] = []
        self.numel = 0
        for parameter in parameters:
            order = _memory_order(parameter)
            dense = order is not None or parameter.is_contiguous()
            self.offsets.append(self.numel)
            self.lengths.append(parameter.numel())
            self.sizes.append(parameter.shape)
            like = (
                parameter
                if dense
                else torch.empty(parameter.shape, dtype=torch.float32, device="meta")
            )
            self.strides.append(tuple(like.stride()))
            self._orders.append(order)
            self.numel += parameter.numel()
        self._permuted = any(order is not None for order in self._orders)

    def __len__(self) -> int:
        """Return the number of gradients."""
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BucketLayout):
            return NotImplemented
        return self.sizes == other.sizes and self.strides == other.strides

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"BucketLayout({len(self)} gradients, {self.numel} elements)"

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the gradients as views of a flat buffer of ``numel`` elements.

        Raises:
            ValueError: the buffer is not one-dimensional and contiguous, or has another length.
        """
        check_tensor("BucketLayout", "buffer", buffer)
        check_buffer("BucketLayout", buffer, self.numel)
        places = zip(self.offsets, self.lengths, strict=True)
        pieces = [buffer.narrow(0, offset, length) for offset, length in places]
        if torch.compiler.is_compiling():  # compilers support no writes to as_strided views
            forms = zip(pieces, self.sizes, self._orders, strict=True)
            return [_in_shape(piece, size, order) for piece, size, order in forms]
        strided = zip(pieces, self.sizes, self.strides, strict=True)
        return [piece.as_strided(size, stride) for piece, size, stride in strided]

    def in_memory_order(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients permuted so that their row-major order is the buffer's.

        Arguments for ``flatten`` and ``unflatten_into``: a gradient with its parameter's memory
        order is then contiguous.

        Raises:
            ValueError: a gradient has another shape than its parameter, or their number differs.
        """
        gradients = checked_list("BucketLayout", "gradients", gradients)
        if len(gradients) != len(self):
            raise ValueError(
                f"BucketLayout: gradients must be {len(self)}, one for each parameter, "
                f"got {len(gradients)}"
            )
        for i, (gradient, size) in enumerate(zip(gradients, self.sizes, strict=True)):
            if gradient.shape != size:
                raise ValueError(
                    f"BucketLayout: gradients[{i}] must have its parameter's shape {tuple(size)}, "
                    f"got {tuple(gradient.shape)}"
                )
        return self._permute(gradients)

    def _permute(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Permute without the checks of :meth:`in_memory_order`, for gradients of autograd."""
        if not self._permuted:
            return gradients
        return [
            gradient if order is None else gradient.permute(order)
            for gradient, order in zip(gradients, self._orders, strict=True)
        ]

    def flatten(
        self,
        gradients: Sequence[Tensor],
        *,
        scale: float = 1.0,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Copy gradients into a flat buffer, in one pass (``bucket_ops.flatten``)."""
        return bucket_ops.flatten(
            self.in_memory_order(gradients), scale=scale, dtype=dtype, out=out
        )

    def unflatten_into(
        self, buffer: Tensor, gradients: Sequence[Tensor], *, scale: float = 1.0
    ) -> None:
        """Copy a flat buffer into gradients, in one pass (``bucket_ops.unflatten_into``)."""
        bucket_ops.unflatten_into(buffer, self.in_memory_order(gradients), scale=scale)


def _in_shape(piece: Tensor, size: torch.Size, order: tuple[int, ...] | None) -> Tensor:
    if order is None:
        return piece.view(size)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return piece.view([size[d] for d in order]).permute(inverse)


def checked_list(what: str, name: str, values: Any) -> list[Any]:
    """A user's list of tensors, checked and copied to a list."""
    # A tensor is also a sequence of its rows, which is never intended.
    if isinstance(values, Tensor) or not isinstance(values, Iterable):
        raise TypeError(f"{what}: {name} must be a list of tensors, got {_C.type_name(values)}")
    return list(values)


def check_tensor(what: str, name: str, value: object) -> None:
    """Raise a TypeError if a user's value is not a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{what}: {name} must be a tensor, got {_C.type_name(value)}")


def check_buffer(what: str, buffer: Tensor, numel: int) -> None:
    """Raise a ValueError if a buffer is not flat and contiguous, with ``numel`` elements."""
    if buffer.dim() != 1 or buffer.numel() != numel or not buffer.is_contiguous():
        raise ValueError(
            f"{what}: buffer must be contiguous, of shape ({numel},), "
            f"got shape {tuple(buffer.shape)} with strides {buffer.stride()}"
        )
