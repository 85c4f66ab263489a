"""The reducer's buckets: which parameters they hold, and their gradients on the way to a hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C, _ops
from torch_commhook.attached import Running
from torch_commhook.bucket import BucketLayout, GradBucket

#: As in DDP: a small first bucket, so that communication begins early in backward.
FIRST_BUCKET_BYTES = 1 << 20


def assign_buckets(
    parameters: Sequence[Tensor], sparse: Sequence[bool], capacity_bytes: int
) -> list[list[int]]:
    """Indices of the parameters in each bucket, as DDP fills its own.

    Parameters come in the order given, those of one dtype and device together; a bucket is full
    once it has reached its capacity, which for the first is at most 1 MiB. A parameter whose
    gradient is sparse has a bucket of its own.
    """
    limits = [min(FIRST_BUCKET_BYTES, capacity_bytes), capacity_bytes]
    return dist._compute_bucket_assignment_by_size(list(parameters), limits, list(sparse))[0]


class BucketState:
    """One of a reducer's buckets, over the steps.

    Attributes:
        index: of the bucket.
        members: the numbers of its parameters in the model.
        parameters: the parameters.
        pending: how many of them have no gradient yet in this backward.
        arrived: those that have one, in their place; None for the others.
        bucket: what the hook was given in this backward.
        running: what it has given.
    """

    __slots__ = (
        "arrived",
        "bucket",
        "device",
        "dtype",
        "index",
        "layout",
        "members",
        "numel",
        "parameters",
        "pending",
        "running",
        "sparse",
        "storage",
        "views",
    )

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
        self.dtype = self.parameters[0].dtype
        self.device = self.parameters[0].device
        self.storage: Tensor | None = None
        #: The gradients as views of the storage, where they are to stay there.
        self.views: list[Tensor] | None = None
        if as_views and not sparse:
            self.views = self.layout.views(self.make_storage())
        self.reset()

    def reset(self) -> None:
        """Wait for the gradients of the next backward."""
        self.pending = len(self.parameters)
        self.arrived: list[Tensor | None] = [None] * len(self.parameters)
        self.running: Running | None = None
        self.bucket: ReducerBucket | None = None

    def make_storage(self) -> Tensor:
        """The memory of the bucket's buffer, which stays from step to step."""
        if self.storage is None:
            self.storage = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            _C.prefer_huge_pages(self.storage)
        return self.storage

    def gradients(self) -> list[Tensor]:
        """The gradients; zeros for those that are missing."""
        # What compiled autograd gives its hooks is known to it; other ways to the parameters are
        # not.
        traced = torch.compiler.is_dynamo_compiling() and not self.pending
        arrived: list[Any] = self.arrived if traced else self.parameters
        gradients: list[Tensor | None] = [parameter.grad for parameter in arrived]
        if any(gradient is None for gradient in gradients):
            return [
                self.zeros(parameter) if gradient is None else gradient
                for gradient, parameter in zip(gradients, self.parameters, strict=True)
            ]
        return gradients  # type: ignore[return-value]

    def zeros(self, parameter: Tensor) -> Tensor:
        """A gradient of zeros for one of the parameters."""
        if not self.sparse:
            return torch.zeros_like(parameter)
        rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[1:])
        return torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)

    def pieces(self, result: Tensor) -> list[Tensor]:
        """What each parameter gets of a result, as views of it."""
        return [result] if self.sparse else self.layout.views(result)

    def write(self, result: Tensor, parameters: Sequence[Tensor]) -> None:
        """Bring a result into the gradients of all parameters, cast on the way."""
        with torch.no_grad():
            if self.sparse:
                parameters[0].grad = result
            elif self.views is None or torch.compiler.is_dynamo_compiling():
                self._copy(result, destinations(parameters))
            else:
                self._keep(result)
                for parameter, view in zip(parameters, self.views, strict=True):
                    if parameter.grad is not view:
                        parameter.grad = view

    def _copy(self, result: Tensor, gradients: Sequence[Tensor]) -> None:
        if result.is_complex():
            torch._foreach_copy_(list(gradients), self.layout.views(result))
        else:
            _ops.unflatten_into(result, self.layout._permute(gradients))

    def _keep(self, result: Tensor) -> None:
        """Bring a result into the storage that the gradients are views of."""
        storage = self.make_storage()
        if result.data_ptr() == storage.data_ptr() and result.dtype == storage.dtype:
            return
        if result.is_complex():
            storage.copy_(result)
        else:
            _ops.unflatten_into(result, [storage])


class ReducerBucket(GradBucket):
    """A bucket whose gradients are gathered when they are asked for.

    So that what a hook does first with them (scale, cast into another buffer) is the same pass over
    memory.
    """

    def __init__(
        self,
        state: BucketState,
        gradients: list[Tensor],
        bucket_count: int,
        process_group: Any,
    ) -> None:
        self._state = state
        self._gradients: list[Tensor] | None = gradients
        self._parameters = state.parameters
        self._layout = state.layout
        self._index = state.index
        self._bucket_count = bucket_count
        self._process_group = process_group
        self._sparse_grad_indices = None
        if state.sparse:
            self._buffer = gradients[0]
            self._gradients = None

    def numel(self) -> int:
        return self._state.numel

    def dtype(self) -> torch.dtype:
        return self._state.dtype

    def device(self) -> torch.device:
        return self._state.device

    def is_sparse(self) -> bool:
        return self._state.sparse

    def buffer(self) -> Tensor:
        return self._buffer if self._gradients is None else self._gather(1.0)

    def scaled_buffer(self, scale: float) -> Tensor:
        if self._gradients is not None:
            return self._gather(scale)
        with torch.no_grad():
            return super().scaled_buffer(scale)

    def flatten(
        self, *, scale: float = 1.0, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        if self._gradients is None:
            return super().flatten(scale=scale, dtype=dtype, out=out)
        ordered = self.layout()._permute(self._gradients)
        with torch.no_grad():
            return _ops.flatten(ordered, scale=scale, dtype=dtype, out=out)

    def _gather(self, scale: float) -> Tensor:
        gradients, state = self._gradients, self._state
        assert gradients is not None
        with torch.no_grad():
            ordered = state.layout._permute(gradients)
            if torch.compiler.is_compiling() and state.dtype.is_complex:
                self._buffer = torch.cat([piece.reshape(-1) for piece in ordered]) * scale
            elif torch.compiler.is_compiling():
                self._buffer = _ops.flatten(ordered, scale=scale, dtype=state.dtype)
            elif state.dtype.is_complex:  # which the operators do not take
                self._buffer = state.make_storage()
                torch._foreach_copy_(state.layout.views(self._buffer), gradients)
                self._buffer.mul_(scale)
            elif state.views is None or not _any_same(gradients, state.views):
                self._buffer = _ops.flatten(ordered, scale=scale, out=state.make_storage())
            else:
                self._buffer = state.make_storage()
                others = [
                    (view, gradient)
                    for view, gradient in zip(state.views, gradients, strict=True)
                    if view is not gradient
                ]
                if others:
                    torch._foreach_copy_([view for view, _ in others], [g for _, g in others])
                if scale != 1.0:
                    self._buffer.mul_(scale)
        self._gradients = None
        return self._buffer


def _any_same(gradients: list[Tensor], views: list[Tensor]) -> bool:
    return any(gradient is view for gradient, view in zip(gradients, views, strict=True))


def destinations(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of parameters, made where somebody has taken them away since."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
    return [parameter.grad for parameter in parameters]  # type: ignore[misc]
