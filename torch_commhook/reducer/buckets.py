"""The reducer's buckets: their parameters, and the gradients that hooks get."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.buckets.grad_bucket import evenly_spaced
from torch_commhook.buckets.layout import BucketLayout, gradient_dtype
from torch_commhook.memory.bucket_memory import BucketMemory, BucketWithMemory
from torch_commhook.native import bucket_ops


class BucketState:
    """One of a reducer's buckets, over the steps.

    Attributes:
        index: the bucket's number.
        members: the numbers of its parameters in the model.
        parameters: the parameters.
        largest: the largest contiguous one of them; of all if none is contiguous.
        pending: the number of parameters without a gradient so far in this backward.
        arrived: the parameters with a gradient, in their places; None for the others.
        as_views: whether gradients stay in the bucket's memory. Not if their dtype is another one
            than the parameters': C++ makes that memory in the parameters' dtype.
        in_own_dtype: whether the gradients have the parameters' dtype.
        is_apart: whether gradients that are views must stay unchanged until the result is known.
        native: in eager code, the gradients on their way to a hook and back.
        given: the gradients of compiled code, in their places, while it runs a hook; None in eager
            code. They are written instead of the parameters'.
        memory: the hook's memory of the bucket, for a hook of the library.
    """

    def __init__(
        self,
        index: int,
        members: Sequence[int],
        parameters: Sequence[Tensor],
        *,
        sparse: bool,
        as_views: bool,
    ) -> None:
        self.index = index
        self.members = list(members)
        self.parameters = list(parameters)
        self.sparse = sparse
        self.layout = BucketLayout(self.parameters)
        self.numel = self.layout.numel
        self.dtype = gradient_dtype(self.parameters[0])
        self.in_own_dtype = all(each.dtype == self.dtype for each in self.parameters)
        self.device = self.parameters[0].device
        self.largest = max(self.parameters, key=lambda p: (p.is_contiguous(), p.numel()))
        # Their gradients may be lazy conjugates, or the lazily negated imaginary part of a number.
        self._lazy = [each for each in parameters if each.is_complex() or each.numel() == 1]
        self.as_views = as_views and self.in_own_dtype
        self.memory: BucketMemory | None = None
        self.native = _C.ReducerBucket(self.parameters, sparse, self.as_views)
        self.reset()

    def reset(self) -> None:
        """Prepare for the gradients of the next backward."""
        self.pending = len(self.parameters)
        self.arrived: list[Tensor | None] = [None] * len(self.parameters)
        self.is_apart = False
        self.given: list[Any] | None = None
        if not torch.compiler.is_dynamo_compiling():
            self.native.drop_gradients()

    def set_arrived(self, missing: set[int]) -> None:
        """Note which parameters' gradients are missing at the end of an eager backward."""
        self.pending = sum(number in missing for number in self.members) if missing else 0
        if missing:
            self.arrived = [
                None if number in missing else parameter
                for number, parameter in zip(self.members, self.parameters, strict=True)
            ]

    def gradients(self) -> list[Tensor]:
        """The gradients, for a traced hook; zeros for missing ones."""
        # Compiled autograd knows the tensors that it gives its hooks, but no other path to the
        # parameters.
        arrived: list[Any] = self.parameters if self.pending else self.arrived
        gradients: list[Tensor | None] = [parameter.grad for parameter in arrived]
        if any(gradient is None for gradient in gradients):
            return [
                self.zeros(parameter) if gradient is None else gradient
                for gradient, parameter in zip(gradients, self.parameters, strict=True)
            ]
        return gradients  # type: ignore[return-value]

    def largest_gradient(self) -> Tensor | None:
        """The gradient of the largest parameter."""
        gradient = self.largest.grad
        if self.given is not None:
            place = next(i for i, each in enumerate(self.parameters) if each is self.largest)
            gradient = self.given[place]
        return gradient

    def left_from_before(self) -> list[Tensor | None]:
        """For each parameter without a gradient in this backward, that of an earlier one."""
        if self.pending == 0:
            return [None] * len(self.parameters)
        return [
            parameter.grad if arrived is None else None
            for parameter, arrived in zip(self.parameters, self.arrived, strict=True)
        ]

    def zeros(self, parameter: Tensor) -> Tensor:
        """A gradient of zeros for one of the parameters."""
        if not self.sparse:
            return torch.zeros_like(parameter, dtype=self.dtype)
        rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[1:], dtype=self.dtype)
        return torch.sparse_coo_tensor(
            rows,
            values,
            parameter.shape,
            dtype=self.dtype,
            device=parameter.device,
            check_invariants=False,
        )

    def pieces(self, result: Tensor) -> list[Tensor]:
        """Each parameter's part of a result, as a view."""
        return [result] if self.sparse else self.layout.views(result)

    def take_gradients(self, others: list[Tensor] | None) -> None:
        """Take the parameters' gradients for a hook, with zeros for missing ones; or ``others``."""
        for parameter in self._lazy:  # kernels cannot write to such gradients
            gradient = parameter.grad
            if gradient is not None and (gradient.is_conj() or gradient.is_neg()):
                parameter.grad = gradient.resolve_conj().resolve_neg()
        if others is None and self.pending and not self.in_own_dtype:
            others = self.gradients()
        self.native.take_gradients(others, self.is_apart)

    def write(self, result: Tensor, scale: float) -> None:
        """Write a result into the gradients of all parameters, scaled and cast."""
        if self.given is None and not (self.in_own_dtype or self.sparse):
            destinations(self.parameters)  # C++ would make missing ones in the parameters' dtype
        self.native.write(result, scale, self.given)

    @torch.no_grad()
    def write_given(self, pieces: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
        """Write the given gradients. Returns the numbers and the pieces of the others."""
        assert self.given is not None
        left: tuple[list[int], list[Tensor]] = [], []
        for number, gradient, piece in zip(self.members, self.given, pieces, strict=True):
            if gradient is None:
                left[0].append(number)
                left[1].append(piece)
            else:
                gradient.copy_(piece)
        return left


class _BucketOfState(BucketWithMemory):
    """A bucket that gathers its gradients when a hook asks for them.

    So the hook's first operation (a scale, a cast into another buffer) is part of the same pass
    over memory.
    """

    def __init__(
        self, state: BucketState, bucket_count: int, process_group: dist.ProcessGroup
    ) -> None:
        self._state = state
        self._parameters = state.parameters
        self._layout = state.layout
        self._index = state.index
        self._bucket_count = bucket_count
        self._process_group = process_group
        self._sparse_grad_indices = None
        self.memory = state.memory
        self._gathered = False

    def numel(self) -> int:
        return self._state.numel

    def dtype(self) -> torch.dtype:
        return self._state.dtype

    def device(self) -> torch.device:
        return self._state.device

    def is_sparse(self) -> bool:
        return self._state.sparse

    def set_buffer(self, buffer: Tensor) -> None:
        super().set_buffer(buffer)
        self._gathered = True

    def buffer(self) -> Tensor:
        return self._buffer if self._gathered else self.scaled_buffer(1.0)

    def scaled_buffer(self, scale: float) -> Tensor:
        with torch.no_grad():
            if self._gathered:
                return super().scaled_buffer(scale)
            self._buffer = self._gather(scale)
            self._gathered = True
            return self._buffer

    def flatten(
        self, *, scale: float = 1.0, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        if self._gathered:
            return super().flatten(scale=scale, dtype=dtype, out=out)
        return self._flatten(scale, dtype, out)

    def sources(self) -> Sequence[Tensor]:
        if self._gathered:
            return super().sources()
        return self._state.layout._permute(self._gradients_as_they_lie())

    def result_buffer(self) -> Tensor | None:
        return self._buffer if self._gathered else None

    def _gradients_as_they_lie(self) -> Sequence[Tensor]:
        raise NotImplementedError

    def _gather(self, scale: float) -> Tensor:
        """The gradients in the bucket's own buffer, scaled."""
        ordered = self._state.layout._permute(self._gradients_as_they_lie())
        if self._state.dtype.is_complex:  # the operators do not support it
            return torch.cat([piece.reshape(-1) for piece in ordered]) * scale
        return bucket_ops.flatten(ordered, scale=scale, dtype=self._state.dtype)

    def _flatten(self, scale: float, dtype: torch.dtype | None, out: Tensor | None) -> Tensor:
        """Gather the gradients into another buffer, with scale and cast."""
        raise NotImplementedError


class ReducerBucket(_BucketOfState):
    """One of the reducer's buckets in eager code."""

    def __init__(
        self, state: BucketState, bucket_count: int, process_group: dist.ProcessGroup
    ) -> None:
        super().__init__(state, bucket_count, process_group)
        if state.sparse:
            self._buffer = state.native.gradients()[0]
            self._gathered = True

    def result_buffer(self) -> Tensor | None:
        # If all gradients are views of the buffer, nothing is gathered.
        state = self._state
        is_there = state.as_views and not state.is_apart
        return self.buffer() if is_there else super().result_buffer()

    @property
    def sources_stay(self) -> bool:
        return self._gathered or self._state.given is None  # compiled code reuses memory

    def sample(self, most: int) -> Tensor | None:
        if self._gathered:
            return super().sample(most)
        gradient = self._state.largest_gradient()
        return None if gradient is None else evenly_spaced(gradient, most)

    def _gradients_as_they_lie(self) -> Sequence[Tensor]:
        return self._state.native.gradients()

    def _gather(self, scale: float) -> Tensor:
        state = self._state
        return state.native.gather(scale) if state.in_own_dtype else super()._gather(scale)

    def _flatten(self, scale: float, dtype: torch.dtype | None, out: Tensor | None) -> Tensor:
        return self._state.native.flatten(scale, dtype, out)

    def _source(self) -> _C.ReducerBucket | None:
        return self._state.native if self._state.in_own_dtype and not self._gathered else None


class TracedBucket(_BucketOfState):
    """One of the reducer's buckets while a compiler traces: with the averages, for hooks."""

    def __init__(
        self,
        state: BucketState,
        gradients: list[Tensor],
        bucket_count: int,
        process_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(state, bucket_count, process_group)
        # With dynamic shapes these would be variables: hooks choose by them, and put them in text.
        self._index = operator.index(state.index)
        self._numel = operator.index(state.numel)
        self._gradients = gradients
        if state.sparse:
            self._buffer = gradients[0]
            self._gathered = True

    def numel(self) -> int:
        return self._numel

    def _gradients_as_they_lie(self) -> Sequence[Tensor]:
        return self._gradients


def destinations(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters' gradients; missing ones are created."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, dtype=gradient_dtype(parameter))
    return [parameter.grad for parameter in parameters]  # type: ignore[misc]
