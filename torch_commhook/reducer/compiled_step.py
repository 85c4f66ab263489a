"""A backward of our reducer under compiled autograd: what the compiler calls, and what it traces.

Python may still run a part of it, as in eager code: everything if nothing compiles the captured
backward, and the rest after a graph break. A hook that is not marked as traceable runs after the
compiled part: the last parameter's hook calls it through a disabled function. This costs one graph
break, and no code of the library is compiled piecewise on its own (``skip_dynamo``).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch._logging
from torch import Tensor
from torch._dynamo.external_utils import call_hook

from torch_commhook.buckets.grad_bucket import GradBucket, hook_on_bucket, scaled_result
from torch_commhook.collectives import TracedFuture
from torch_commhook.memory.unsent import keep_unsent
from torch_commhook.metrics import TRACED_METER, as_text, from_text
from torch_commhook.native.bucket_ops import check_flat, check_used
from torch_commhook.native.runtime import skip_dynamo
from torch_commhook.reducer.buckets import BucketState, TracedBucket, destinations
from torch_commhook.reducer.eager_step import EagerStep
from torch_commhook.reducer.parameters import ReducerState, missing_in, needs_all
from torch_commhook.step.attached_hook import Attached, HookCall
from torch_commhook.step.step_group import StepGroup, found_by, parameters_changed

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


def start_traced(attached: Attached, bucket: GradBucket, where: str) -> HookCall:
    """Start a hook while a compiler traces; as :meth:`Attached.start`.

    Raises:
        TypeError: the hook returned neither a Future nor a tensor.
    """
    hook = attached.hook
    local = attached.bucket_hooks.before(bucket, where)
    TRACED_METER.active = True
    try:
        dtype = hook.result_dtype(bucket)
        result: Any = hook.average(bucket)
        traffic = TRACED_METER.traffic(bucket.numel(), bucket.dtype())
    finally:
        TRACED_METER.reset()
    if isinstance(result, Tensor):
        future = TracedFuture(lambda: result)
    elif isinstance(result, TracedFuture):
        future = result
    else:
        raise TypeError(
            f"{where}: a traced hook must return a tensor, or the result of a function in "
            f"torch_commhook.collectives, got {type(result).__qualname__}"
        )
    return HookCall(bucket, future, dtype, where, traffic, local)


# ---- operators that must run once a step ---------------------------------------------------------
#
# Work that must happen once a step, compiled or not, is in operators that write to a tensor that
# outlives the step: compilers remove work without a visible effect.


def _group(op: str, name: str) -> StepGroup:
    group = found_by(name)
    if not isinstance(group, StepGroup):
        raise ValueError(f"{op}: name must be that of a group that steps run over, got {name!r}")
    return group


def _reducer(op: str, key: str) -> ReducerState:
    reducer = found_by(key)
    if not isinstance(reducer, ReducerState):
        raise ValueError(f"{op}: key must be that of a reducer, got {key!r}")
    return reducer


@torch.library.custom_op("commhook::begin_step", mutates_args=("token",))
def begin_step(token: Tensor, name: str) -> None:
    """Run :meth:`StepGroup.begin` of the named group."""
    _group("begin_step", name).begin()


@torch.library.custom_op("commhook::leave_out", mutates_args=("used",))
def leave_out(used: Tensor, touched: Tensor, missing: list[int], needs_all: bool, key: str) -> None:
    """Run :meth:`ReducerParameters.leave_out` of the reducer with a key.

    It reads the flags when the step runs, so that other flags need no other code.

    Args:
        used: one flag for each parameter, uint8. Written.
        touched: as :attr:`ReducerParameters.touched`; a compiler knows the flags by it.
        missing: the numbers of parameters.
        needs_all: whether an unused parameter is an error.
        key: the reducer's key.

    Raises:
        TypeError, ValueError: tensors or numbers do not fit the reducer's parameters.
        RuntimeError: a parameter is not used, and ``needs_all`` is True.
    """
    reducer = _reducer("leave_out", key)
    check_used("leave_out", used, missing, "missing")
    check_flat("leave_out", "touched", touched, (torch.uint8,))
    count = len(reducer.parameters)
    if not len(used) == len(touched) == count:
        raise ValueError(
            f"leave_out: used and touched must have {count} elements, got {len(used)} and "
            f"{len(touched)}"
        )
    reducer.parameters.leave_out(used, touched, missing, needs_all=needs_all)


@torch.library.custom_op("commhook::commit_step", mutates_args=("used",))
def commit_step(used: Tensor, results: list[Tensor], name: str) -> None:
    """Run :meth:`StepGroup.commit` of the named group, once ``results`` are known."""
    group = _group("commit_step", name)
    check_flat("commit_step", "used", used, (torch.uint8,))
    group.commit(used)


@torch.library.custom_op("commhook::count_step", mutates_args=("token",))
def count_step(token: Tensor, results: list[Tensor], traffic: str, key: str) -> None:
    """Run :meth:`HookMemory.count_step` of the attached hook, once ``results`` are known.

    The traffic is this code's, in the form of :func:`torch_commhook.metrics.as_text`. If a hook's
    traffic changes from step to step, the code changes with it.
    """
    reducer = _reducer("count_step", key)
    attached = reducer.attached
    if attached is not None:
        buckets = from_text(traffic)
        attached.memory.count_step()
        for index, bucket in enumerate(buckets):
            attached.count_bucket(index, len(buckets), bucket, first=index == 0)


@torch.library.custom_op("commhook::note_backward", mutates_args=("token",))
def note_backward(token: Tensor, key: str) -> None:
    """Run :meth:`LocalSteps.note_backward` of the attached hook."""
    attached = _reducer("note_backward", key).attached
    if attached is not None and attached.local_steps is not None:
        attached.local_steps.note_backward()


@torch.library.custom_op("commhook::write_missing", mutates_args=("token",))
def write_missing(
    token: Tensor, used: Tensor, gradients: list[Tensor], numbers: list[int], key: str
) -> None:
    """Run :meth:`ReducerParameters.write_missing`.

    Whether a parameter without a gradient gets one depends on the other ranks, which no compiler
    can know. The compiled graph does not use these parameters, so the write may happen unseen.

    Raises:
        TypeError, ValueError: gradients or numbers do not fit the reducer's parameters.
    """
    parameters = _reducer("write_missing", key).parameters
    check_used("write_missing", used, numbers, "numbers")
    parameters.check_gradients("write_missing", numbers, gradients)
    parameters.write_missing(numbers, gradients, used)


def _nothing(*arguments: Any) -> None:
    """The operators' fake: they write to existing tensors, and return nothing."""


