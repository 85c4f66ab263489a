"""One backward of our reducer in eager code, with a hook in Python or in C++."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.buckets.grad_bucket import hook_on_bucket, scaled_result
from torch_commhook.collectives.futures import has_streams
from torch_commhook.memory.unsent import (
    BucketResult,
    add_unsent_to_errors,
    make_unsent_table,
    without_unused,
)
from torch_commhook.metrics import BucketTraffic
from torch_commhook.reducer.buckets import BucketState, ReducerBucket
from torch_commhook.reducer.parameters import NoAgreement, ReducerState
from torch_commhook.step.attached_hook import DRAIN_SECONDS, Attached, HookCall
from torch_commhook.step.step_group import RunningBackward, StepGroup

_ALONE = NoAgreement()

#: As ``DRAIN_SECONDS``, after a collective has used up its timeout.
_LATE_SECONDS = 0.5


class EagerStep:
    """One step: a backward whose gradients a hook averages.

    Attributes:
        attached: the hook, even if another one is attached meanwhile.
        agreement: the ranks' agreement on the step.
        cpp: the running hook, if it is in C++: to be notified of full buckets.
        has_begun: whether the ranks know about the step.
    """

    #: Whether all gradients stay unchanged until the ranks have agreed.
    _writes_late = False

    def __init__(self, attached: Attached, reducer: ReducerState) -> None:
        self.attached = attached
        self._group = group = reducer.group
        self.agreement: StepGroup | NoAgreement = _ALONE if attached.keeps_ranks_apart else group
        self.cpp: _C.ReducerRun | None = None
        self.has_begun = False
        self._reducer = reducer
        self._buckets = reducer._buckets
        self._parameters = reducer.parameters
        self._next = 0  # the next bucket to start
        self._starting = False
        self._calls: list[HookCall] = []  # of the started buckets
        self._averaged: list[Tensor] = []  # the results of a hook in Python, before post-hooks

    def begin(self, on_step: Callable[[bool], None]) -> None:
        """Begin the step, once, on all ranks."""
        if not self.has_begun:
            self.has_begun = True
            on_step(True)
            self.agreement.begin()

    def choose(self) -> None:
        """Find out which hook it is to be, where that is due; see :meth:`Attached.choose`."""
        self.attached.choose()

    def run_in_cpp(self) -> None:
        """Let C++ run the hook, if it and the buckets need no Python."""
        hook, buckets = self.attached.cpp_hook, self._buckets
        if hook is not None and all(b.in_own_dtype and not b.dtype.is_complex for b in buckets):
            own = self.attached.own_group
            groups = [self._group.group_for(b.device) if own is None else own for b in buckets]
            self.cpp = _C.ReducerRun(hook, [bucket.native for bucket in buckets], groups)

    def has_started(self, number: int) -> bool:
        """Whether the hook was started on the bucket of a parameter."""
        started = self._next if self.cpp is None else self.cpp.started
        return any(number in bucket.members for bucket in self._buckets[:started])

    # ---- the hook on a bucket --------------------------------------------------------------------

    def start_full(self) -> None:
        """Run the hook on full buckets, in order."""
        if self._starting:
            return
        self._starting = True  # another thread may fill a bucket meanwhile
        while self._next < len(self._buckets) and self._buckets[self._next].pending == 0:
            self._start(self._buckets[self._next])
        self._starting = False

    def _start_all(self) -> None:
        """Run the hook on all remaining buckets."""
        while self._next < len(self._buckets):
            self._start(self._buckets[self._next])

    def _start(self, state: BucketState, gradients: list[Tensor] | None = None) -> None:
        """Run the hook on the next bucket."""
        self._next += 1
        count = len(self._buckets)
        group = self._group.group_for(state.device)
        where = hook_on_bucket(self.attached.name, state.index, count)
        # A parameter that no rank uses keeps its gradient; so do those of a rank that has joined.
        # Nor may the bucket be the gradients' own memory if compiled code is to write them.
        state.is_apart = gradients is not None or state.pending > 0
        state.take_gradients(gradients)
        bucket = self._bucket(state, count, group)
        if state.sparse:
            self._check_layouts(state)
        try:
            call = self.attached.start(bucket, where, in_order=True)
        except TypeError:  # an unexpected layout may be the cause
            self._check_layouts(state)
            raise
        self._calls.append(call)

    def _bucket(self, state: BucketState, count: int, group: dist.ProcessGroup) -> ReducerBucket:
        return ReducerBucket(state, count, group)

    def _check_layouts(self, state: BucketState) -> None:
        self._parameters.check_layouts(state.members, state.native.gradients())

    def _result(self, state: BucketState, call: HookCall) -> Tensor:
        """Wait for the hook's result, check it, and run the post-hooks."""
        result = call.wait(self._group.timeout)
        if call.local is None:
            self._averaged.append(result)
            return result
        keeps = self.attached.keeps_error and state.pending
        self._averaged.append(result.clone() if keeps else result)  # post-hooks may write to it
        return self.attached.bucket_hooks.after(call.bucket, result, call.local, call.where)

    # ---- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Finish after the last gradient: wait for the hook, agree with the ranks, and write."""
        if self.cpp is None:
            late = self._results()
            traffic = [call.traffic for call in self._calls]
        else:
            late = self._results_of_cpp(self.cpp)
            traffic = [
                BucketTraffic(bucket.numel, bucket.dtype, sent, sent)
                for bucket, sent in zip(self._buckets, self.cpp.bytes_sent(), strict=True)
            ]
        used = self._parameters.locally_used(self._buckets, self.agreement)
        self.agreement.commit(used)
        self._apply(late, used, traffic)

    def _apply(
        self,
        late: Sequence[tuple[BucketState, Tensor]],
        used: Tensor,
        traffic: Sequence[BucketTraffic],
    ) -> None:
        """Apply a step that has succeeded on all ranks.

        Args:
            late: results to write, each with its bucket.
            used: whether any rank has used each parameter: uint8, on the CPU.
            traffic: the traffic of each bucket.
        """
        attached, count = self.attached, len(self._buckets)
        scale = self._factor(late, used) if attached.hook.scales_steps else 1.0
        together = not attached.keeps_ranks_apart
        if together:
            attached.memory.count_step()
        self._write(late, scale, used)
        if together:
            self._keep_unsent(used)
            for index, of_bucket in enumerate(traffic):
                attached.count_bucket(index, count, of_bucket, first=index == 0)
        self._parameters.forget()

    def _results_of_cpp(self, cpp: _C.ReducerRun) -> list[tuple[BucketState, Tensor]]:
        """Wait for a hook in C++, which writes its results.

        Returns:
            The buckets with parameters without a gradient, and their results.
        """
        late = [bucket for bucket in self._buckets if bucket.pending]
        try:
            seconds = self._group.timeout.total_seconds()
            results = cpp.finish([bucket.index for bucket in late], seconds)
        except TypeError as error:
            self.raise_known_cause(error)
            raise
        return list(zip(late, results, strict=True))

    def raise_known_cause(self, error: BaseException) -> None:
        """Raise the cause of a C++ hook's error on the last started bucket, if it is known."""
        if self.cpp is None or not isinstance(error, TypeError):
            return
        bucket = self._buckets[self.cpp.started - 1]
        if bucket.native.gradients():
            self._check_layouts(bucket)

    def _results(self) -> list[tuple[BucketState, Tensor]]:
        """Run the hook on the remaining buckets, and write results that need not wait.

        Returns:
            The other buckets and their results: those with parameters without a gradient, and all
            buckets if results are to be scaled.
        """
        self._start_all()
        late = []
        for state, call in zip(self._buckets, self._calls, strict=True):
            result = self._result(state, call)
            if self._writes_late or state.pending or self.attached.hook.scales_steps:
                late.append((state, result))
            else:
                state.write(result, 1.0)  # while other collectives are running
        return late

    def _write(
        self, late: Sequence[tuple[BucketState, Tensor]], scale: float | Tensor, used: Tensor
    ) -> None:
        """Write the results that had to wait for the other ranks."""
        for state, result in late:
            if isinstance(scale, Tensor):
                scaled = scaled_result(result, scale, state.dtype)
            elif state.pending == 0 and not state.sparse:
                state.write(result, scale)
                continue
            else:
                scaled = result if scale == 1.0 else scaled_result(result, scale, state.dtype)
            if state.pending == 0:
                state.write(scaled, 1.0)
            else:
                self._write_some(state, scaled, used)

    def _write_some(self, state: BucketState, result: Tensor, used: Tensor) -> None:
        """Write a result of which some parameters have no gradient."""
        numbers, pieces = state.members, state.pieces(result)
        if state.given is not None:
            numbers, pieces = state.write_given(pieces)
        self._parameters.write_missing(numbers, pieces, used)

    def _factor(
        self, results: Sequence[tuple[BucketState, Tensor]], used: Tensor
    ) -> float | Tensor:
        """The factor of the results. It stays on its device: nothing waits for it."""
        found = self._step_scale(results, used)
        if found is None:
            return 1.0
        return found if has_streams(found.device) else float(found)

    def _step_scale(
        self, results: Sequence[tuple[BucketState, Tensor]], used: Tensor
    ) -> Tensor | None:
        """The hook's factor of all results that go into gradients."""
        applied = []
        for bucket, result in results:
            if bucket.pending == 0:
                applied.append(result)
            elif bucket.sparse:
                applied.append(result * used[bucket.members[0]].to(result.device))
            else:
                lengths = bucket.layout.lengths
                applied.append(without_unused(result.view(-1), used, bucket.members, lengths))
        return self.attached.step_scale(applied)

    def _keep_unsent(self, used: Tensor, *, zeros_sent: bool = False) -> None:
        """Let the hook remember results that are not written: no rank has used the parameter."""
        errors, results, gradients, table = self._unsent_table(zeros_sent=zeros_sent)
        if table:
            add_unsent_to_errors(errors, results, gradients, used, table)

    def _unsent_table(
        self, *, zeros_sent: bool = False
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int]]:
        """As :func:`make_unsent_table`, for buckets with parameters without a gradient."""
        return make_unsent_table(
            [
                BucketResult(
                    state.members,
                    state.memory,
                    averaged,
                    [None] * len(state.members) if zeros_sent else state.left_from_before(),
                )
                for state, averaged in zip(self._buckets, self._averaged, strict=False)
                if state.pending
            ]
        )

    def run_post_accumulate_hooks(self) -> None:
        """Run the hooks that see the gradients once all are written."""
        around = self.attached.bucket_hooks
        if around.has_post_accumulate_hooks and self.cpp is None:
            for call in self._calls:
                around.done(call.bucket, call.where)

    def take_part_with_zeros(self) -> None:
        """Take part in the other ranks' steps with zeros, and write nothing."""
        while self._next < len(self._buckets):
            state = self._buckets[self._next]
            self._start(state, [state.zeros(parameter) for parameter in state.parameters])
        for state, call in zip(self._buckets, self._calls, strict=True):
            self._result(state, call)
        used = torch.zeros(len(self._parameters), dtype=torch.uint8, device="cpu")
        self._group.commit(used)
        self.attached.memory.count_step()
        if self._group.shares_used:  # otherwise all ranks use all parameters
            self._keep_unsent(used, zeros_sent=True)

    # ---- failure ---------------------------------------------------------------------------------

    def drain(self, error: BaseException) -> None:
        """Wait for running collectives after an error in a step. Raises only for a signal."""
        self.attached.second_stages.give_up(error)
        # If one collective has used up its timeout, the others have too.
        patient = isinstance(error, Exception) and not isinstance(error, TimeoutError)
        seconds = DRAIN_SECONDS if patient else _LATE_SECONDS
        deadline = time.monotonic() + seconds
        if self.cpp is not None:
            with suppress(Exception):  # a consequence of the failure
                self.cpp.drain(seconds)
        for call in self._calls:
            call.drain(deadline)

    def drop(self) -> None:
        """Release the hook's inputs and results, even if an exception references the step."""
        self._calls.clear()
        self._averaged.clear()


class EagerBackward:
    """A backward that the autograd engine runs, or a step in which this rank only takes part.

    Attributes:
        number: its number among the backward passes.
        step: the step in which a hook averages the gradients. None: they stay this rank's own.
        task: the engine's number of the innermost backward.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.step: EagerStep | None = None
        self.task: int | None = None
        self._outermost: int | None = None
        self._running: RunningBackward | None = None

    def enter(self, task: int, running: RunningBackward) -> None:
        """Note a gradient in this backward, or in one nested in it or around it."""
        if not running.is_nested:
            self._outermost = task
        self._running = running
        self.task = task

    def was_left(self, running: RunningBackward, task: int | None = None) -> bool:
        """Whether an exception has ended it, judged by the backward that runs now.

        Args:
            running: the outermost backward on this thread.
            task: the engine's number of the calling backward, if there is one.
        """
        is_another = (
            task is not None and not running.is_nested and self._outermost not in (None, task)
        )
        return is_another or running.has_left(self._running)

    def end(self) -> None:
        """Note its end: it averages nothing any more."""
        self.step = self.task = self._outermost = self._running = None
