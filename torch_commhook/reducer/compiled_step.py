"""A backward of our reducer under compiled autograd, and the traced part of it.

Python may still run a part of it, as in eager code: everything if nothing compiles the captured
backward, and the rest after a graph break.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch._logging
from torch import Tensor

from torch_commhook.buckets.results import scaled_result
from torch_commhook.memory.unsent import keep_unsent
from torch_commhook.metrics import as_text
from torch_commhook.native.runtime import hook_on_bucket
from torch_commhook.reducer.buckets import BucketState, TracedBucket, destinations
from torch_commhook.reducer.eager_step import EagerStep, StartedBucket
from torch_commhook.reducer.parameter_use import ParameterUse, missing_in, needs_all
from torch_commhook.reducer.parameters import ReducerParameters
from torch_commhook.reducer.tracing import (
    begin_step,
    commit_step,
    count_step,
    leave_out,
    parameters_changed,
    start_traced,
    write_missing,
)
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.step_group import StepGroup

_log = logging.getLogger(__name__)
_is_compiling = torch.compiler.is_dynamo_compiling


class TracedState:
    """The state of a reducer that compiled code changes.

    The changes are visible outside the graph, so a compiler cannot remove them.

    Args:
        key: the reducer's key.
        parameter_count: the number of the reducer's parameters.

    Attributes:
        key: as given.
        token: float32, one element.
        used: for each parameter, whether any rank has used it: uint8.
    """

    def __init__(self, key: str, parameter_count: int) -> None:
        self.key = key
        self.token = torch.zeros(1, dtype=torch.float32, device="cpu")
        self.used = torch.zeros(parameter_count, dtype=torch.uint8, device="cpu")


class CompiledStep(EagerStep):
    """A step of a backward under compiled autograd.

    Args:
        attached, buckets, parameters, use, group: as for :class:`EagerStep`.
        traced: the reducer's :class:`TracedState`.
    """

    def __init__(
        self,
        attached: Attached,
        buckets: Sequence[BucketState],
        parameters: ReducerParameters,
        use: ParameterUse,
        group: StepGroup,
        traced: TracedState,
    ) -> None:
        super().__init__(attached, buckets, parameters, use, group)
        self._traced = traced

    def begin_traced(self) -> None:
        """Begin the step on all ranks, if a compiler traces and the hook is traceable."""
        if not self.attached.traceable:
            return
        if parameters_changed(self._traced.key):
            _leave_trace()
        elif self.agreement.size > 1:
            begin_step(self._traced.token, self._group.name)
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
        self._started.append(StartedBucket(state, call))

    def finish_traced(self) -> None:
        """Finish the step while a compiler traces; as :meth:`finish`."""
        attached = self.attached
        self._start_all()
        for started in self._started:
            started.call.future.start_next()
        results = [self._result(started) for started in self._started]
        used = self._traced.used
        used.fill_(1)
        missing = missing_in(self._buckets)
        if missing:
            leave_out(used, self._use.touched, missing, needs_all(self.agreement), self._traced.key)
        if self.agreement.size > 1:
            commit_step(used, results, self._group.name)
        if attached.scales_steps:
            results = self._scaled(results, used)
        for state, result in zip(self._buckets, results, strict=True):
            if state.pending == 0:
                state.write_traced(result)
        if not attached.keeps_ranks_apart:
            self._count_traced(results)
        has_missing = self._write_missing(results, used)
        self._use.forget()
        if has_missing and attached.stages.has_post_accumulate_hooks:
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
        """The results times the hook's factor."""
        scale = self._step_scale(list(zip(self._buckets, results, strict=True)), used)
        if scale is None:
            return results
        with torch.no_grad():
            return [
                scaled_result(result, scale, state.dtype)
                for state, result in zip(self._buckets, results, strict=True)
            ]

    def _count_traced(self, results: list[Tensor]) -> None:
        """Count the buckets' traffic."""
        attached = self.attached
        buckets = [started.call.traffic for started in self._started]
        if attached.memory.is_empty and not attached.follows_scale:
            attached.traced_steps.add(buckets)
        else:
            count_step(self._traced.token, results, as_text(buckets), self._traced.key)

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
        write_missing(self._traced.token, used, missing, numbers, self._traced.key)
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
