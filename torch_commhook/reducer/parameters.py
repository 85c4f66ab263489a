"""The parameters of a reducer: checks of their gradients, and writes to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_commhook.native.bucket_ops import GRADIENT_DTYPES
from torch_commhook.native.tensor_checks import check_dense
from torch_commhook.reducer.buckets import destinations


class ReducerParameters:
    """The parameters whose gradients a reducer averages, by number.

    Args:
        named_parameters: names and parameters that require grad.
        sparse: the names of parameters with sparse gradients.

    Attributes:
        names: the parameters' names.
        tensors: the parameters; empty once the reducer is closed.
        sparse: for each parameter, whether its gradients are sparse.
    """

    def __init__(
        self, named_parameters: Sequence[tuple[str, Tensor]], sparse: frozenset[str]
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.tensors = [parameter for _, parameter in named_parameters]
        self.sparse = [name in sparse for name in self.names]

    def __len__(self) -> int:
        return len(self.names)

    def write_missing(
        self, numbers: Sequence[int], gradients: Sequence[Tensor], used: Tensor
    ) -> None:
        """Write the gradients of some parameters, except those that no rank has used."""
        is_used = used.tolist()
        with torch.no_grad():
            for number, gradient in zip(numbers, gradients, strict=True):
                parameter = self.tensors[number]
                if not is_used[number]:
                    continue
                if self.sparse[number]:
                    parameter.grad = gradient
                else:
                    destinations([parameter])[0].copy_(gradient)

    def check_gradients(self, op: str, numbers: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Check gradients, one for each of some parameters.

        Raises:
            TypeError, ValueError: a number of no parameter, or a gradient of another kind or shape.
        """
        if len(numbers) != len(gradients):
            raise ValueError(
                f"{op}: numbers must be as many as gradients, {len(gradients)}, got {len(numbers)}"
            )
        for number, gradient in zip(numbers, gradients, strict=True):
            if not 0 <= number < len(self.tensors):
                raise ValueError(
                    f"{op}: numbers must be from 0 to {len(self.tensors) - 1}, got {number}"
                )
            name = f"the gradient of parameter {number}"
            if not self.sparse[number]:
                check_dense(op, name, gradient, GRADIENT_DTYPES)
            elif gradient.layout is not torch.sparse_coo:
                raise TypeError(f"{op}: {name} must be sparse, got layout {gradient.layout}")
            shape = self.tensors[number].shape
            if gradient.shape != shape:
                raise ValueError(
                    f"{op}: {name} must be of sizes {list(shape)}, got {list(gradient.shape)}"
                )

    def check_layouts(self, numbers: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Refuse gradients with an unexpected layout.

        Raises:
            TypeError: one is dense instead of sparse, or the reverse.
        """
        for number, gradient in zip(numbers, gradients, strict=True):
            expected = torch.sparse_coo if self.sparse[number] else torch.strided
            if gradient.layout is not expected:
                raise TypeError(
                    f"torch_commhook: the gradient of parameter '{self.names[number]}' must "
                    f"have layout {expected}, got {gradient.layout}; sparse gradients are "
                    "those of nn.Embedding and nn.EmbeddingBag with sparse=True, whose weight "
                    "is used nowhere else"
                )
