"""A model as far as hooks mind it: how many elements, and in which parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from torch_commhook.planning.buckets import BUCKET_CAPS_MB, bucket_sizes, filled_buckets

Shape = tuple[int, ...]
#: Matrices of a model of which only the size is known: a few in each of some layers.
_MATRICES = 48


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model.

    Attributes:
        shape: of it.
        name: as ``named_parameters()`` has it; None where nobody has said.
    """

    shape: Shape
    name: str | None = None

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Model:
    """A model whose gradients are averaged, in float32.

    Attributes:
        elements: of all parameters.
        parameters: in the order of ``named_parameters()``; None where only the size is known, and
            the model is taken to be 48 square matrices.
    """

    elements: int
    parameters: tuple[Parameter, ...] | None = None

    @classmethod
    def of(cls, module: nn.Module) -> Model:
        """That of a module, on any device: its parameters that get gradients.

        Raises:
            ValueError: no parameter gets a gradient.
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
        """One with these parameters.

        Raises:
            ValueError: they have no elements.
        """
        elements = sum(each.numel for each in parameters)
        if not elements:
            raise ValueError("a model must have a parameter with elements that gets a gradient")
        return cls(elements, tuple(parameters))

    def bucket_sizes(self, bucket_cap_mb: Sequence[float] = BUCKET_CAPS_MB) -> list[int]:
        """Elements of each bucket, in the order of a backward.

        Args:
            bucket_cap_mb: of each bucket, in MiB; the last is for all that follow.
        """
        if self.parameters is None:
            return bucket_sizes(self.elements, bucket_cap_mb)
        return filled_buckets([each.numel for each in reversed(self.parameters)], bucket_cap_mb)

    def listed(self) -> tuple[Parameter, ...]:
        """The parameters; without names where only the size is known."""
        if self.parameters is not None:
            return self.parameters
        return tuple(Parameter(shape) for shape in square_shapes(self.elements, self.elements))

    def sample(self, most: int) -> list[Shape]:
        """Shapes of some parameters, the last ones of the model, with ``most`` elements or fewer.

        A parameter that alone has more is cut to fewer rows.
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
                # No dimension: a scalar is a vector of one element.
                found.append((rows, *each.shape[1:]))
                most -= rows * row
            if most <= 0:
                break
        return found


def square_shapes(elements: int, model_elements: int, shards: int = 1) -> list[Shape]:
    """Shapes of so many elements of a model that is mostly square matrices.

    Args:
        elements: of a rank.
        model_elements: of the whole model.
        shards: those of each matrix, of which the rank has one.
    """
    side = max(1, math.isqrt(min(elements * shards, model_elements // _MATRICES)))
    height = -(-side // shards)
    rows, rest = divmod(elements, side)
    heights = [height] * (rows // height) + [rows % height] * (rows % height > 0)
    return [*((height, side) for height in heights), *[(rest,)] * (rest > 0)]
