"""A backward of our reducer under compiled autograd: what the compiler calls, and what it traces.

A hook is two operators in the compiled code: one starts it on a bucket, and one waits for all of
its results and writes them. Both run the code of an eager step (:class:`GraphStep`), so nothing of
a hook, of its memory or of its collectives is traced. Operators find their reducer by its key. They
write to a tensor that outlives the step: this keeps their order, and compilers remove work without
a visible effect. Python may still run a part of a backward, as in eager code: everything if nothing
compiles it, and the rest after a graph break. It then calls the same operators.

Operators take no sparse gradients. With these, the hook runs after the compiled part: the last
parameter's hook calls it through a disabled function. This costs one graph break, and no code of
the library is compiled piecewise on its own (``skip_dynamo``).
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.external_utils import call_hook

from torch_commhook.buckets.grad_bucket import hook_on_bucket
from torch_commhook.collectives.futures import has_streams
from torch_commhook.native.runtime import skip_dynamo
from torch_commhook.reducer.buckets import BucketState, ReducerBucket, TracedBucket
from torch_commhook.reducer.eager_step import EagerStep
from torch_commhook.reducer.parameters import ReducerState
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.step_group import found_by

# ---- the reducer's interface to compiled autograd ------------------------------------------------


# Compiled autograd calls hooks through this. Otherwise a graph break would compile it with the hook
# inside.
skip_dynamo(call_hook, with_callees=False)


@torch.compiler.assume_constant_result
def expected_hooks(key: str) -> int:
    """The number of a reducer's hooks that the compiled backward around this call will call.

    Compiled autograd collects the hooks of a backward before it runs it, and passes them to the
    function that it compiles. While that is traced, the result is a constant: another set of hooks
    is another function.

    Returns:
        The number; 0 outside of compiled autograd.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "runtime_wrapper" and "hooks" in frame.f_locals:
            own = found_by(key).parameters.called
            return sum(hook in own for hook in frame.f_locals["hooks"])
        frame = frame.f_back
    return 0


# ---- operators -----------------------------------------------------------------------------------


def _reducer(op: str, key: str) -> ReducerState:
    reducer = found_by(key)
    if not isinstance(reducer, ReducerState):
        raise ValueError(f"{op}: key must be that of a reducer, got {key!r}")
    return reducer


def start_bucket(
    token: Tensor, gradients: list[Tensor], missing: list[int], index: int, key: str
) -> None:
    """Start the hook on a bucket: :meth:`ReducerState.start_in_graph`.

    Args:
        token: the reducer's. Orders the operators.
        gradients: those of the bucket's parameters that have one, in the order of the parameters.
        missing: the places of the others in the bucket, ascending.
        index: the bucket's number. A step starts its buckets in order.
        key: the reducer's key.

    Raises:
        ValueError: the key, or the number of gradients or elements, does not fit the reducer.
        Exception: the hook raised it.
    """
    _reducer("start_bucket", key).start_in_graph(index, gradients, missing)


def finish_step(token: Tensor, gradients: list[Tensor], key: str) -> None:
    """Finish a step, and write its results: :meth:`ReducerState.finish_in_graph`.

    Args:
        token, key: as for :func:`start_bucket`.
        gradients: those of all buckets. Written.

    Raises:
        ValueError: the key, or the number of gradients or elements, does not fit the reducer.
        RuntimeError: not all buckets have been started; or another rank failed.
        Exception: the hook raised it.
    """
    _reducer("finish_step", key).finish_in_graph(gradients)


@torch.library.custom_op("commhook::note_backward", mutates_args=("token",))
def note_backward(token: Tensor, key: str) -> None:
    """Run :meth:`LocalSteps.note_backward` of the attached hook."""
    attached = _reducer("note_backward", key).attached
    if attached is not None and attached.local_steps is not None:
        attached.local_steps.note_backward()


def _nothing(*arguments: Any) -> None:
    """The operators' fake: they write to existing tensors, and return nothing."""


# Not custom_op(): its checks take a microsecond for each gradient.
_library = torch.library.Library("commhook", "FRAGMENT")
_library.define(
    "start_bucket(Tensor(a!) token, Tensor[] gradients, int[] missing, int index, str key) -> ()"
)
_library.define("finish_step(Tensor(a!) token, Tensor(b!)[] gradients, str key) -> ()")
for _function in (start_bucket, finish_step):
    _library.impl(_function.__name__, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"commhook::{_function.__name__}", _nothing, lib=_library)
note_backward.register_fake(_nothing)


# ---- a step that operators run -------------------------------------------------------------------


