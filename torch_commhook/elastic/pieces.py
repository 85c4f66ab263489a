"""A model's parameters and their optimizer state, split into pieces for a new rank."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

#: One value of an optimizer's state for some elements of a parameter, and whether the value has the
#: parameter's shape. If it has, the values of these elements, flat. Otherwise the whole value.
#: Tensors of more than one element then come with the parameter's first element, since the
#: optimizer needs one of each, and with its last. Plain tuples: a new rank unpickles no class.
Remembered = tuple[Any, bool]

#: Some elements of a parameter: its number, the flat index of the first element, the elements,
#: flat, and each optimizer's state of them by name; None for an optimizer without state.
Part = tuple[int, int, Tensor, list[dict[str, Remembered] | None]]


class Pieces:
    """The elements of all parameters, one after the other.

    Args:
        parameters: the model's parameters, in the same order on all ranks. Parameters that only the
            optimizers have are added.
        optimizers: the optimizers of these parameters.

    Attributes:
        numel: the number of places of all parameters: one for each element, and one for an empty
            parameter.
    """

    def __init__(
        self, parameters: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._optimizers = list(optimizers)
        of_optimizers = (
            each
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        )
        by_id = {id(each): each for each in (*parameters, *of_optimizers)}
        self._parameters = list(by_id.values())
        self._starts = list(accumulate(map(_length, self._parameters), initial=0))
        self.numel: int = self._starts.pop()

    @property
    def nbytes(self) -> int:
        """The bytes of the parameters."""
        return sum(parameter.nbytes for parameter in self._parameters)

    def take(self, first: int, nbytes: int) -> tuple[list[Part], int]:
        """Copy elements from a place on.

        Args:
            first: the place.
            nbytes: the approximate number of bytes; at least one element is copied. A parameter
                that is not contiguous is copied completely.

        Returns:
            The copies, and the place after them.
        """
        parts: list[Part] = []
        at = first
        while at < self.numel and (nbytes > 0 or not parts):
            index = bisect_right(self._starts, at) - 1
            parameter, begin = self._parameters[index], at - self._starts[index]
            end = _length(parameter)
            if parameter.is_contiguous():
                of_element = max(1, self._bytes_of_element(parameter))
                end = min(end, begin + max(1, nbytes // of_element))
            parts.append(self._copied(index, begin, end))
            nbytes -= sum(_bytes_of(parts[-1]))
            at = self._starts[index] + end
        return parts, at

    def whole(self, indices: Collection[int]) -> list[Part]:
        """Copy all elements of some parameters."""
        return [self._copied(index, 0, self._parameters[index].numel()) for index in indices]

    @torch.no_grad()
    def put(self, parts: Sequence[Part]) -> None:
        """Write elements that another rank has copied."""
        for number, first, elements, states in parts:
            parameter = self._parameters[number]
            _write(parameter, first, elements)
            for optimizer, values in zip(self._optimizers, states, strict=True):
                if values is None:
                    optimizer.state.pop(parameter, None)
                    continue
                state = optimizer.state[parameter]
                for name, (value, is_of_elements) in values.items():
                    if is_of_elements:
                        whole = _like(parameter, value, state.get(name))
                        _write(whole, first, value)
                        value = whole
                    state[name] = value
                if first == 0:  # all of these come with the first element
                    for name in state.keys() - values.keys():
                        del state[name]

    def others(self) -> list[dict[Any, Any]]:
        """Each optimizer's state that belongs to no parameter, by name."""
        return [
            {name: value for name, value in each.state.items() if not isinstance(name, Tensor)}
            for each in self._optimizers
        ]

    def put_others(self, others: Sequence[dict[Any, Any]]) -> None:
        """Write the state that another rank's :meth:`others` returned."""
        for optimizer, values in zip(self._optimizers, others, strict=True):
            own = optimizer.state
            for name in [name for name in own if not isinstance(name, Tensor)]:
                del own[name]
            own.update(values)

    def sums(self) -> list[int]:
        """A checksum for each parameter, of its bits and its optimizer state.

        Different bits give different numbers, except with a chance of 1 in billions.
        """
        return [self._sum(parameter) for parameter in self._parameters]

    def _sum(self, parameter: Tensor) -> int:
        total = sum_of_bits(parameter)
        for place, optimizer in enumerate(self._optimizers, 2):
            total += place * _sum_of(optimizer.state.get(parameter, {}))
        return total

    def _bytes_of_element(self, parameter: Tensor) -> int:
        states = (optimizer.state.get(parameter, {}) for optimizer in self._optimizers)
        sizes: list[int] = [
            value.element_size()
            for state in states
            for value in state.values()
            if _goes_along(value, parameter)
        ]
        return parameter.element_size() + sum(sizes)

    def _copied(self, index: int, begin: int, end: int) -> Part:
        parameter = self._parameters[index]
        states: list[dict[str, Remembered] | None] = []
        for optimizer in self._optimizers:
            if parameter not in optimizer.state:
                states.append(None)
                continue
            values: dict[str, Remembered] = {}
            for name, value in optimizer.state[parameter].items():
                if _goes_along(value, parameter):
                    values[name] = _flat(value, begin, end), True
                elif not isinstance(value, Tensor):
                    values[name] = value, False
                elif value.numel() == 1 or begin == 0 or end >= parameter.numel():
                    values[name] = value.detach().clone(), False
            states.append(values)
        return index, begin, _flat(parameter, begin, end), states


def _length(parameter: Tensor) -> int:
    """The number of a parameter's places. Empty parameters may have optimizer state too."""
    return max(1, parameter.numel())


def _goes_along(value: object, parameter: Tensor) -> bool:
    """Whether a value of an optimizer's state has one element for each of the parameter's."""
    return (
        isinstance(value, Tensor)
        and value.numel() > 1
        and value.shape == parameter.shape
        and value.is_contiguous() == parameter.is_contiguous()
    )


def _flat(tensor: Tensor, begin: int, end: int) -> Tensor:
    return tensor.detach().reshape(-1)[begin:end].clone()


def _write(tensor: Tensor, first: int, value: Tensor) -> None:
    if value.numel() == tensor.numel():
        tensor.copy_(value.view(tensor.shape))
    else:
        tensor.view(-1)[first : first + value.numel()].copy_(value)


def _like(parameter: Tensor, value: Tensor, before: object) -> Tensor:
    """A tensor with a value for each of a parameter's elements; ``before`` itself if it fits."""
    if _goes_along(before, parameter):
        assert isinstance(before, Tensor)
        if before.dtype == value.dtype:
            return before
    return torch.zeros_like(parameter, dtype=value.dtype)


def sum_of_bits(tensor: Tensor) -> int:
    """A checksum of a tensor's elements in order, whatever its strides: 32 bits."""
    data: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(data)


def _sum_of(value: Any) -> int:
    """A checksum of a value of an optimizer's state."""
    if isinstance(value, Tensor):
        return sum_of_bits(value)
    if isinstance(value, Mapping):
        value = [each for key in sorted(value, key=str) for each in (str(key), value[key])]
    if isinstance(value, (list, tuple)):
        return sum(place * _sum_of(each) for place, each in enumerate(value, 1))
    return zlib.crc32(repr(value).encode())


def _bytes_of(part: Part) -> Iterator[int]:
    _, _, elements, states = part
    yield elements.nbytes
    for state in states:
        for value, _ in (state or {}).values():
            yield value.nbytes if isinstance(value, Tensor) else 8
