"""Describes a model for planning: the number of its elements, and its parameters' shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from torch_commhook.planning.buckets import BUCKET_CAPS_MB, bucket_sizes, filled_buckets

Shape = tuple[int, ...]
#: The number of matrices of a model with nothing known but its size: a few in each of some layers.
_MATRICES = 48


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model.

    Attributes:
        shape: the shape.
        name: the name in ``named_parameters()``; None if unknown.
    """

    shape: Shape
    name: str | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Model:
    """A model with float32 gradients.

    Attributes:
        elements: the number of elements of all parameters.
        parameters: the parameters in the order of ``named_parameters()``; None if only the size is
            known. The model then stands for 48 square matrices.
    """

    elements: int
    parameters: tuple[Parameter, ...] | None = None

    @classmethod
    def of(cls, module: nn.Module) -> Model:
        """The parameters of a module, on any device, that require gradients.

        Raises:
            ValueError: no parameter with elements requires a gradient.
        """
        return cls.of_parameters(
            [
                Parameter(tuple(parameter.shape), name)
                for name, parameter in module.named_parameters()
                if parameter.requires_grad
            ]
        )

    @classmethod
    def of_parameters(cls, parameters: Sequence[Parameter]) -> Model:
        """A model with these parameters.

        Raises:
            ValueError: the parameters have no elements.
        """
        elements = sum(each.numel for each in parameters)
        if not elements:
            raise ValueError("a model must have a parameter with elements that gets a gradient")
        return cls(elements, tuple(parameters))

    def bucket_sizes(self, bucket_cap_mb: Sequence[float] = BUCKET_CAPS_MB) -> list[int]:
        """The elements of each bucket, in the order of a backward.

        Args:
            bucket_cap_mb: the capacity of each bucket, in MiB; the last one counts for all others.
        """
        if self.parameters is None:
            return bucket_sizes(self.elements, bucket_cap_mb)
        return filled_buckets([each.numel for each in reversed(self.parameters)], bucket_cap_mb)

    def listed(self) -> tuple[Parameter, ...]:
        """The parameters, without names if only the size is known."""
        if self.parameters is not None:
            return self.parameters
        return tuple(Parameter(shape) for shape in square_shapes(self.elements, self.elements))

    def sample(self, most: int) -> list[Shape]:
        """The shapes of the model's last parameters, with ``most`` elements or fewer.

        A parameter with more elements has fewer rows.
        """
        most = max(1, min(most, self.elements))
        if self.parameters is None:
            return square_shapes(most, self.elements)
        found: list[Shape] = []
        for each in reversed(self.parameters):
            row = max(1, math.prod(each.shape[1:]))
            rows = min(each.numel // row, most // row)
            if rows == 0 and not found and each.numel:
                rows = 1
            if rows:
                found.append((rows, *each.shape[1:]))  # a scalar becomes a vector of one element
                most -= rows * row
            if most <= 0:
                break
        return found


def square_shapes(elements: int, model_elements: int, shards: int = 1) -> list[Shape]:
    """The shapes of a rank's elements of a model that consists mostly of square matrices.

    Args:
        elements: the number of elements of the rank.
        model_elements: the number of elements of the whole model.
        shards: the number of shards of each matrix; the rank has one of them.
    """
    side = max(1, math.isqrt(min(elements * shards, model_elements // _MATRICES)))
    height = -(-side // shards)
    rows, rest = divmod(elements, side)
    heights = [height] * (rows // height) + [rows % height] * (rows % height > 0)
    return [*((height, side) for height in heights), *[(rest,)] * (rest > 0)]
