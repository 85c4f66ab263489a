"""The parameters of a reducer: checks, writes, use, and the hooks that report gradients.

Also what steps and compiled code know of a reducer, and the agreement of a rank that is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torch_commhook import _C
from torch_commhook.native.runtime import skip_dynamo
from torch_commhook.reducer.buckets import BucketState, destinations
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.step_group import StepGroup


class ReducerParameters:
    """The parameters whose gradients a reducer averages, by number.

    Each has a post-accumulate-grad hook: C++ counts in eager code, Python if compiled. The hooks
    are registered once, since another thread's backward may be running over them.

    The flags of use are those of a backward, and of earlier ones under no_sync(). A failed step, or
    a backward that an exception ends, does not change them: the gradients that it has written
    differ among ranks until a step averages them.

    Args:
        named_parameters: names and parameters that require grad.
        sparse: the names of parameters with sparse gradients.
        listener: the object that C++ notifies of gradients and full buckets; see ``arrivals.h``.

    Attributes:
        names: the parameters' names.
        tensors: the parameters; empty once the reducer is closed.
        sparse: for each parameter, whether its gradients are sparse.
        arrivals: counts gradients.
        touched: for each parameter, whether a backward may have written to its gradient since the
            last step: uint8, on the CPU. The counter of gradients sets it.
        called: the hooks that compiled autograd calls.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        sparse: frozenset[str],
        listener: _C.ArrivalsListener,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.tensors = [parameter for _, parameter in named_parameters]
        self.sparse = [name in sparse for name in self.names]
        self.arrivals = _C.Arrivals(listener, len(self.names))
        self.touched: Tensor = self.arrivals.touched
        self.all_are_own()
        self.called: set[Callable[..., None]] = set()
        self._handles: list[RemovableHandle] = []
        for number, parameter in enumerate(self.tensors):
            handle: Any = parameter.register_post_accumulate_grad_hook(_nothing)
            self._handles.append(handle)
            _C.count_arrivals(parameter, handle.id, self.arrivals, number)

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

    def check_layouts(self, numbers: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Refuse gradients with an unexpected layout."""
        for number, gradient in zip(numbers, gradients, strict=True):
            expected = torch.sparse_coo if self.sparse[number] else torch.strided
            if gradient.layout is not expected:
                raise TypeError(
                    f"torch_commhook: the gradient of parameter '{self.names[number]}' must "
                    f"have layout {expected}, got {gradient.layout}; sparse gradients are "
                    "those of nn.Embedding and nn.EmbeddingBag with sparse=True, whose weight "
                    "is used nowhere else"
                )

    # ---- use ------------------------------------------------------------------------------------

    def all_are_own(self) -> None:
        """Treat all existing gradients as this rank's own."""
        self.touched.fill_(1)

    def forget(self) -> None:
        """Note that the gradients of earlier backward passes have been averaged."""
        self.touched.zero_()

    def locally_used(
        self, buckets: Sequence[BucketState], agreement: StepGroup | NoAgreement
    ) -> Tensor:
        """Whether this rank has used each parameter: uint8, on the CPU.

        Raises:
            RuntimeError: it has not used all, and the ranks cannot tell each other.
        """
        used = torch.ones(len(self.names), dtype=torch.uint8, device="cpu")
        missing = missing_in(buckets)
        if missing:
            self.leave_out(used, self.touched, missing, needs_all=needs_all(agreement))
        return used

    def leave_out(
        self, used: Tensor, touched: Tensor, missing: Sequence[int], *, needs_all: bool
    ) -> None:
        """Clear the flags of parameters without a gradient.

        Args:
            used: one flag for each parameter: uint8, on the CPU. Written.
            touched: as :attr:`touched`.
            missing: the numbers of the parameters without a gradient in this backward.
            needs_all: whether this rank cannot tell the other ranks.

        Raises:
            RuntimeError: there are such parameters, and the rank cannot tell.
        """
        is_touched = touched.tolist()
        unused = [
            number
            for number in missing
            if not is_touched[number] or self.tensors[number].grad is None
        ]
        if unused and needs_all:
            names = [self.names[number] for number in sorted(unused)]
            raise RuntimeError(
                f"torch_commhook: parameters {names} got no gradient, and over this process group "
                "ranks do not tell each other which they used; freeze them "
                "(requires_grad_(False)) before the hook is attached, or let the loss depend on "
                "them"
            )
        used[unused] = 0

    # ---- hooks ----------------------------------------------------------------------------------

    @property
    def are_removed(self) -> bool:
        """Whether no parameter has a hook any more."""
        return not self._handles

    def renew(
        self, ready_hook: Callable[[str], Callable[[Tensor], None]], buckets: list[int]
    ) -> None:
        """Update the hooks for rebuilt buckets.

        Args:
            ready_hook: returns the function that compiled autograd calls with the named parameter.
            buckets: the bucket of each parameter.
        """
        self.called.clear()
        for name, handle in zip(self.names, self._handles, strict=True):
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                hook = hooks[handle.id] = skip_dynamo(ready_hook(name))
                self.called.add(hook)
        self.arrivals.assign(buckets)

    def remove(self) -> None:
        """Remove the hooks, stop counting, and release the parameters."""
        self.arrivals.close()
        for parameter, handle in zip(self.tensors, self._handles, strict=True):
            _C.stop_counting(parameter)
            handle.remove()
        self._handles.clear()
        self.called.clear()
        self.tensors.clear()


def missing_in(buckets: Sequence[BucketState]) -> list[int]:
    """The numbers of the parameters without a gradient in a backward."""
    return [
        number
        for bucket in buckets
        if bucket.pending
        for number, arrived in zip(bucket.members, bucket.arrived, strict=True)
        if arrived is None
    ]


def needs_all(agreement: StepGroup | NoAgreement) -> bool:
    """Whether all ranks must use all parameters, because they cannot tell each other."""
    return agreement.size > 1 and not agreement.shares_used


def _nothing(parameter: Tensor) -> None:
    pass


class ReducerState:
    """The part of a reducer that its steps know, and compiled code by the reducer's key.

    Compiled code changes the tensors. The changes are visible outside the graph, so a compiler
    cannot remove them.

    Attributes:
        attached: the hook; without one, gradients stay unchanged.
        group: the group of the ranks.
        key: the key by which compiled code finds the reducer.
        parameters: the parameters whose gradients are averaged.
        token: float32, one element.
    """

    attached: Attached | None
    group: StepGroup
    key: str
    parameters: ReducerParameters
    token: Tensor
    _buckets: list[BucketState]

    def start_in_graph(self, index: int, gradients: list[Tensor], missing: list[int]) -> None:
        """Start the hook on a bucket of compiled code; with the first one, begin the step."""
        raise NotImplementedError

    def finish_in_graph(self, gradients: list[Tensor]) -> None:
        """Finish the step of compiled code, and write its gradients."""
        raise NotImplementedError


class NoAgreement:
    """Replaces a :class:`StepGroup` in steps that each rank takes alone."""

    size = 1
    shares_used = False

    def begin(self) -> None:
        """Nothing."""

    def commit(self, used: Tensor) -> None:
        """Do nothing: ``used`` is this rank's."""

    def fail(self, reason: BaseException | str) -> None:
        """Nothing."""

    def fail_with(self, error: BaseException) -> BaseException:
        """Return the error itself."""
        return error