class GraphStep(EagerStep):
    """A step of a backward under compiled autograd, as operators run it.

    The gradients are those of the compiled code, and not yet the parameters'. The buckets are its
    own: traced code writes to the reducer's, once the compiled code around an operator has ended.
    """

    def __init__(self, attached: Attached, reducer: ReducerState) -> None:
        super().__init__(attached, reducer)
        self._of_reducer = list(self._buckets)
        self._buckets = [copy(state) for state in self._buckets]

    def reset(self) -> None:
        """Release the buckets' gradients."""
        for state in self._buckets:
            state.reset()

    def start_bucket(self, index: int, gradients: list[Tensor], missing: list[int]) -> None:
        """Start the hook on the next bucket; see :func:`start_bucket`."""
        if index != self._next or index >= len(self._buckets):
            raise ValueError(
                f"start_bucket: index must be that of the next of {len(self._buckets)} buckets, "
                f"{self._next}, got {index}"
            )
        state = self._buckets[index]
        count = len(state.parameters)
        places = [place for place in missing if 0 <= place < count]
        if places != missing or len(missing) + len(gradients) != count:
            raise ValueError(
                f"start_bucket: gradients and missing must be {count} in all, with places below "
                f"{count}, got {len(gradients)} gradients and {missing}"
            )
        given: list[Any] = list(gradients)
        state.arrived = list(state.parameters)
        for place in missing:
            parameter = state.parameters[place]
            state.arrived[place] = None
            before = parameter.grad
            given.insert(place, state.zeros(parameter) if before is None else before)
        state.pending, state.given = len(missing), given
        state.memory = self._of_reducer[index].memory  # a state may be loaded meanwhile
        with torch.no_grad():
            self._start(state, given)

    def _bucket(self, state: BucketState, count: int, group: dist.ProcessGroup) -> ReducerBucket:
        bucket = super()._bucket(state, count, group)
        if has_streams(state.device):  # compiled code may reuse memory that another stream reads
            bucket.buffer()
        return bucket

    def finish_into(self, gradients: list[Tensor]) -> None:
        """Finish the step, and write its results; see :func:`finish_step`."""
        if self._next < len(self._buckets):
            raise RuntimeError(
                f"finish_step: {self._next} of {len(self._buckets)} buckets have been started"
            )
        begin = 0
        for state in self._buckets:
            count = len(state.parameters) - state.pending
            given: list[Any] = gradients[begin : begin + count]
            begin += count
            if state.pending:
                left = iter(given)
                given = [None if each is None else next(left, None) for each in state.arrived]
            state.given = given
        if begin != len(gradients):
            raise ValueError(
                f"finish_step: gradients must be {begin}, as many as buckets were started with, "
                f"got {len(gradients)}"
            )
        self.finish()


# ---- the traced part of a backward ---------------------------------------------------------------


class CompiledStep:
    """The part of a step that a compiler traces: calls of the operators."""

    def __init__(self, attached: Attached, reducer: ReducerState) -> None:
        self.attached = attached
        self._reducer = reducer
        self._buckets = list(reducer._buckets)  # the reducer may be closed meanwhile
        self._next = 0
        self.is_traced = not any(state.sparse for state in self._buckets)

    def start_full(self) -> None:
        """Start the hook on full buckets, in order."""
        if self.is_traced:
            while self._next < len(self._buckets) and self._buckets[self._next].pending == 0:
                self._start()

    def _start(self) -> None:
        state = self._buckets[self._next]
        self._next += 1
        missing = [place for place, each in enumerate(state.arrived) if each is None]
        # With dynamic shapes the number would be a variable.
        index, key = operator.index(state.index), self._reducer.key
        _ops.start_bucket(self._reducer.token, _gradients([state]), missing, index, key)

    def finish(self) -> None:
        """Finish the step, and run the hooks that see the gradients once all are written."""
        while self._next < len(self._buckets):
            self._start()
        has_missing = any(state.pending for state in self._buckets)
        _ops.finish_step(self._reducer.token, _gradients(self._buckets), self._reducer.key)
        if self.attached.bucket_hooks.has_post_accumulate_hooks:
            if has_missing:
                self._run_post_accumulate_hooks_untraced()
            else:
                self._run_post_accumulate_hooks()

    @torch.compiler.disable
    def finish_untraced(self) -> None:
        """Run the step outside the graph."""
        self.finish()

    def _run_post_accumulate_hooks(self) -> None:
        around, count = self.attached.bucket_hooks, len(self._buckets)
        for state in self._buckets:
            group = self._reducer.group.group_for(state.device)
            bucket = TracedBucket(state, state.gradients(), count, group)
            around.done(bucket, hook_on_bucket(self.attached.name, state.index, count))

    @torch.compiler.disable
    def _run_post_accumulate_hooks_untraced(self) -> None:
        """Run them outside the graph, to see all gradients."""
        self._run_post_accumulate_hooks()


_ops = torch.ops.commhook


def _gradients(buckets: Sequence[BucketState]) -> list[Tensor]:
    """The gradients that have arrived in a backward."""
    arrived: list[Any] = [each for state in buckets for each in state.arrived]
    return [each.grad for each in arrived if each is not None]


class CompiledBackward:
    """A backward under compiled autograd.

    Args:
        remaining: the number of its gradients.
        step: the step in which a hook averages them. None: they stay this rank's own.
    """

    def __init__(self, remaining: int, step: CompiledStep | None) -> None:
        self.remaining = remaining
        self.step = step