for _operator in (begin_step, leave_out, commit_step, count_step, note_backward, write_missing):
    _operator.register_fake(_nothing)


# ---- a backward of our reducer under compiled autograd, and the traced part of it ----------------


_log = logging.getLogger(__name__)
_is_compiling = torch.compiler.is_dynamo_compiling


class CompiledStep(EagerStep):
    """A step of a backward under compiled autograd."""

    def begin_traced(self) -> None:
        """Begin the step on all ranks, if a compiler traces and the hook is traceable."""
        if not self.attached.traceable:
            return
        if parameters_changed(self._reducer.key):
            _leave_trace()
        elif self.agreement.size > 1:
            begin_step(self._reducer.token, self._group.name)
            self.has_begun = True

    def start_full(self) -> None:
        if self.attached.traceable:
            super().start_full()

    def _start(self, state: BucketState, gradients: list[Tensor] | None = None) -> None:
        if not _is_compiling():
            super()._start(state, gradients)
            return
        self._next += 1
        count = len(self._buckets)
        group = self._group.group_for(state.device)
        where = hook_on_bucket(self.attached.name, state.index, count)
        bucket = TracedBucket(state, state.gradients(), count, group)
        try:
            call = start_traced(self.attached, bucket, where)
        except Exception:
            _leave_trace()
        self._calls.append(call)

    def finish_traced(self) -> None:
        """Finish the step while a compiler traces; as :meth:`finish`."""
        attached = self.attached
        self._start_all()
        for call in self._calls:
            call.future.start_next()
        calls = zip(self._buckets, self._calls, strict=True)
        results = [self._result(state, call) for state, call in calls]
        used = self._reducer.used
        used.fill_(1)
        missing = missing_in(self._buckets)
        if missing:
            needs = needs_all(self.agreement)
            leave_out(used, self._parameters.touched, missing, needs, self._reducer.key)
        if self.agreement.size > 1:
            commit_step(used, results, self._group.name)
        if attached.hook.scales_steps:
            results = self._scaled(results, used)
        for state, result in zip(self._buckets, results, strict=True):
            if state.pending == 0:
                state.write_traced(result)
        if not attached.keeps_ranks_apart:
            self._count_traced(results)
        has_missing = self._write_missing(results, used)
        self._parameters.forget()
        if has_missing and attached.bucket_hooks.has_post_accumulate_hooks:
            self._run_post_accumulate_hooks_untraced()
        else:
            self.run_post_accumulate_hooks()
        # After an earlier graph break, the step is an existing object. Additions to its lists would
        # have to be made outside of the graph, and not every future can be.
        self.drop()

    def warn_untraced(self) -> None:
        """Log once that Python runs the hook."""
        torch._logging.warning_once(
            _log,
            "hook '%s' is not marked as traceable (torch_commhook.traceable): under compiled "
            "autograd it runs after the compiled backward, as a graph break",
            self.attached.name,
        )

    def _scaled(self, results: list[Tensor], used: Tensor) -> list[Tensor]:
        scale = self._step_scale(list(zip(self._buckets, results, strict=True)), used)
        if scale is None:
            return results
        with torch.no_grad():
            return [
                scaled_result(result, scale, state.dtype)
                for state, result in zip(self._buckets, results, strict=True)
            ]

    def _count_traced(self, results: list[Tensor]) -> None:
        attached = self.attached
        buckets = [call.traffic for call in self._calls]
        if attached.memory.is_empty and not attached.follows_scale:
            attached.traced_steps.add(buckets)
        else:
            count_step(self._reducer.token, results, as_text(buckets), self._reducer.key)

    def _write_missing(self, results: Sequence[Tensor], used: Tensor) -> bool:
        """Write the results of buckets with parameters without a gradient.

        Returns:
            Whether there are such parameters.
        """
        numbers: list[int] = []
        missing: list[Tensor] = []
        for state, result in zip(self._buckets, results, strict=True):
            if state.pending == 0:
                continue
            for number, arrived, piece in zip(
                state.members, state.arrived, state.pieces(result), strict=True
            ):
                if arrived is None:
                    numbers.append(number)
                    missing.append(piece)
                else:
                    with torch.no_grad():
                        destinations([arrived])[0].copy_(piece)
        if not missing:
            return False
        write_missing(self._reducer.token, used, missing, numbers, self._reducer.key)
        if not self.attached.keeps_ranks_apart:
            errors, unsent, gradients, table = self._unsent_table()
            if table:
                keep_unsent(errors, unsent, gradients, used, table)
        return True

    @torch.compiler.disable
    def _run_post_accumulate_hooks_untraced(self) -> None:
        """Run post-accumulate hooks outside the graph, to see all gradients."""
        self.run_post_accumulate_hooks()


class CompiledBackward:
    """A backward under compiled autograd.

    Args:
        remaining: the number of its gradients.
        step: the step in which a hook averages them. None: they stay this rank's own.
    """

    def __init__(self, remaining: int, step: CompiledStep | None) -> None:
        self.remaining = remaining
        self.step = step


@torch.compiler.disable
def _leave_trace() -> NoReturn:
    """Break the graph on an error while a compiler traces, so that Python raises it."""
    raise AssertionError("this is traced, and never run")
